"""`kvserver doctor --bundle FILE`: all that helps to find a fault, in one file to be sent to others.

It works with a daemon that does not answer: pages are missing then, and the kernel describes the process, its log and the
machine.

Owns: what is in it, and how the file is written. Refuses to know: what must be left out of a text (`redaction`).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import platform
import pwd
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from kvserver import __version__
from kvserver.cli import http_client
from kvserver.cli.checks_daemon import listener_pid
from kvserver.cli.redaction import Redactor, secrets_of
from kvserver.config import LOG_FD, Settings, passwords_in, read_token
from kvserver.protocol import ConfigError

_LOG_BYTES = 1 << 20
_JOURNAL_LINES = 5000
_WAIT_SECONDS = 10.0
_MEMORY_FILES = ("proc/meminfo", "proc/loadavg", "proc/pressure/cpu", "proc/pressure/memory", "proc/pressure/io")
_GROUP_FILES = ("memory.max", "memory.current", "memory.events", "cpu.max", "cpu.stat", "cpuset.cpus.effective")
_PACKAGES = (
    "pyzmq",
    "msgspec",
    "prometheus-client",
    "opentelemetry-sdk",
    "rich",
    "valkey-glide-sync",
    "obstore",
    "vllm",
)
_SETTINGS_VARIABLES = "KVSERVER_"


def write(
    settings: Settings, given: list[str], findings: list[dict[str, str]], to: str, log: str, overwrite: bool
) -> dict[str, Any]:
    """The manifest of what was written. `given`: texts that may have passwords, valid settings or not. ConfigError if the file is there already, or cannot be written."""
    path = Path(to)
    if path.exists() and not overwrite:
        raise ConfigError(f"--bundle {to}: it is there already; add --overwrite")
    pid = listener_pid(settings.endpoint)
    environ = _environ(pid)
    parts = _Parts(_redactor(settings, environ, [*given, *_words(pid)]))
    parts.add("doctor.json", lambda: json.dumps(findings))
    _add_pages(parts, settings)
    parts.add("log.txt", lambda: _log(log, pid), log=True)
    parts.add("process.txt", lambda: _process(pid, environ))
    parts.add("machine.json", lambda: json.dumps(_machine()))
    manifest = {
        "kvserver": __version__,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "parts": parts.outcomes,
        "left_out": "secrets, users' parts of paths, token ids; names of models and engines are in it",
    }
    parts.texts["manifest.json"] = json.dumps(manifest, indent=2)
    _save(path, _archive(parts.texts), overwrite)
    return {"bundle": to, "bytes": path.stat().st_size, "parts": parts.outcomes}


class _Parts:
    """Texts that are redacted, and of each file "ok" or why it is not there."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self.texts: dict[str, str] = {}
        self.outcomes: dict[str, str] = {}

    def add(self, name: str, read: Callable[[], str], log: bool = False) -> None:
        """A part that cannot be read hides no other one."""
        try:
            text = read()
            if name.endswith(".json"):
                self.texts[name] = json.dumps(self._redactor.json(json.loads(text)), indent=2)
            else:
                self.texts[name] = self._redactor.text(text, log)
        except Exception as error:
            self.outcomes[name] = self._redactor.text(f"{error}" or type(error).__name__)
        else:
            self.outcomes[name] = "ok"


def _redactor(settings: Settings, environ: Mapping[str, str], given: list[str]) -> Redactor:
    here = pwd.getpwuid(os.getuid()) if _is_listed(os.getuid()) else None
    homes = [os.path.expanduser("~"), environ.get("HOME", ""), here.pw_dir if here is not None else ""]
    users = [os.environ.get("USER", ""), environ.get("USER", ""), here.pw_name if here is not None else ""]
    secrets = secrets_of(os.environ) | secrets_of(environ)
    secrets |= {part for value in [*_strings(settings), *given] for part in passwords_in(value)}
    with contextlib.suppress(ConfigError):
        secrets.add(read_token(settings.http_token_file))
    if token_file := environ.get("KVSERVER_HTTP_TOKEN_FILE"):
        with contextlib.suppress(ConfigError):
            secrets.add(read_token(token_file))
    return Redactor(secrets, homes, users)


def _is_listed(uid: int) -> bool:
    return any(one.pw_uid == uid for one in pwd.getpwall())


def _strings(settings: Settings) -> list[str]:
    found: list[str] = []
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        found += value if isinstance(value, (list, tuple)) else [value]
    return [one for one in found if isinstance(one, str)]


# ---- the daemon ---------------------------------------------------------------------------------


def _add_pages(parts: _Parts, settings: Settings) -> None:
    """Add the daemon's pages. After one without any answer the others are not requested."""
    host = "127.0.0.1" if settings.http_host in ("0.0.0.0", "::") else settings.http_host
    arguments = argparse.Namespace(
        http_host=host, http_port=settings.http_port, http_token_file=settings.http_token_file
    )
    silent: list[http_client.NoAnswer] = []

    def read(page: str) -> str:
        if silent:
            raise silent[0]
        try:
            return http_client.text(arguments, page)
        except http_client.RefusedRequest:
            raise
        except http_client.NoAnswer as error:
            silent.append(error)
            raise

    for name, page in (("status.json", "/status"), ("config.json", "/config"), ("metrics.txt", "/metrics")):
        parts.add(name, partial(read, page))


def _environ(pid: int) -> dict[str, str]:
    """Environment of the daemon; empty if it cannot be read."""
    try:
        words = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0") if pid else []
    except OSError:
        words = []
    return {name: value for name, _, value in (word.partition("=") for word in words) if name}


def _words(pid: int) -> list[str]:
    """The daemon's command; empty if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0") if pid else []
    except OSError:
        return []


def _log(given: str, pid: int) -> str:
    """The tail of the given file, else of where the daemon's stderr goes. OSError with the reason if that is unknown."""
    if given:
        return _tail(Path(given))
    if not pid:
        raise OSError("no daemon listens at --endpoint, so its log is not known; give --log FILE")
    stderr = Path(f"/proc/{pid}/fd/{LOG_FD}")
    flags = re.search(r"flags:\s*([0-7]+)", Path(f"/proc/{pid}/fdinfo/{LOG_FD}").read_text())
    if flags is None or not int(flags[1], 8) & os.O_CLOEXEC:  # inherited from the process that started the daemon
        raise OSError("where the daemon's log goes is not known; give --log FILE")
    if stderr.is_file():
        return _tail(stderr)
    if os.readlink(stderr).startswith("socket:") and shutil.which("journalctl"):
        command = [
            "journalctl",
            "--quiet",
            "--no-pager",
            "--output=short-iso",
            "--no-hostname",
            f"--lines={_JOURNAL_LINES}",
            f"_PID={pid}",
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_SECONDS)
        if ended.stdout:
            return ended.stdout
    raise OSError("the daemon's stderr is no file; give --log FILE, as of `docker logs`")


def _tail(path: Path) -> str:
    """Last whole lines of the file: half a secret has no form by which to find it."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - _LOG_BYTES))
        found = file.read(_LOG_BYTES)
    if end > _LOG_BYTES:
        found = found.partition(b"\n")[2]
    return found.decode(errors="replace")


def _process(pid: int, environ: Mapping[str, str]) -> str:
    if not pid:
        raise OSError("no daemon listens at --endpoint, or it is in a container of its own")
    folder = Path(f"/proc/{pid}")
    lines = ["command: " + " ".join(_words(pid))]
    lines += [f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith(_SETTINGS_VARIABLES)]
    lines += [
        "",
        _read(folder / "status"),
        _read(folder / "limits"),
        f"open files: {len(os.listdir(folder / 'fd'))}",
        "",
        "threads:",
    ]
    for task in sorted(folder.glob("task/*"), key=lambda task: int(task.name)):
        state = _read(task / "stat").rpartition(")")[2].split()[:1]
        lines.append(f"  {task.name} {_read(task / 'comm')} {''.join(state)} {_read(task / 'wchan')}")
    return "\n".join(lines) + "\n"


# ---- the machine --------------------------------------------------------------------------------


def _machine() -> dict[str, Any]:
    """Description of the machine, without its name."""
    system = os.uname()
    models = [
        line.partition(":")[2].strip()
        for line in _read(Path("/proc/cpuinfo")).splitlines()
        if line.startswith("model name")
    ]
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "system": f"{system.sysname} {system.release} {system.version} {system.machine}",
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "packages": versions,
        "processors": {"usable": len(os.sched_getaffinity(0)), "all": os.cpu_count(), "models": sorted(set(models))},
        "memory_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "huge_pages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "gpu_driver": _read(Path("/proc/driver/nvidia/version")),
        "files": {f"/{name}": text.splitlines() for name in _MEMORY_FILES if (text := _read(Path("/") / name))},
        "cgroup": {name: text for name in _GROUP_FILES if (text := _read(Path("/sys/fs/cgroup") / name))},
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# ---- the file -----------------------------------------------------------------------------------


def _archive(texts: Mapping[str, str]) -> bytes:
    """A tar.gz without names, users and times of this machine."""
    made = io.BytesIO()
    with gzip.GzipFile("", "wb", fileobj=made, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in texts.items():
            raw = text.encode(errors="replace")
            member = tarfile.TarInfo(f"kvserver-bundle/{name}")
            member.size, member.mode, member.mtime = len(raw), 0o600, int(time.time())
            archive.addfile(member, io.BytesIO(raw))
    return made.getvalue()


def _save(path: Path, content: bytes, overwrite: bool) -> None:
    """Whole or not at all; nothing that appeared meanwhile is replaced unless `overwrite`."""
    try:
        fd, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # only its owner may read it
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            if overwrite:
                os.replace(made, path)
            else:
                os.link(made, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)
    except FileExistsError:
        raise ConfigError(f"--bundle {path}: it is there already; add --overwrite") from None
    except OSError as error:
        raise ConfigError(f"--bundle {path}: {error.strerror or error}") from None
