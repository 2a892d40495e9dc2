"""After the bus dropped events of chunks, a resync brings the hub to what the cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.kv_loop import PAGE, Loop
from support.worker import make_keys

from kvserver.cache import one_group
from kvserver.events import ErrorSent, L1Resynced
from kvserver.tiering.resync import SLICE

SPACES = [b"a" * 32, b"a" * 32 + b"lora" * 8, b"b" * 32]


@pytest.fixture
def make_loop() -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(limit: int, pages: int = 40) -> Loop:
        made.append(Loop(limit, pages))
        return made[-1]

    yield make
    for loop in made:
        loop.close()


def test_there_is_no_resync_while_no_chunk_event_was_dropped(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(limit=4)
    loop.store(SPACES[0], make_keys(2))
    while loop.bus.publish(ErrorSent(1, "Lookup", "code")):
        pass
    loop.handle_events()
    assert not loop.resync.step()
    assert loop.gated.resyncs == []


def test_resync_makes_up_for_dropped_events_once_the_queue_has_room(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(limit=8)
    first, second = make_keys(40, "first"), make_keys(40, "second")
    loop.store(SPACES[0], first)
    loop.handle_events()
    for at in range(40):
        loop.store(SPACES[2], second[at : at + 1])  # each evicts one of the first
    assert loop.bus.needs_resync
    assert not loop.resync.step(), "the queue is full"
    loop.catch_up()
    loop.check()
    assert {key for _, key in loop.ready_chunks} == set(second)


def test_one_turn_publishes_a_slice_and_the_next_goes_on(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(limit=1000, pages=3 * SLICE)
    loop.store(SPACES[0], make_keys(2 * SLICE + 5))
    loop.bus.needs_resync.add(L1Resynced)
    assert [loop.resync.step() for _ in range(5)] == [True] * 4 + [False], "the beginning and three slices"
    loop.handle_events()
    assert [len(event.keys) // 32 for event in loop.gated.resyncs] == [0, SLICE, SLICE, 5, 0]
    loop.check()


def test_chunks_that_go_during_a_resync_are_not_published_again(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(limit=1000, pages=3 * SLICE)
    keys = make_keys(2 * SLICE)
    loop.store(SPACES[0], keys)
    loop.bus.needs_resync.add(L1Resynced)
    for _ in range(2):
        assert loop.resync.step()
    loop.clear(SPACES[0])
    loop.store(SPACES[0], keys[-3:])
    loop.catch_up()
    loop.check()
    assert len(loop.ready_chunks) == 3


def test_chunks_that_are_evicted_and_stored_again_during_a_resync_are_known_afterwards(
    make_loop: Callable[..., Loop],
) -> None:
    loop = make_loop(limit=1000, pages=SLICE)
    keys = make_keys(SLICE)
    loop.store(SPACES[0], keys)
    loop.bus.needs_resync.add(L1Resynced)
    for _ in range(2):
        assert loop.resync.step()  # all are named
    loop.store(SPACES[0], make_keys(3, "other"))
    evicted = sorted(set(keys) - {key for _, key in loop.ready_chunks})
    assert len(evicted) == 3
    loop.store(SPACES[0], evicted)
    loop.catch_up()
    loop.check()


def test_a_chunk_that_is_being_filled_is_not_in_a_resync(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(limit=1000)
    loop.cache.plan_store(SPACES[0], one_group(1), b"".join(make_keys(3)), PAGE)
    loop.store(SPACES[0], make_keys(2))
    loop.bus.needs_resync.add(L1Resynced)
    loop.catch_up()
    loop.check()
    assert len(loop.ready_chunks) == 2
