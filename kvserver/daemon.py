"""Start and end of one daemon: settings in, exit code out.

Owns: the order in which parts are made and unmade, and signals. Refuses to know: requests.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import secrets
import signal
import threading
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import NoReturn

from kvserver import __version__
from kvserver._native import HostRegion
from kvserver.cache import POLICIES, Cache, page_bytes_for
from kvserver.config import (
    FDSTORE,
    Configuration,
    Placement,
    Settings,
    library_lines_logged,
    misspelt_variables,
    parse_shares,
    parse_tiers,
    read_token,
    set_up_logging,
)
from kvserver.config.descriptors import raise_descriptor_limit
from kvserver.copy import THIS_MACHINE, Devices, GpuRules, Hardware, chosen_l1, map_l1
from kvserver.engines import Lifelines
from kvserver.l2 import make_tier
from kvserver.observability import Observability
from kvserver.parts import Parts
from kvserver.protocol import ConfigError
from kvserver.restart import KeptL1, L1File, NoKeptL1, RestartableL1, StoredL1File, drop_stored_l1
from kvserver.routing import MatchPages
from kvserver.server import Endpoint, Server
from kvserver.snapshots import daemon_status, instances_status
from kvserver.tiering import ConfiguredTier
from kvserver.web.history import History
from kvserver.web.pages import StatusPages

log = logging.getLogger("kvserver")

_KEPT_ALIVE_THROUGH = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # each would end the daemon, at its start too
_READY_LINE_SECONDS = 1.0
_LAST_WORDS_MS = 100  # for replies on their way to engines when a device is lost
EXIT_DEVICE_LOST = 3  # a GPU failed for good: a new process may have better luck


def serve(configuration: Configuration, hardware: Hardware = THIS_MACHINE, drain_seconds: float = 5.0) -> NoReturn:
    """Run until SIGTERM or SIGINT, then end the process. ConfigError if the daemon cannot start.

    `drain_seconds`: for the copies under way to end.
    """
    set_up_logging(configuration.settings)
    for number in _KEPT_ALIVE_THROUGH:
        signal.signal(number, lambda _number, _frame: None)
    raise_descriptor_limit()
    for name, meant in misspelt_variables(os.environ).items():
        log.warning("%s is no setting and has no effect; do you mean %s?", name, meant)
    with library_lines_logged():
        _parts, stays = _run(
            configuration, hardware, drain_seconds
        )  # kept: L1 is unpinned where it is freed, for seconds
    log.info("stopped%s", stays)
    logging.shutdown()
    # Not by the interpreter's end, which frees L1, too, and at which threads that still answer pages leave complaints on stderr.
    os._exit(0)


def _run(configuration: Configuration, hardware: Hardware, drain_seconds: float) -> tuple[Parts, str]:
    """Returns the parts, at rest, and what stays of L1, for people."""
    settings = configuration.settings
    http_token = read_token(settings.http_token_file)
    file = _open_l1_file(settings)
    chosen = file.choose(settings) if file is not None else chosen_l1(settings)
    endpoint = Endpoint(settings.endpoint)
    try:
        endpoint.bind()
        lifelines = Lifelines(endpoint.fd_file, secrets.token_hex(16))
        region, devices, cache, placement, kept_l1 = _make_l1(settings, chosen, hardware, file)
        tiers = _make_tiers(settings, region, cache.pool.page_bytes)
        parts = Parts(settings, cache, devices, lifelines, placement, tiers=tiers, kept_l1=kept_l1)
        server = parts.make_server(endpoint, partial(daemon_status, parts), stops_when_lost=True)
        pages = _make_pages(configuration, parts, server, http_token)
        _handle_signals(server, parts.observability)
        parts.observability.start(pages.families)
        pages.start()
        kept_l1.begin(cache, parts.bus, parts.observability.hub, tiers)
        _freeze_garbage()
        _report_ready(settings, pages.port, parts)
        server.run()
        drained, lost = parts.upkeep.drain(drain_seconds), devices.lost
        if not drained and not lost:
            logging.shutdown()
            os._exit(1)  # the kernel closes the lifelines, after the copying threads have ended
        stays = ""
        if kept_l1.keeps and drained and not lost:
            stays = kept_l1.end(cache, parts.observability.hub, parts.observability.flush)
        parts.observability.close(pages.last_families)
        if lost:
            _exit_lost(lost, endpoint)
        pages.close()
        lifelines.shut()
        return parts, stays
    finally:
        endpoint.close()


# ---- start --------------------------------------------------------------------------------------


def _open_l1_file(settings: Settings) -> L1File | None:
    if settings.l1_file == FDSTORE:
        return StoredL1File()
    drop_stored_l1()
    return L1File(settings.l1_file, settings.endpoint) if settings.l1_file else None


def _make_l1(
    settings: Settings, chosen: tuple[int, Placement], hardware: Hardware, file: L1File | None
) -> tuple[HostRegion, Devices, Cache, Placement, KeptL1]:
    """The devices that copy to and from L1, what decides on it, where it is, and what a restart keeps of it."""
    try:
        if file is not None:
            file.resize(chosen[0])
        region, placement = map_l1(settings, *chosen, fd=file.fd if file is not None else -1)
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
    kept_l1 = RestartableL1(file, region, settings, page_bytes) if file is not None else NoKeptL1()
    pool, policy = kept_l1.make_pool(region.size, page_bytes), POLICIES[settings.eviction_policy]()
    return region, devices, Cache(pool, policy, parse_shares(settings.share)), placement, kept_l1


def _make_tiers(settings: Settings, region: HostRegion, page_bytes: int) -> list[ConfiguredTier]:
    """The tiers of L2, which open by themselves. ConfigError if one cannot be used with these settings."""
    urls = parse_tiers(settings.l2)
    folder = next((url.path for url in urls if url.kind == "file" and not url.read_only), "")
    # Folders first: another daemon's is refused before anything is written to it.
    folders_first = sorted(urls, key=lambda url: url.kind != "file")
    tiers = {url.name: make_tier(url, region, page_bytes, folder) for url in folders_first}
    return [ConfiguredTier(tiers[url.name], url) for url in urls]


def _make_pages(configuration: Configuration, parts: Parts, server: Server, http_token: str) -> StatusPages:
    settings, observability = configuration.settings, parts.observability
    try:
        pages = StatusPages(
            (settings.http_host, settings.http_port),
            server,
            observability,
            MatchPages(observability.index, lambda: server.call(lambda: instances_status(parts))),
            parts.upkeep,
            configuration.table(),
            http_token,
            serving=parts.serving,
            history=History(settings.history_seconds, lambda: server.call(lambda: parts.sample(server)), parts.boot_id),
            copy_threads=settings.copy_threads,
        )
    except OSError as error:
        observability.observers.close()
        taken = error.errno == errno.EADDRINUSE
        hint = "port 0 chooses a free one" if taken else "give an address of this machine and a port you may use"
        raise ConfigError(
            f"--http-host {settings.http_host} --http-port {settings.http_port}: {error.strerror}; {hint}"
        ) from None
    if pages.access.shut:
        log.warning(
            "--http-host %s: any peer on the network may connect, so only /metrics, /livez and /readyz answer; --http-token-file "
            "opens the other pages to those who have the token", settings.http_host,
        )  # fmt: skip
    return pages


def _handle_signals(server: Server, observability: Observability) -> None:
    def stop(number: int, _frame: FrameType | None) -> None:
        log.info("%s: draining", signal.Signals(number).name)
        server.stop()

    def reopen(_number: int, _frame: FrameType | None) -> None:
        observability.reopen_files()

    def ignore(number: int, _frame: FrameType | None) -> None:
        server.call(lambda: log.info("%s has no meaning here: ignored", signal.Signals(number).name))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, stop)
    signal.signal(signal.SIGHUP, reopen)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, ignore)


def _report_ready(settings: Settings, port: int, parts: Parts) -> None:
    """Report the start: a line on stdout for people and programs, and a record of the log."""
    facts: dict[str, str | int] = {
        "endpoint": settings.endpoint,
        "http": f"http://{settings.http_host}:{port}",
        "l1_bytes": parts.cache.pool.pages * parts.cache.pool.page_bytes,
        "chunk_tokens": settings.chunk_tokens,
        "boot_id": parts.boot_id,
    }
    text = "endpoint {endpoint}, http {http}, L1 {l1_bytes} bytes, chunks of {chunk_tokens} tokens, boot {boot_id}"
    log.info("kvserver %s is ready: %s", __version__, text.format(**facts), extra=facts)
    line = threading.Thread(target=_print, args=(f"kvserver {__version__} ready: {text.format(**facts)}",), daemon=True)
    line.start()
    line.join(_READY_LINE_SECONDS)  # its reader may stand still


def _print(line: str) -> None:
    with suppress(OSError):  # a full disk, or a reader that has ended: the log has the line, too
        print(line, flush=True)


def _freeze_garbage() -> None:
    """A full collection over a million chunks would stall the loop; see Server._keep_time."""
    gc.collect()
    gc.freeze()
    gc.disable()


# ---- end ----------------------------------------------------------------------------------------


def _exit_lost(lost: str, endpoint: Endpoint) -> NoReturn:
    log.critical("exit code %d: the device is lost: %s", EXIT_DEVICE_LOST, lost)
    endpoint.close(_LAST_WORDS_MS)
    logging.shutdown()
    os._exit(EXIT_DEVICE_LOST)  # the driver's work at exit may never end
