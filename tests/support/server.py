"""The daemon's parts in this process, over real sockets, with a device of the test's choice."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import zmq

from kvserver.cache import Cache, PagePool
from kvserver.cache.eviction import LeastRecentlyUsed
from kvserver.config import Settings
from kvserver.config.settings import MiB
from kvserver.copy import Devices
from kvserver.engines import Lifelines
from kvserver.parts import Parts
from kvserver.routing import MatchPages
from kvserver.server import Audit, Endpoint, Server
from kvserver.snapshots import daemon_status, instances_status
from kvserver.tiering import ConfiguredTier
from kvserver.web.pages import StatusPages

L1_BYTES, PAGE_BYTES = MiB, 4096
R = TypeVar("R")


class Running(NamedTuple):
    parts: Parts
    server: Server
    pages: StatusPages
    router: zmq.Socket[bytes]

    @property
    def endpoint(self) -> str:
        return self.parts.settings.endpoint

    def call(self, function: Callable[[], R]) -> R:
        """Call the function in the loop's thread, and return its result."""
        return self.server.call(function).result(20)

    def audited(self, seconds: float = 30) -> Audit:
        """The outcome of the first audit that counts: what ends outside the loop may reach it a moment after a test has seen it end."""
        deadline = time.monotonic() + seconds
        while (outcome := self.call(self.parts.upkeep.audit_now)) is Audit.NOT_COUNTED:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return outcome

    @contextlib.contextmanager
    def loop_stopped(self, seconds: float = 10) -> Iterator[Callable[[], None]]:
        """Meanwhile the loop handles nothing. Yields a wait for the next request, which the loop will find when it goes on."""
        stopped, go_on, arrived = threading.Event(), threading.Event(), threading.Event()

        def stop() -> None:
            stopped.set()
            while not go_on.wait(0.01):
                if self.router.poll(0):
                    arrived.set()

        def wait_for_request() -> None:
            assert arrived.wait(seconds), "no request arrived"

        future = self.server.call(stop)
        assert stopped.wait(seconds)
        try:
            yield wait_for_request
        finally:
            go_on.set()
            future.result(seconds)


@contextlib.contextmanager
def running_server(
    devices: Devices,
    l1_bytes: int = L1_BYTES,
    page_bytes: int = PAGE_BYTES,
    tiers: Sequence[ConfiguredTier] = (),
    **changes: Any,
) -> Iterator[Running]:
    """Its loop runs in a thread. `changes`: of its settings. REQUIRES: the devices, and the tiers, have that L1."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    endpoint = Endpoint(f"ipc://{folder}/kv.sock")
    endpoint.bind()
    lifelines = Lifelines(endpoint.fd_file, "token")
    cache = Cache(PagePool(l1_bytes, page_bytes), LeastRecentlyUsed())
    settings = Settings(**{"endpoint": endpoint.url, "chunk_tokens": 64, **changes})
    parts = Parts(settings, cache, devices, lifelines, tiers=tiers)
    server, observability = parts.make_server(endpoint, partial(daemon_status, parts)), parts.observability
    match = MatchPages(observability.index, lambda: server.call(lambda: instances_status(parts)))
    pages = StatusPages(("127.0.0.1", 0), server, observability, match, parts.upkeep, serving=parts.serving)
    loop = threading.Thread(target=server.run)
    observability.start(pages.families)
    loop.start()
    pages.start()
    try:
        yield Running(parts, server, pages, endpoint.router)
    finally:
        server.stop()
        loop.join()
        observability.close(list)
        pages.close()
        lifelines.shut()
        endpoint.close()
        shutil.rmtree(folder)
