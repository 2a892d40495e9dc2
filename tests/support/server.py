"""The daemon's parts in this process, over real sockets, with a device of the test's choice."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvserver.cache import Cache, PagePool
from kvserver.cache.eviction import LeastRecentlyUsed
from kvserver.config import Settings
from kvserver.config.settings import MiB
from kvserver.copy import Devices
from kvserver.parts import Parts
from kvserver.routing import MatchPages
from kvserver.server import Endpoint, Lifelines, Server
from kvserver.web.pages import StatusPages

L1_BYTES, PAGE_BYTES = MiB, 4096


class Running(NamedTuple):
    parts: Parts
    server: Server
    pages: StatusPages

    @property
    def endpoint(self) -> str:
        return self.parts.settings.endpoint


@contextlib.contextmanager
def running_server(
    devices: Devices, l1_bytes: int = L1_BYTES, page_bytes: int = PAGE_BYTES, **changes: Any
) -> Iterator[Running]:
    """Its loop runs in a thread. `changes`: of its settings. REQUIRES: the devices have that L1."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    endpoint = Endpoint(f"ipc://{folder}/kv.sock")
    endpoint.bind()
    lifelines = Lifelines(endpoint.fd_path, "token")
    cache = Cache(PagePool(l1_bytes, page_bytes), LeastRecentlyUsed())
    settings = Settings(**{"endpoint": endpoint.url, "chunk_tokens": 64, **changes})
    parts = Parts(settings, cache, devices, lifelines)
    server, observability = parts.make_server(endpoint.router), parts.observability
    match = MatchPages(observability.index, lambda: server.call(parts.instances_status))
    pages = StatusPages(("127.0.0.1", 0), server, observability, match, parts.upkeep)
    loop = threading.Thread(target=server.run)
    observability.start(pages.families)
    loop.start()
    pages.start()
    try:
        yield Running(parts, server, pages)
    finally:
        server.stop()
        loop.join()
        observability.close(list)
        pages.close()
        lifelines.shut()
        endpoint.close()
        shutil.rmtree(folder)
