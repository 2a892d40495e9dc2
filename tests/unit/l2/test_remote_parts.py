"""The rules of remote tiers that need no store: existence, searches of chains, the breaker, the lanes."""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.l1_memory import NAMESPACE, PAGE, Ends, L1Memory, key, keys, name, within
from support.properties import examples

from kvserver.config import parse_tiers
from kvserver.l2 import ObjectName, TierOutcome
from kvserver.l2.remote.breaker import FAILURES_TO_OPEN, StoreBreaker
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.existence import ABSENT_SECONDS, PRESENT_SECONDS, Existence
from kvserver.l2.remote.lanes import BUNDLE_BYTES, Job, Lane, Lanes, alone
from kvserver.l2.remote.names import Names, scope_of, scopes_of
from kvserver.l2.remote.search import chain_length
from kvserver.l2.remote.store import ConnectStore, StoreClient, StoreError
from kvserver.l2.remote.tier import RemoteTier

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


def no_store(buffer: LaneBuffer) -> StoreClient:
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
        assert lanes.submit(Job(number, alone(write), False, within(20)))
    assert lanes.submit(Job(6, alone(lambda job, lane: "read"), True, within(20)))
    assert ends(lanes, 1) == {6: "read"}
    go.set()
    assert ends(lanes, 5) == dict.fromkeys(range(1, 6), "written")


def test_a_queue_is_bounded(lanes: Lanes[str]) -> None:
    go = threading.Event()

    def wait(job: Job[str], lane: Lane) -> str:
        go.wait(20)
        return "done"

    number = 0
    while lanes.submit(Job(number := number + 1, alone(wait), False, within(60))):
        assert number < 5000
    assert number > 1000
    assert lanes.submit(Job(number + 1, alone(lambda job, lane: "read"), True, within(20))), "readers have their own"
    go.set()
    ends(lanes, number)


def test_a_job_ends_at_its_deadline_while_its_lane_hangs(lanes: Lanes[str]) -> None:
    go = threading.Event()

    def hang(job: Job[str], lane: Lane) -> str:
        go.wait(20)
        return "late"

    began = time.monotonic()
    for number in (1, 2):
        lanes.submit(Job(number, alone(hang), True, within(0.2)))
    assert ends(lanes, 2) == {1: "overdue True", 2: "overdue True"}
    assert time.monotonic() - began < 5
    lanes.submit(Job(3, alone(lambda job, lane: "done"), True, within(0.2)))
    assert ends(lanes, 1) == {3: "overdue True"}, "every lane hangs"
    go.set()
    lanes.submit(Job(4, alone(lambda job, lane: "done"), True, within(20)))
    assert ends(lanes, 1) == {4: "done"}, "a late result is no end"


def test_who_waited_for_another_job_only_does_not_blame_the_store(lanes: Lanes[str]) -> None:
    began, go = threading.Event(), threading.Event()

    def work(job: Job[str], lane: Lane) -> str:
        began.set()
        go.wait(20)
        return "done"

    lanes.submit(Job(1, alone(work), False, within(20)))
    assert began.wait(20)
    lanes.submit(Job(2, alone(work), False, within(0.1)))
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

    lanes.submit(Job(1, alone(copy), False, within(0.1 if how == "overdue" else 20)))
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

    lanes.submit(Job(1, alone(copy), True, within(20)))
    assert away.wait(20)
    lanes.end(1, "cancelled")
    assert ends(lanes, 1) == {1: "cancelled"}
    go.set()
    lanes.submit(Job(2, alone(lambda job, lane: "done"), True, within(20)))
    ends(lanes, 1)
    assert not copied.is_set()


def test_a_job_that_raises_ends_as_failed_and_the_lane_goes_on(lanes: Lanes[str]) -> None:
    lanes.submit(Job(1, alone(lambda job, lane: str(lane.client)), True, within(20)))
    assert ends(lanes, 1) == {1: "failed: there is none"}
    lanes.submit(Job(2, alone(lambda job, lane: "done"), True, within(20)))
    assert ends(lanes, 1) == {2: "done"}


# ---- bundles --------------------------------------------------------------------------------------


class Commands:
    """Runs jobs of bundles, and keeps which were run together. The first command waits until go()."""

    def __init__(self) -> None:
        self.ran: list[list[int]] = []
        self._go, self.waits = threading.Event(), threading.Event()

    def run(self, jobs: Sequence[Job[str]], lane: Lane) -> dict[Job[str], str]:
        self.ran.append([job.number for job in jobs])
        self.waits.set()
        assert self._go.wait(20)
        return dict.fromkeys(jobs, "done")

    def go(self) -> None:
        self._go.set()


def test_small_jobs_of_one_bundle_share_a_command_of_a_mebibyte(lanes: Lanes[str]) -> None:
    commands = Commands()
    lanes.submit(Job(1, commands.run, False, within(20), bundle="a", bytes=1))
    assert commands.waits.wait(20)
    for number in range(2, 9):
        lanes.submit(Job(number, commands.run, False, within(20), bundle="a", bytes=BUNDLE_BYTES // 4))
    lanes.submit(Job(9, commands.run, False, within(20), bundle="b", bytes=1))
    lanes.submit(Job(10, alone(lambda job, lane: "done"), False, within(20)))
    lanes.submit(Job(11, commands.run, False, within(20), bundle="b", bytes=1))
    commands.go()
    assert ends(lanes, 11) == dict.fromkeys(range(1, 12), "done")
    assert commands.ran == [[1], [2, 3, 4, 5], [6, 7, 8], [9], [11]]


def test_a_job_that_ended_in_the_queue_is_in_no_command(lanes: Lanes[str]) -> None:
    commands = Commands()
    for number in (1, 2, 3, 4):
        lanes.submit(Job(number, commands.run, False, within(20), bundle="first" if number == 1 else "a", bytes=1))
        assert commands.waits.wait(20)
    lanes.end(3, "cancelled")
    commands.go()
    assert ends(lanes, 4) == {1: "done", 2: "done", 3: "cancelled", 4: "done"}
    assert commands.ran == [[1], [2, 4]]


def test_each_job_of_a_command_ends_at_its_own_deadline(lanes: Lanes[str]) -> None:
    commands = Commands()
    lanes.submit(Job(1, commands.run, False, within(20), bundle="first", bytes=1))
    assert commands.waits.wait(20)
    second = Commands()
    for number, seconds in ((2, 0.3), (3, 20.0)):
        lanes.submit(Job(number, second.run, False, within(seconds), bundle="a", bytes=3 * number))
    commands.go()
    assert ends(lanes, 2) == {1: "done", 2: "overdue True"}
    second.go()
    assert ends(lanes, 1) == {3: "done"}
    assert second.ran == [[2, 3]]


def test_a_command_that_fails_fails_all_of_its_jobs(lanes: Lanes[str]) -> None:
    commands = Commands()

    def fail(jobs: Sequence[Job[str]], lane: Lane) -> dict[Job[str], str]:
        raise StoreError("down")

    lanes.submit(Job(1, commands.run, False, within(20), bundle="first", bytes=1))
    assert commands.waits.wait(20)
    for number in (2, 3):
        lanes.submit(Job(number, fail, False, within(20), bundle="a", bytes=1))
    commands.go()
    assert ends(lanes, 3) == {1: "done", 2: "failed: down", 3: "failed: down"}


# ---- a lane's buffer ------------------------------------------------------------------------------


def test_views_of_a_buffer_do_not_overlap_and_are_at_their_offsets() -> None:
    buffer = LaneBuffer()
    for sizes in ([1, 4096, 5000], [3 << 20, 7], [10]):
        views = buffer.views(sizes)
        assert [len(view) for view in views] == sizes
        for number, view in enumerate(views, start=1):
            view[:] = bytes([number]) * len(view)
        for number, view in enumerate(views, start=1):
            assert set(view) == {number}
            assert os.pread(buffer.fd, len(view), buffer.offset_of(view)) == bytes(view)
    assert buffer.bytes == 4 << 20, "it keeps what it has grown to"
    buffer.free()
    assert (buffer.bytes, buffer.fd) == (0, -1)


# ---- what fails together --------------------------------------------------------------------------


class FailingClient:
    """A store that answers what exists and fails every get, both only after go."""

    most_value_bytes, most_questions = 1 << 30, 512

    waiting: ClassVar[threading.Semaphore]
    go: ClassVar[threading.Event]

    def __init__(self, buffer: LaneBuffer) -> None:
        pass

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[memoryview | None]:
        self.waiting.release()
        assert self.go.wait(20)
        raise StoreError("down")

    def exist(self, names: Sequence[str]) -> list[bool]:
        self.waiting.release()
        assert self.go.wait(20)
        return [True for _ in names]

    def read_ids(self, names: Sequence[str]) -> list[bytes | None]:
        return [b"i" * 16 for _ in names]

    def close(self) -> None:
        pass


def test_objects_of_one_command_are_one_failure_for_the_breaker() -> None:
    class Client(FailingClient):
        waiting, go = threading.Semaphore(0), threading.Event()

    l1 = L1Memory()
    (url,) = parse_tiers(["valkey://nowhere"])
    tier = RemoteTier(url, "p", l1.region, PAGE, cast(ConnectStore, Client), lanes=2)
    tier_ends = Ends(tier)
    try:
        tier_ends.until("ready")
        tickets = [tier.get(name(1), l1.object(PAGE), within(20)), tier.probe(NAMESPACE, 0, key(2), False, within(20))]
        assert Client.waiting.acquire(timeout=20)
        assert Client.waiting.acquire(timeout=20), "both lanes wait"
        tickets += [tier.get(name(n), l1.object(PAGE), within(20)) for n in range(3, 13)]
        Client.go.set()
        outcomes = [end.outcome for end in tier_ends.all(tickets)]
        assert outcomes.count(TierOutcome.UNAVAILABLE) == 11
        assert Client.waiting.acquire(timeout=20)
        assert not Client.waiting.acquire(blocking=False), "ten gets were one command"
        assert (tier.status().breaks, tier.state) == (0, "ready"), "two failures"
    finally:
        Client.go.set()
        tier.close(within(5))
