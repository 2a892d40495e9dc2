"""Chunks of an earlier daemon enter the index slice by slice: a clear reaches those that wait, and a slice that fails frees nothing in use."""

from __future__ import annotations

import os
import select
from array import array
from typing import Any

import pytest

from kvserver._native import HostRegion, digest_objects
from kvserver.cache import POLICIES, Cache, PagePool
from kvserver.protocol import KEY_BYTES, ObjectGroup
from kvserver.restart.adoption import SLICE, Adoption
from kvserver.restart.state import KeptNamespace, State

PAGE = 4096
GROUPS = (ObjectGroup("full", (0,), 16),)


class DeafBus:
    def has_room(self, events: int) -> bool:
        return True

    def publish(self, *event: Any) -> None:
        assert event


def adoption_of(*sizes: int) -> tuple[Adoption, Cache]:
    """An adoption, verified, of namespaces of model "m" with so many chunks each, of a page each."""
    count = sum(sizes)
    region = HostRegion(count * PAGE)
    counts = array("I", [1] * count).tobytes()
    extents = b"".join(array("I", [page, 1]).tobytes() for page in range(count))
    state = State(
        version="1", page_bytes=PAGE, inode=1,
        namespaces=[KeptNamespace(bytes([n]) * 32, "m", GROUPS, 1, 64, False) for n in range(len(sizes))],
        places=array("I", [n for n, size in enumerate(sizes) for _ in range(size)]).tobytes(),
        flags=bytes(count), ready=array("I", [1] * count).tobytes(), keys=os.urandom(KEY_BYTES * count),
        counts=counts, extents=extents, digests=digest_objects(region, PAGE, counts, extents, 2),
    )  # fmt: skip
    cache = Cache(PagePool(count * PAGE, PAGE, withheld=True), POLICIES["lru"]())
    adoption = Adoption(state, cache, region, DeafBus())  # type: ignore[arg-type]
    adoption.start()
    assert select.select([adoption.completion_fd], [], [], 10)[0], "nothing was verified in time"
    return adoption, cache


def test_namespaces_that_wait_for_adoption_are_known_by_their_model() -> None:
    adoption, cache = adoption_of(SLICE, SLICE)
    adoption.step()
    assert set(cache.index.ids_of_model("m")) == {bytes([0]) * 32}
    assert adoption.ids_of_model("m") == {bytes([0]) * 32, bytes([1]) * 32}
    assert adoption.ids_of_model("other") == set()
    adoption.clear(bytes([1]) * 32)
    while not adoption.published:
        adoption.step()
    assert set(cache.index.ids_of_model("m")) == {bytes([0]) * 32}
    assert cache.pool.unused_pages == SLICE
    assert adoption.ids_of_model("m") == set()


def test_slice_that_fails_keeps_its_pages_out_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    adoption, cache = adoption_of(SLICE // 2, SLICE)
    adopt, calls = cache.adopt_chunks, []

    def fail_at_the_second_run(*run: Any) -> Any:
        calls.append(run)
        if len(calls) == 2:
            raise MemoryError
        return adopt(*run)

    monkeypatch.setattr(cache, "adopt_chunks", fail_at_the_second_run)
    with pytest.raises(MemoryError):
        adoption.step()
    while not adoption.published:
        adoption.step()
    assert cache.index.chunk_count == SLICE
    assert (cache.pool.unused_pages, cache.pool.withheld_pages) == (0, SLICE // 2)
