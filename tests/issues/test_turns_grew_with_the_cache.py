"""One turn of the server's loop looked at every chunk of L1: to find a victim where all were leased or had been used, to end the
leases of an engine that had disconnected, after a clear. Lookups of all engines waited for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from support.daemon import wait_until
from support.memory import Geometry
from support.server import Running, running_server
from support.turns import complete_plan
from support.worker import Worker, make_keys

from kvserver._native import CpuDevice, HostRegion
from kvserver.cache import POLICIES, Cache, PagePool, one_group
from kvserver.copy import Devices
from kvserver.protocol import Clear, Cleared, Plane, Stored
from kvserver.protocol.client import Client
from kvserver.server import Handlers, Server, Stores, Upkeep

PAGE = 64  # bytes; a chunk takes one
BATCH = 256  # chunks in one message
FEW, MANY = 6144, 24576
PARTS = {part.__code__ for part in (Upkeep.complete_tickets, Handlers.handle, Upkeep.step, Stores.step)}


class Turns:
    """Counts the lines of kvserver's Python that the loop's thread runs in one part of a turn: operations, not time.

    A turn has a bounded number of parts. Which of them fall into one turn depends on time, what each does does not.
    """

    def __init__(self) -> None:
        self.counting = False
        self._worst = 0
        self._this_part = 0
        self._loop: threading.Thread | None = None

    @property
    def worst(self) -> int:
        return max(self._worst, self._this_part)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is Server.run.__code__:
            self._loop = threading.current_thread()
        if not self.counting or threading.current_thread() is not self._loop:
            return None
        if frame.f_code in PARTS:
            self._worst, self._this_part = self.worst, 0
        return self._line if "kvserver" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        self._this_part += 1
        return self._line


class Rig:
    """A server whose L1 has room for so many chunks, all of them stored by `filler`, and another engine."""

    def __init__(self, running: Running, turns: Turns, chunks: int) -> None:
        self.turns = turns
        self.chunks = chunks
        self.cache: Cache = running.parts.cache
        self.loop_stopped = running.loop_stopped
        self.workers = running.parts.workers
        self.server = running.server
        self.upkeep = running.parts.upkeep
        self.instances = running.parts.instances
        self.endpoint = running.endpoint
        self.filler = self.engine(16, BATCH)
        self.other = self.engine(16, 1)
        self.keys = make_keys(chunks, "filler")
        for first in range(0, chunks, BATCH):
            stored = self.filler.store(self.keys[first : first + BATCH], self.filler.blocks_for(BATCH))
            assert stored == Stored(stored=BATCH, skipped=0)
        turns.counting = True

    def engine(self, block_bytes: int, chunks: int) -> Worker:
        blocks = 1 + 4 * chunks
        geometry = Geometry(blocks, 16, (blocks * block_bytes,), (Plane(0, 0, block_bytes, block_bytes),))
        return Worker(self.endpoint, geometry=geometry)

    def lease(self, chunks: int) -> None:
        """The filler's requests lease the first so many."""
        for first in range(0, chunks, BATCH):
            wanted = self.keys[first : min(first + BATCH, chunks)]
            assert self.filler.lookup(wanted, request_id=f"r{first}") == len(wanted)

    def store_one(self) -> Stored:
        return self.other.store(make_keys(1), self.other.blocks_for(1))


@contextlib.contextmanager
def rig(chunks: int) -> Iterator[Rig]:
    turns = Turns()
    devices = Devices(CpuDevice(HostRegion(chunks * PAGE), PAGE, 1))
    threading.settrace(turns.trace)
    try:
        with running_server(devices, chunks * PAGE, PAGE) as running:
            found = Rig(running, turns, chunks)
            try:
                yield found
            finally:
                found.filler.close()
                found.other.close()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]


def all_leased(rig: Rig) -> None:
    rig.lease(rig.chunks)
    assert rig.store_one() == Stored(stored=0, skipped=0, starved=1)


def all_leased_but_the_youngest(rig: Rig) -> None:
    rig.lease(rig.chunks - 1)
    assert rig.store_one() == Stored(stored=1, skipped=0), "no room, although a chunk might have been evicted"


def all_used_since_they_were_stored(rig: Rig) -> None:
    for first in range(0, rig.chunks, BATCH):
        rig.filler.lookup(rig.keys[first : first + BATCH])
    rig.filler.end_request()
    wait_until(lambda: not rig.cache.lease_count)
    assert rig.store_one() == Stored(stored=1, skipped=0)


def an_engine_departs(rig: Rig) -> None:
    all_leased(rig)  # the longest search: it depends on time how many leases the store below still finds
    rig.filler.hang_up()
    wait_until(lambda: rig.filler.instance_id not in rig.instances.by_id)
    assert rig.store_one() == Stored(stored=1, skipped=0), "leases of a disconnected engine kept chunks"
    wait_until(lambda: not rig.cache.lease_count)


def one_chunk_evicts_nearly_all(rig: Rig) -> None:
    with rig.engine(15 * rig.chunks, 1) as large:
        assert large.store(make_keys(1), large.blocks_for(1)) == Stored(stored=1, skipped=0)
    assert rig.cache.space.evicted_chunks > 0.9 * rig.chunks


def all_is_cleared(rig: Rig) -> None:
    with Client(rig.endpoint) as client:
        assert client.ask(Clear(), Cleared) == Cleared(chunks=rig.chunks)
    wait_until(lambda: not rig.cache.pool.used_pages)


CASES = [
    all_leased, all_leased_but_the_youngest, all_used_since_they_were_stored, an_engine_departs,
    one_chunk_evicts_nearly_all, all_is_cleared,
]  # fmt: skip


def worst_part(case: Callable[[Rig], None], chunks: int) -> int:
    with rig(chunks) as running:
        case(running)
        return running.turns.worst


@pytest.mark.parametrize("case", CASES)
def test_no_turn_does_more_where_l1_holds_more(case: Callable[[Rig], None]) -> None:
    assert worst_part(case, MANY) < 1.3 * worst_part(case, FEW)


def test_leases_that_expire_together_end_in_slices() -> None:
    def expire(rig: Rig) -> None:
        rig.turns.counting = False  # it takes time
        rig.lease(rig.chunks)
        rig.turns.counting = True
        assert rig.cache.lease_count
        rig.upkeep.clock = lambda: time.monotonic() + 3600
        rig.server.call(rig.upkeep.tick)
        wait_until(lambda: not rig.cache.lease_count, seconds=30)

    assert worst_part(expire, MANY) < 1.3 * worst_part(expire, FEW)


def test_a_store_waits_for_the_leases_of_a_disconnected_engine() -> None:
    cache = Cache(PagePool(8 * PAGE, PAGE), POLICIES["lru"]())
    keys = b"".join(make_keys(8))
    cache.finish_store(cache.plan_store(b"n", one_group(1), keys, PAGE), copied=True)
    assert cache.lookup(b"n", keys, ("engine", "r"), 1e9).hit_chunks == 8
    cache.end_leases_of("engine")
    plan = cache.plan_store(b"n", one_group(1), make_keys(1)[0], PAGE, steps=1)
    assert not plan.complete
    complete_plan(cache, plan, 1)
    assert (len(plan.chunks), plan.no_space) == (1, 0)


def test_a_worker_that_closes_while_its_store_waits_is_unmapped_and_leaves_nothing() -> None:
    with rig(FEW) as running, running.engine(15 * FEW, 1) as large:
        keys, mappings = make_keys(1), running.workers.mappings
        # The loop finds the store and the end of its worker in one turn.
        with running.loop_stopped() as wait_for_request:
            large.begin_store(keys, large.blocks_for(1))
            wait_for_request()
            large.hang_up()
        wait_until(lambda: running.workers.mappings == mappings - 2, what="its memory and words are unmapped")
        assert (running.cache.space.pins, running.cache.pool.unused_pages) == (0, running.cache.space.evicted_chunks)
        assert 0 < running.cache.space.evicted_chunks < FEW // 2
        assert running.other.store(keys, running.other.blocks_for(1)) == Stored(stored=1, skipped=0)


def test_stores_of_several_engines_wait_in_turn() -> None:
    with rig(FEW) as running, running.engine(15 * FEW, 1) as large:
        with running.loop_stopped():
            first = large.begin_store(make_keys(1), large.blocks_for(1))
            second = running.other.begin_store(make_keys(1), running.other.blocks_for(1))
        assert [first.reply(), second.reply()] == [Stored(stored=1, skipped=0)] * 2
