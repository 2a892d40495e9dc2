"""The rules of remote tiers that need no store: existence, searches of chains, the breaker, the lanes."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.l1_memory import NAMESPACE, key, keys, name, within
from support.properties import examples

from kvserver.l2 import ObjectName
from kvserver.l2.remote.breaker import FAILURES_TO_OPEN, StoreBreaker
from kvserver.l2.remote.existence import ABSENT_SECONDS, PRESENT_SECONDS, Existence
from kvserver.l2.remote.lanes import Job, Lane, Lanes
from kvserver.l2.remote.names import Names, scope_of, scopes_of
from kvserver.l2.remote.search import chain_length
from kvserver.l2.remote.store import StoreClient, StoreError

SECOND = 1_000_000_000

# ---- existence ------------------------------------------------------------------------------------


def test_answers_expire() -> None:
    memory = Existence()
    memory.note(name(1), True, 0)
    memory.note(name(2), False, 0)
    present, absent = int(PRESENT_SECONDS * SECOND), int(ABSENT_SECONDS * SECOND)
    assert (memory.find(name(1), present - 1), memory.find(name(1), present)) == (True, None)
    assert (memory.find(name(2), absent - 1), memory.find(name(2), absent)) == (False, None)
    assert memory.bitmap(NAMESPACE, 0, keys(1, 2, 3), present - 1) == 0b001
    assert memory.bitmap(NAMESPACE, 0, keys(1, 2, 3), present) == 0


def test_the_oldest_answers_of_the_scope_that_rests_are_forgotten_first() -> None:
    memory = Existence(most_answers=3)
    names = [name(1, group=1), name(2, group=1), name(3), name(4)]
    for each in names:
        memory.note(each, True, 0)
    assert [memory.find(each, 1) for each in names] == [None, True, True, True]
    assert len(memory) == 3


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans(), st.booleans()), max_size=60))
@examples(100)
def test_existence_is_a_bounded_dict(steps: list[tuple[int, int, bool, bool]]) -> None:
    memory, plain = Existence(most_answers=1000), dict[ObjectName, bool]()
    for number, group, present, forgets in steps:
        if forgets:
            memory.forget(name(number, group))
            plain.pop(name(number, group), None)
        else:
            memory.note(name(number, group), present, 0)
            plain[name(number, group)] = present
    assert len(memory) == len(plain)
    for number in range(6):
        for group in range(3):
            assert memory.find(name(number, group), 1) == plain.get(name(number, group))
    memory.forget_namespaces(NAMESPACE[:3])
    assert len(memory) == 0


# ---- searches -------------------------------------------------------------------------------------


@given(st.integers(0, 3000), st.floats(0, 1), st.integers(2, 600))
@examples(200)
def test_a_chains_length_is_found_in_few_round_trips(count: int, share: float, most: int) -> None:
    length = round(count * share)
    trips = 0

    def exist(places: Sequence[int]) -> list[bool]:
        nonlocal trips
        trips += 1
        assert len(places) <= max(most, count.bit_length() + 1)
        assert len(set(places)) == len(places)
        return [place < length for place in places]

    assert chain_length(count, most, exist) == length
    assert trips <= max(1, count.bit_length())


def test_a_chain_that_fits_into_one_round_trip_ends_at_its_first_gap() -> None:
    there = {0, 1, 3, 4}
    assert chain_length(6, 8, lambda places: [place in there for place in places]) == 2


# ---- names ----------------------------------------------------------------------------------------


def test_names_separate_all_that_must_differ() -> None:
    names = Names("p", 1)
    base = names.of(name(1), 7)
    assert base == f"p/1/{NAMESPACE.hex()}/0000000000000007/0/{key(1).hex()}"
    others = [names.of(name(2), 7), names.of(name(1, group=1), 7), names.of(name(1, namespace=b"m" * 32), 7)]
    assert len({base, names.of(name(1), 8), Names("p", 2).of(name(1), 7), *others}) == 6


def test_a_namespace_is_in_the_scope_of_each_of_its_parts() -> None:
    namespace = bytes(range(96))
    assert scopes_of(namespace) == [b"", namespace[:32], namespace[:64], namespace]
    assert [scope_of(namespace[:end]) for end in (0, 5, 32, 63, 96)] == [
        b"", b"", namespace[:32], namespace[:32], namespace,
    ]  # fmt: skip


# ---- the breaker ----------------------------------------------------------------------------------


def closed_breaker() -> StoreBreaker:
    breaker = StoreBreaker(random.Random(1))
    breaker.succeeded()
    return breaker


def test_the_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = closed_breaker()
    for _ in range(10):
        assert [breaker.failed(0) for _ in range(FAILURES_TO_OPEN - 1)] == [False] * (FAILURES_TO_OPEN - 1)
        breaker.succeeded()
    assert breaker.passes
    assert [breaker.failed(0) for _ in range(FAILURES_TO_OPEN)] == [False] * (FAILURES_TO_OPEN - 1) + [True]
    assert (breaker.passes, breaker.state, breaker.breaks) == (False, "open", 1)


def test_an_open_breaker_probes_with_growing_jittered_waits() -> None:
    breaker, now = closed_breaker(), 0
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(now)
    waits = []
    for _ in range(8):
        began = now
        while not breaker.begins_probe(now):
            now += SECOND // 100
        assert not breaker.begins_probe(now), "one probe at a time"
        waits.append((now - began) / SECOND)
        breaker.failed(now)
    for wait, middle in zip(waits, [1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert 0.5 * middle <= wait <= 1.5 * middle + 0.02
    while not breaker.begins_probe(now):
        now += SECOND
    breaker.succeeded()
    assert (breaker.passes, breaker.breaks) == (True, 1)


# ---- lanes ----------------------------------------------------------------------------------------


def no_store() -> StoreClient:
    raise StoreError("there is none")


@pytest.fixture
def lanes() -> Iterator[Lanes[str]]:
    lanes = Lanes[str]("test", 2, no_store, lambda blames: f"overdue {blames}", lambda error: f"failed: {error}")
    yield lanes
    lanes.close(within(5), "closed")


def ends(lanes: Lanes[str], count: int) -> dict[int, str]:
    found: dict[int, str] = {}
    deadline = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < deadline
        select.select([lanes.completion_fd], [], [], 0.05)
        for job, result in lanes.drain():
            assert job.number not in found
            found[job.number] = result
    return found


def test_a_reader_does_not_wait_for_a_writer(lanes: Lanes[str]) -> None:
    go = threading.Event()

    def write(job: Job[str], lane: Lane) -> str:
        go.wait(20)
        return "written"

    for number in range(1, 6):
        assert lanes.submit(Job(number, write, False, within(20)))
    assert lanes.submit(Job(6, lambda job, lane: "read", True, within(20)))
    assert ends(lanes, 1) == {6: "read"}
    go.set()
    assert ends(lanes, 5) == dict.fromkeys(range(1, 6), "written")


def test_a_queue_is_bounded(lanes: Lanes[str]) -> None:
    go = threading.Event()

    def wait(job: Job[str], lane: Lane) -> str:
        go.wait(20)
        return "done"

    number = 0
    while lanes.submit(Job(number := number + 1, wait, False, within(60))):
        assert number < 5000
    assert number > 1000
    assert lanes.submit(Job(number + 1, lambda job, lane: "read", True, within(20))), "readers have their own"
    go.set()
    ends(lanes, number)


def test_a_job_ends_at_its_deadline_while_its_lane_hangs(lanes: Lanes[str]) -> None:
    go = threading.Event()

    def hang(job: Job[str], lane: Lane) -> str:
        go.wait(20)
        return "late"

    began = time.monotonic()
    for number in (1, 2):
        lanes.submit(Job(number, hang, True, within(0.2)))
    assert ends(lanes, 2) == {1: "overdue True", 2: "overdue True"}
    assert time.monotonic() - began < 5
    lanes.submit(Job(3, lambda job, lane: "done", True, within(0.2)))
    assert ends(lanes, 1) == {3: "overdue True"}, "every lane hangs"
    go.set()
    lanes.submit(Job(4, lambda job, lane: "done", True, within(20)))
    assert ends(lanes, 1) == {4: "done"}, "a late result is no end"


def test_who_waited_for_another_job_only_does_not_blame_the_store(lanes: Lanes[str]) -> None:
    began, go = threading.Event(), threading.Event()

    def work(job: Job[str], lane: Lane) -> str:
        began.set()
        go.wait(20)
        return "done"

    lanes.submit(Job(1, work, False, within(20)))
    assert began.wait(20)
    lanes.submit(Job(2, work, False, within(0.1)))
    assert ends(lanes, 1) == {2: "overdue False"}
    go.set()
    assert ends(lanes, 1) == {1: "done"}


@pytest.mark.parametrize("how", ["overdue", "cancelled", "closed"])
def test_a_job_that_copies_ends_after_its_copy(lanes: Lanes[str], how: str) -> None:
    copying, go, after = threading.Event(), threading.Event(), threading.Event()

    def copy(job: Job[str], lane: Lane) -> str:
        with lane.inside(job):
            copying.set()
            go.wait(20)
        after.set()
        return "done"

    lanes.submit(Job(1, copy, False, within(0.1 if how == "overdue" else 20)))
    assert copying.wait(20)
    closer = threading.Thread(target=lanes.close, args=(within(0.01), "closed"))
    if how == "cancelled":
        lanes.end(1, "cancelled")
    elif how == "closed":
        closer.start()
    time.sleep(0.3)
    assert lanes.drain() == [], "L1 is still in use"
    assert how != "closed" or closer.is_alive()
    go.set()
    if how == "closed":
        closer.join(20)
        found = {job.number: result for job, result in lanes.drain()}
    else:
        found = ends(lanes, 1)
    assert found == {1: {"overdue": "overdue True"}.get(how, how)}
    assert not after.is_set(), "it goes no further"


def test_an_ended_job_does_not_begin_to_copy(lanes: Lanes[str]) -> None:
    away, go, copied = threading.Event(), threading.Event(), threading.Event()

    def copy(job: Job[str], lane: Lane) -> str:
        away.set()
        go.wait(20)
        with lane.inside(job):
            copied.set()
        return "done"

    lanes.submit(Job(1, copy, True, within(20)))
    assert away.wait(20)
    lanes.end(1, "cancelled")
    assert ends(lanes, 1) == {1: "cancelled"}
    go.set()
    lanes.submit(Job(2, lambda job, lane: "done", True, within(20)))
    ends(lanes, 1)
    assert not copied.is_set()


def test_a_job_that_raises_ends_as_failed_and_the_lane_goes_on(lanes: Lanes[str]) -> None:
    lanes.submit(Job(1, lambda job, lane: str(lane.client), True, within(20)))
    assert ends(lanes, 1) == {1: "failed: there is none"}
    lanes.submit(Job(2, lambda job, lane: "done", True, within(20)))
    assert ends(lanes, 1) == {2: "done"}
