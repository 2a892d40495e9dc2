"""Start and end of one daemon: settings in, exit code out.

Owns: the order in which parts are made and unmade, signals and the endpoint's lock. Refuses to know:
requests.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import ipaddress
import logging
import os
import resource
import secrets
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import urlsplit

import msgspec
import zmq

from kvserver import __version__, _native
from kvserver._native import HostRegion
from kvserver.cache import POLICIES, Cache, PagePool, page_bytes_for
from kvserver.config import Configuration, Placement, Settings, choose_l1, read_token, set_up_logging
from kvserver.copy import THIS_MACHINE, Devices, GpuRules, Hardware, l1_region
from kvserver.protocol import ConfigError, stranger_at
from kvserver.routing import MatchPages
from kvserver.server import Disconnect, Handlers, Lifelines, Observability, Server
from kvserver.web.pages import StatusPages

log = logging.getLogger("kvserver")

_LAST_WORDS_MS = 100  # for replies on their way to engines when a device is lost
EXIT_DEVICE_LOST = 3  # a GPU failed for good: a new process may have better luck


class Endpoint:
    """The ZMQ address, its `.fd` path and the lock that makes one daemon its only owner."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        if parts.scheme == "ipc":
            _refuse_no_socket_path(url)
            self.fd_path = url.removeprefix("ipc://") + ".fd"
        elif parts.scheme == "tcp":
            _refuse_open_network(url, parts.hostname)
            folder = os.environ.get("XDG_RUNTIME_DIR", f"/tmp/kvserver-{os.getuid()}")
            self.fd_path = f"{folder}/kvserver-{_port(url)}.fd"
        else:
            raise ConfigError(f"--endpoint {url!r}: give ipc:///path or tcp://127.0.0.1:port")
        if len(self.fd_path.encode()) > 100:
            raise ConfigError(f"--endpoint {url!r}: the path is too long for a Unix socket (107 bytes with suffixes)")
        folder_path = Path(self.fd_path).parent
        try:
            folder_path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if stranger := stranger_at(url):  # before a file is opened there
                raise ConfigError(f"--endpoint {url!r}: {stranger}")
            self._lock: IO[str] = open(self.fd_path.removesuffix(".fd") + ".lock", "w")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"--endpoint {url!r}: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another kvserver already serves {url}; stop it or give --endpoint") from None

    def bind(self, router: zmq.Socket[bytes]) -> None:
        """REQUIRES: the lock, so whatever socket file lies there is a dead daemon's; ZMQ replaces it."""
        try:
            router.bind(self.url)
        except zmq.ZMQError as error:
            raise ConfigError(f"--endpoint {self.url}: cannot bind: {error}") from None
        if self.url.startswith("ipc://"):
            os.chmod(self.url.removeprefix("ipc://"), 0o600)

    def release(self) -> None:
        if self.url.startswith("ipc://"):
            Path(self.url.removeprefix("ipc://")).unlink(missing_ok=True)
        Path(self.fd_path).unlink(missing_ok=True)
        self._lock.close()


def _refuse_no_socket_path(url: str) -> None:
    path = url.removeprefix("ipc://")
    if not path or path.startswith("@") or path.endswith("/") or Path(path).is_dir():
        raise ConfigError(f"--endpoint {url!r}: name a file that may become a socket, as ipc:///run/kvserver/kv.sock")


def _port(url: str) -> int:
    try:
        port = urlsplit(url).port
    except ValueError:
        port = None
    if not port:
        raise ConfigError(f"--endpoint {url!r}: give a port, as tcp://127.0.0.1:5557")
    return port


def _refuse_open_network(url: str, host: str | None) -> None:
    try:
        loopback = ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise ConfigError(
            f"--endpoint {url!r}: tcp is for loopback addresses only; KV would cross the network unencrypted"
        )


def serve(configuration: Configuration, hardware: Hardware = THIS_MACHINE) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code. ConfigError if the daemon cannot start."""
    settings = configuration.settings
    set_up_logging(settings)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a worker brings up to 251 descriptors
    http_token = _http_token(settings)
    chosen = choose_l1(settings, own_policy=_has_numa_policy())
    endpoint = Endpoint(settings.endpoint)
    context = zmq.Context(io_threads=1)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes * 16)
    router.setsockopt(zmq.RCVHWM, 10_000)
    router.setsockopt(zmq.SNDHWM, 10_000)
    _refuse_other_users(router)
    try:
        endpoint.bind(router)
        boot_id, token = secrets.token_hex(8), secrets.token_hex(16)
        lifelines = Lifelines(endpoint.fd_path, token)
        try:
            region, placement = _map_l1(settings, *chosen)
            page_bytes = page_bytes_for(region.size)
            cpu = hardware.make_cpu(region, page_bytes, settings.copy_threads)
        except (OSError, MemoryError, RuntimeError) as error:  # a limit of address space, of threads
            raise ConfigError(
                f"--l1-size {settings.l1_size} --copy-threads {settings.copy_threads}: {error or 'no memory'}; lower them "
                "or raise the limits of this process (ulimit -v, ulimit -u)"
            ) from None
        rules = GpuRules(hardware.open_gpu, settings.gpus, settings.pin != "off", hardware.gpu_way)
        devices = Devices(cpu, region, page_bytes, rules)
        devices.make_ready()
        cache = Cache(PagePool(region.size, page_bytes), POLICIES[settings.eviction_policy]())
        observability = Observability(settings, boot_id)
        handlers = Handlers(settings, boot_id, token, cache, devices, lifelines, observability, placement=placement)
        server = Server(handlers, router, settings.max_message_bytes, stops_when_lost=True)
        try:
            pages = StatusPages(
                (settings.http_host, settings.http_port),
                server,
                configuration.table(),
                MatchPages(observability.index, lambda: server.call(handlers.instances_status)),
                observability.publisher.snapshot if observability.publisher is not None else None,
                observability.observers.cut_off_reason,
                http_token,
            )
        except OSError as error:
            observability.discard()
            taken = error.errno == errno.EADDRINUSE
            hint = "port 0 chooses a free one" if taken else "give an address of this machine and a port you may use"
            raise ConfigError(
                f"--http-host {settings.http_host} --http-port {settings.http_port}: {error}; {hint}"
            ) from None

        def on_signal(number: int, _frame: FrameType | None) -> None:
            log.info("%s: draining", signal.Signals(number).name)
            server.stop()

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        if pages.access.shut:
            log.warning(
                "--http-host %s: any peer on the network may connect, so only /metrics, /livez and /readyz answer; --http-token-file "
                "opens the other pages to those who have the token", settings.http_host,
            )  # fmt: skip
        observability.start(pages.families)
        pages.start()
        gc.collect()
        gc.freeze()
        gc.disable()  # a full collection over a million chunks would stall the loop; see Server._keep_time
        print(
            f"kvserver {__version__} ready: endpoint {settings.endpoint}, http http://{settings.http_host}:{pages.port}, "
            f"L1 {region.size} bytes, chunks of {settings.chunk_tokens} tokens, boot {boot_id}",
            flush=True,
        )
        server.run()
        drained = _drain(server)
        lost = devices.lost
        if not drained and not lost:
            os._exit(1)  # the kernel closes the lifelines, after the copying threads have ended
        observability.close(lambda: pages.families_of(server.snapshot(), server.rpc.snapshot()))
        if lost:
            log.critical("exit code %d: the device is lost: %s", EXIT_DEVICE_LOST, lost)
            context.destroy(_LAST_WORDS_MS)
            endpoint.release()
            logging.shutdown()
            os._exit(EXIT_DEVICE_LOST)  # the driver's work at exit may never end
        pages.close()
        lifelines.shut()
    finally:
        router.close(0)
        endpoint.release()
        context.destroy(0)
    log.info("stopped")
    if devices.pinning:
        logging.shutdown()
        os._exit(0)  # the kernel unpins L1 at once; the interpreter's end would, a registration at a time, for seconds
    gc.unfreeze()  # for the interpreter's end: a native module that is never freed complains on stderr
    return 0


def _refuse_other_users(router: zmq.Socket[bytes]) -> None:
    """At an ipc endpoint whose file became writable for them, as lifelines do. REQUIRES: the socket is not bound yet."""
    try:
        for uid in {os.getuid(), 0}:
            router.setsockopt(zmq.IPC_FILTER_UID, uid)
    except zmq.ZMQError as error:
        log.debug("libzmq %s does not look at the user of a peer: %s", zmq.zmq_version(), error)


def _http_token(settings: Settings) -> str:
    try:
        return read_token(settings.http_token_file)
    except ValueError as error:
        raise ConfigError(f"--http-token-file {settings.http_token_file}: {error}") from None


def _has_numa_policy() -> bool:
    """Whether this process was started under a NUMA policy; False where the policy cannot be read."""
    return _native.process_numa_policy()[0] not in ("default", "unknown")


def _map_l1(settings: Settings, size: int, wanted: Placement) -> tuple[HostRegion, Placement]:
    """L1 and its real placement. ConfigError or RuntimeError if it cannot be mapped."""
    try:
        region = l1_region(size, wanted)
    except RuntimeError as error:
        if not wanted.huge_page_bytes:
            raise
        if settings.l1_huge_pages != "auto":
            raise ConfigError(
                f"--l1-huge-pages {settings.l1_huge_pages}: {error}; are enough reserved in /proc/sys/vm/nr_hugepages, and "
                "free for this cgroup?"
            ) from None
        log.warning(
            "L1 is in ordinary memory, without huge pages: %s", error
        )  # another process allocated the huge pages meanwhile
        ordinary = msgspec.structs.replace(settings, l1_huge_pages="transparent")
        return _map_l1(ordinary, *choose_l1(ordinary, own_policy=_has_numa_policy()))
    if region.numa_error:
        log.warning(
            "--l1-numa %s: %s; the kernel chooses the nodes of L1 (in a container: --cap-add SYS_NICE)",
            settings.l1_numa, region.numa_error,
        )  # fmt: skip
        return region, replace(wanted, nodes=(), bound=False)
    return region, wanted


def _drain(server: Server, deadline_seconds: float = 5.0) -> bool:
    """End every copy before memory goes away: cancelled ones stop at their next block. False if some did not."""
    handlers = server.handlers
    deadline = time.monotonic() + deadline_seconds
    for worker in list(handlers.instances.by_registration.values()):
        handlers.workers.close_worker(worker, Disconnect.STOPPED)
    while (handlers.tickets.open_tickets or handlers.transfers.waiting) and time.monotonic() < deadline:
        handlers.complete_tickets()
        handlers.step()
        time.sleep(0.001)
    if handlers.tickets.open_tickets:
        log.error("%d copies did not end within %.0f s", handlers.tickets.open_tickets, deadline_seconds)
    return handlers.tickets.open_tickets == 0
