"""Checks of `kvserver doctor` on the running daemon: whether it answers and is ready, and which process has its HTTP port.

Owns: what the daemon itself and the kernel state of it. Refuses to know: the machine (`checks`), and the storage
(`checks_storage`), which reads the status that `daemon` leaves in the Machine. It imports nothing else of the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import socket
import struct
import urllib.error
import urllib.request
from pathlib import Path

import msgspec

from kvserver import __version__
from kvserver.cli.checks import SERVING_STATES, Finding, Machine, ok, problem, warning
from kvserver.config import Settings, bearer, read_token
from kvserver.protocol import ConfigError, Status, StatusReply, barrier
from kvserver.protocol.client import Client, RequestFailed, has_listener
from kvserver.protocol.status import DaemonStatus

_HELLO_SECONDS = 2.0
_RESTART = "kvserver doctor --bundle FILE shows what it waits for; then restart it"
_LISTENING = "0A"  # in /proc/net/tcp


def daemon(machine: Machine) -> Finding:
    url = machine.settings.endpoint
    if not has_listener(url):
        dead = ", only a dead daemon's socket" if Path(url.removeprefix("ipc://")).exists() else ""
        return warning(f"none at {url}{dead}", _serve_command(machine))
    if why := barrier(url):
        return problem(why, "run this as the daemon's user, and its engines too")
    try:
        with Client(url, timeout=_HELLO_SECONDS) as client:
            hello = client.hello("doctor")
            answer = client.ask(Status(), StatusReply)
    except RequestFailed as error:
        return problem(f"{url} answers: {error}", f"install one version everywhere; this one is {__version__}")
    except TimeoutError:
        if url.startswith("ipc://"):
            return _hangs(f"the daemon at {url}", listener_pid(url))
        return warning(f"none at {url}", _serve_command(machine))
    except Exception as error:  # ZMQ's, for an invalid address
        return problem(f"{url}: {error}", "give --endpoint ipc:///path or tcp://127.0.0.1:port")
    machine.running = msgspec.msgpack.decode(answer.status, type=DaemonStatus)
    return _state_of(
        machine.running, f"kvserver {hello.server_version} answers at {url}, protocol {hello.protocol_version}"
    )


def _state_of(running: DaemonStatus, text: str) -> Finding:
    if not running.ready:
        by_itself = any(tier.required and tier.state not in SERVING_STATES for tier in running.l2)
        fix = "bring that storage back: the daemon becomes ready by itself" if by_itself else _RESTART
        return problem(f"{text}, and is NOT READY: {running.not_ready or '/readyz has the reason'}", fix)
    if running.version != __version__:
        return warning(f"{text}; this is {__version__}", "restart the daemon with the version that is installed")
    if running.serving not in ("", "on"):
        fix = "curl -X POST 'http://HOST:PORT/config/serving?value=on', when the reason for the switch no longer holds"
        return warning(f"{text}; serving is {running.serving}", fix)
    return ok(text)


def engines(machine: Machine) -> Finding:
    """The engines of the daemon that `daemon` found. REQUIRES: that check ran before."""
    if machine.running is None:
        return ok("no daemon answers that knows of any")
    named = [
        " ".join(
            filter(None, (one.instance_id, f"({' '.join((one.engine, one.engine_version))})" if one.engine else ""))
        )
        for one in machine.running.instances
    ]
    alone = [(name, one.private) for name, one in zip(named, machine.running.instances, strict=True) if one.private]
    if alone:
        reasons = "; ".join(f"{name} shares KV with no other: {reason}" for name, reason in alone)
        return warning(
            reasons,
            "adapters/README.md#what-must-agree-and-what-makes-an-engine-private has the setting for each reason",
        )
    return ok(", ".join(named) or "none is connected")


def listener_pid(endpoint: str) -> int:
    """The process that listens there; 0 if there is none, or it is not of this process namespace."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(endpoint.removeprefix("ipc://"))
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return 0
    return int(struct.unpack("3i", peer)[0])


def _hangs(what: str, pid: int) -> Finding:
    """The finding on a daemon that does not answer, with the state that the kernel shows of its process."""
    text = f"{what} does not answer"
    if not pid:
        return problem(text, _RESTART)
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "Tt":
            return problem(f"{text}: process {pid} is stopped (SIGSTOP, or a debugger)", f"kill -CONT {pid}")
        return problem(f"{text}: process {pid} hangs, in state {state}", _RESTART)
    return problem(f"{text}: process {pid}", _RESTART)


def _listens(pid: int, port: int) -> bool:
    """True if the process has a listening TCP socket of that port; False also if its descriptors cannot be read."""
    inodes = set()
    with contextlib.suppress(OSError):
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_rest = line.split()
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{line.split()[9]}]")
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(fd) in inodes:
                    return True
    return False


def _serve_command(machine: Machine) -> str:
    default = Settings(endpoint=machine.settings.endpoint) == machine.settings
    return "kvserver serve" if default else "kvserver serve, with the flags that you gave here"


def http_port(machine: Machine) -> Finding:
    host, port = machine.settings.http_host, machine.settings.http_port
    try:
        token = read_token(machine.settings.http_token_file)
    except ConfigError as error:
        return problem(
            str(error),
            f"(umask 077; openssl rand -hex 32 >{shlex.quote(machine.settings.http_token_file)})",
        )
    if port == 0:
        return ok("any free one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            if running := _who_serves(host, port, token):
                return ok(f"{host}:{port} is served by a running kvserver{running}")
            pid = listener_pid(machine.settings.endpoint)
            if pid and _listens(pid, port):
                return _hangs(f"{host}:{port} is the daemon's, which", pid)
            return problem(f"{host}:{port} is in use by another program", "--http-port 0 uses a free port")
        flags = "--http-port 8080" if error.errno == errno.EACCES else "--http-host 127.0.0.1"
        return problem(f"{host}:{port}: {error.strerror or error}", f"kvserver serve {flags}")
    return ok(f"{host}:{port} is free")


def _who_serves(host: str, port: int, token: str) -> str:
    """ ", boot ID" of a kvserver, or why it is unknown; "" for another program, or without an answer."""
    where = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host
    try:
        request = urllib.request.Request(f"http://{where}:{port}/status", headers=bearer(token))
        with urllib.request.urlopen(request, timeout=2) as answer:
            boot_id = msgspec.json.decode(answer.read(), type=DaemonStatus).boot_id
            return f", boot {boot_id}" if boot_id else ""
    except urllib.error.HTTPError as error:
        with error:
            ours = (error.headers.get("Server") or "").startswith("kvserver/")
            hint = ": see --http-token-file" if error.code in (401, 403) else ""
            return f", which answers {error.code}{hint}" if ours else ""
    except (OSError, msgspec.MsgspecError):
        return ""
