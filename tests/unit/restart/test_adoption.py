"""Chunks of an earlier daemon enter the index slice by slice: a clear reaches those that wait, and a slice that fails frees nothing in use."""

from __future__ import annotations

import os
import random
import select
from array import array
from typing import Any

import pytest

from kvserver import __version__
from kvserver._native import HostRegion, digest_objects
from kvserver.cache import POLICIES, Cache, PagePool
from kvserver.protocol import KEY_BYTES, ObjectGroup
from kvserver.restart.adoption import SLICE, Adoption
from kvserver.restart.keeping import make_state
from kvserver.restart.state import PROTECTED, KeptNamespace, State

PAGE = 4096
GROUPS = (ObjectGroup("full", (0,), 16),)


class DeafBus:
    def has_room(self, events: int) -> bool:
        return True

    def publish(self, *event: Any) -> None:
        assert event


def adoption_of(*sizes: int, equal_keys: bool = False) -> tuple[Adoption, Cache]:
    """An adoption, verified, of namespaces of model "m" with so many chunks each, of a page each."""
    count = sum(sizes)
    region = HostRegion(count * PAGE)
    counts = array("I", [1] * count).tobytes()
    extents = b"".join(array("I", [page, 1]).tobytes() for page in range(count))
    state = State(
        version="1", page_bytes=PAGE, inode=1,
        namespaces=[KeptNamespace(bytes([n]) * 32, "m", GROUPS, 1, 64, False) for n in range(len(sizes))],
        places=array("I", [n for n, size in enumerate(sizes) for _ in range(size)]).tobytes(),
        flags=bytes(count), ready=array("I", [1] * count).tobytes(), keys=(os.urandom(KEY_BYTES) * count if equal_keys else os.urandom(KEY_BYTES * count)),
        counts=counts, extents=extents, digests=digest_objects(region, PAGE, counts, extents, 2),
    )  # fmt: skip
    return adoption_from(state, region, "lru")


def adoption_from(state: State, region: HostRegion, policy: str) -> tuple[Adoption, Cache]:
    cache = Cache(PagePool(region.size, PAGE, withheld=True), POLICIES[policy]())
    adoption = Adoption(state, cache, region, DeafBus())  # type: ignore[arg-type]
    adoption.start()
    assert select.select([adoption.completion_fd], [], [], 10)[0], "nothing was verified in time"
    return adoption, cache


def mixed_state(source: random.Random, region: HostRegion) -> State:
    """Chunks of several extents, in namespaces with one slot a chunk, with two ranks, and of single blocks."""
    namespaces = [
        KeptNamespace(b"1" * 32, "m", GROUPS, 1, 64, False),
        KeptNamespace(b"2" * 32, "n", GROUPS, 2, 64, False),
        KeptNamespace(b"1" * 32 + b"tails", "m", GROUPS, 1, 16, True),
    ]
    free = list(range(region.size // PAGE))
    source.shuffle(free)
    places, counts, ends = array("I"), array("I"), array("I")
    extents = array("I")
    while len(free) > 8:
        place = source.choice([0, 0, 1, 2])
        pages = [free.pop() for _ in range(source.randint(2, 4))]
        places.append(place)
        counts.append(len(pages))
        extents.extend(number for page in pages for number in (page, 1))
        if place == 1:
            ends.extend([8 + 8 * source.randint(1, len(pages) - 1), 8 + 8 * len(pages)])
    rows = len(places)
    protected = source.randrange(rows)
    return State(
        version=__version__, page_bytes=PAGE, inode=7, namespaces=namespaces, places=places.tobytes(),
        flags=bytes([PROTECTED]) * protected + bytes(rows - protected), ready=array("I", [1] * rows).tobytes(),
        keys=source.randbytes(KEY_BYTES * rows), ends=ends.tobytes(), counts=counts.tobytes(), extents=extents.tobytes(),
        digests=digest_objects(region, PAGE, counts.tobytes(), extents.tobytes(), 2),
    )  # fmt: skip


def namespace_of_each(state: State) -> list[KeptNamespace]:
    return [state.namespaces[place] for place in array("I", state.places)]


@pytest.mark.parametrize("seed", range(4))
def test_chunks_that_were_adopted_are_left_as_they_were_found(seed: int) -> None:
    region = HostRegion(5000 * PAGE)
    state = mixed_state(random.Random(seed), region)
    adoption, cache = adoption_from(state, region, "slru")
    while not adoption.published:
        adoption.step()
    cache.audit()
    left = make_state(cache, region, 7)
    assert namespace_of_each(left) == namespace_of_each(state)
    columns = ["flags", "ready", "keys", "ends", "counts", "extents", "digests"]
    assert {name: getattr(left, name) for name in columns} == {name: getattr(state, name) for name in columns}
    assert len({of.id for of in left.namespaces}) == 3


def test_second_of_two_equal_keys_is_dropped() -> None:
    adoption, cache = adoption_of(SLICE + 3, equal_keys=True)
    while not adoption.published:
        adoption.step()
    assert (adoption.adopted, cache.index.chunk_count) == (1, 1)
    assert (cache.pool.unused_pages, cache.pool.used_pages, cache.pool.withheld_pages) == (SLICE + 2, 1, 0)
    cache.audit()


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
