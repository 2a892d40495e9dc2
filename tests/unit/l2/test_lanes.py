"""Lanes of remote tiers: jobs end at their deadlines, small ones share a command, buffers do not overlap."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar, cast

import pytest
from support.l1_memory import NAMESPACE, PAGE, Ends, L1Memory, key, name, within

from kvserver.config import parse_tiers
from kvserver.l2 import TierOutcome
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.lanes import BUNDLE_BYTES, Job, Lane, Lanes, alone
from kvserver.l2.remote.store import ConnectStore, StoreClient, StoreError
from kvserver.l2.remote.tier import RemoteTier


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


def test_job_that_only_waited_for_another_job_does_not_blame_the_store(lanes: Lanes[str]) -> None:
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


class FailingClient:
    """A store that answers what exists and fails every get, both only after go."""

    most_value_bytes, most_questions, asks_apart = 1 << 30, 512, False

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

    def write_id(self, name: str, value: bytes) -> str:
        return ""

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
