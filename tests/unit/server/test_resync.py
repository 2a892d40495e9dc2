"""After the bus dropped events of chunks, a resync brings the hub to what the cache holds."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from support.daemon import wait_until
from support.kv_chunks import Witness
from support.worker import make_keys

from kvserver.cache import Cache, PagePool
from kvserver.cache.eviction import LeastRecentlyUsed
from kvserver.events import Bus, ChunksEvicted, ChunksStored, ErrorSent, Event, L1Cleared, L1Resynced
from kvserver.kv_events import Hub
from kvserver.server.resync import SLICE, Resync

PAGE = 4096
SPACES = [b"a" * 32, b"a" * 32 + b"lora" * 8, b"b" * 32]


class Gated:
    """A subscriber that holds up the bus while its gate is shut."""

    name = "gated"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.resyncs: list[L1Resynced] = []

    def handle(self, event: Event) -> None:
        assert self.gate.wait(10)
        if isinstance(event, L1Resynced):
            self.resyncs.append(event)

    def close(self) -> None:
        pass


class Loop:
    """A cache, and the events that the server's loop publishes of it."""

    def __init__(self, limit: int, pages: int = 40) -> None:
        self.cache = Cache(PagePool(pages * PAGE, PAGE), LeastRecentlyUsed())
        self.witness, self.gated = Witness(), Gated()
        self.hub = Hub(1 << 30, self.witness.observe)
        self.bus = Bus([self.gated, self.hub], limit)
        self.resync = Resync(self.cache.index, self.bus)
        self.bus.start()

    def store(self, namespace: bytes, keys: list[bytes], copied: bool = True) -> None:
        plan = self.cache.plan_store(namespace, 1, 0, b"".join(keys), PAGE)
        for space in {space for space, _ in plan.evicted}:
            keys_of_space = b"".join(key for owner, key in plan.evicted if owner == space)
            self.bus.publish(ChunksEvicted(1, space, keys_of_space), len(keys_of_space))
        self.cache.finish_store(plan, copied)
        if plan.ready:
            ready = b"".join(chunk.key for chunk in plan.ready)
            self.bus.publish(ChunksStored(1, "engine", "m", namespace, ready), len(ready))

    def clear(self, base: bytes) -> None:
        self.cache.clear_namespaces(base)
        self.bus.publish(L1Cleared(1, base))
        while self.cache.step():
            pass

    def catch_up(self) -> None:
        """Turns of the loop until the resync is complete and all events are handled."""

        def is_complete() -> bool:
            assert self.bus.flush()  # so that there is room
            return not self.resync.step() and self.bus.flush() and not self.bus.lost_chunks

        wait_until(is_complete)

    @property
    def ready_chunks(self) -> list[tuple[bytes, bytes]]:
        return sorted((chunk.namespace.id, chunk.key) for chunk in self.cache.index if chunk.ready)

    def check(self) -> None:
        assert sorted(self.witness.resident) == self.ready_chunks
        assert sorted(chunk.key for chunk in self.hub.snapshot(b"")[1]) == sorted(key for _, key in self.ready_chunks)


@pytest.fixture
def make_loop() -> Iterator[type[Loop]]:
    made: list[Loop] = []

    def make(limit: int, pages: int = 40) -> Loop:
        made.append(Loop(limit, pages))
        return made[-1]

    yield make  # type: ignore[misc]
    for loop in made:
        loop.gated.gate.set()
        loop.bus.close()
        assert loop.bus.errors == {}


def test_there_is_no_resync_while_no_chunk_event_was_dropped(make_loop: type[Loop]) -> None:
    loop = make_loop(limit=4)
    loop.gated.gate.clear()
    loop.store(SPACES[0], make_keys(2))
    while loop.bus.publish(ErrorSent(1, "Lookup", "code")):
        pass
    loop.gated.gate.set()
    assert loop.bus.flush()
    assert not loop.resync.step()
    assert loop.gated.resyncs == []


def test_dropped_events_are_made_up_for_once_there_is_room(make_loop: type[Loop]) -> None:
    loop = make_loop(limit=8)
    first, second = make_keys(40, "first"), make_keys(40, "second")
    loop.store(SPACES[0], first)
    assert loop.bus.flush()
    loop.gated.gate.clear()
    for at in range(40):
        loop.store(SPACES[2], second[at : at + 1])  # each evicts one of the first
    assert loop.bus.lost_chunks
    assert not loop.resync.step(), "the queue is full"
    loop.gated.gate.set()
    loop.catch_up()
    loop.check()
    assert {key for _, key in loop.ready_chunks} == set(second)


def test_one_turn_publishes_a_slice_and_the_next_goes_on(make_loop: type[Loop]) -> None:
    loop = make_loop(limit=1000, pages=3 * SLICE)
    loop.store(SPACES[0], make_keys(2 * SLICE + 5))
    loop.bus.lost_chunks = True
    turns = 0
    while loop.resync.step():
        turns += 1
    assert turns == 4, "the beginning and three slices"
    assert loop.bus.flush()
    assert [len(event.keys) // 32 for event in loop.gated.resyncs] == [0, SLICE, SLICE, 5, 0]
    loop.check()


def test_chunks_that_go_during_a_resync_are_not_published_again(make_loop: type[Loop]) -> None:
    loop = make_loop(limit=1000, pages=3 * SLICE)
    keys = make_keys(2 * SLICE)
    loop.store(SPACES[0], keys)
    loop.bus.lost_chunks = True
    for _ in range(2):
        assert loop.resync.step()
    loop.clear(SPACES[0])
    loop.store(SPACES[0], keys[-3:])
    loop.catch_up()
    loop.check()
    assert len(loop.ready_chunks) == 3


def test_a_chunk_that_is_being_filled_is_not_in_a_resync(make_loop: type[Loop]) -> None:
    loop = make_loop(limit=1000)
    loop.cache.plan_store(SPACES[0], 1, 0, b"".join(make_keys(3)), PAGE)
    loop.store(SPACES[0], make_keys(2))
    loop.bus.lost_chunks = True
    loop.catch_up()
    loop.check()
    assert len(loop.ready_chunks) == 2


@pytest.mark.parametrize("seed", range(4))
def test_random_runs_with_a_tiny_queue_end_with_what_the_cache_holds(make_loop: type[Loop], seed: int) -> None:
    generator = random.Random(seed)
    loop = make_loop(limit=generator.choice((4, 12, 40)))
    keys = make_keys(80, "all")
    for _ in range(30):
        for _ in range(100):
            space, begin = generator.choice(SPACES), generator.randrange(75)
            match generator.randrange(10):
                case 0:
                    loop.clear(generator.choice((b"", space)))
                case 1:
                    loop.resync.step()
                case 2:
                    loop.store(space, keys[begin : begin + 3], copied=False)
                case _:
                    loop.store(space, keys[begin : begin + generator.randint(1, 5)])
        loop.catch_up()
        loop.check()
    assert sum(loop.bus.dropped.values()) > 100
    assert loop.hub.status().recounts > 1
