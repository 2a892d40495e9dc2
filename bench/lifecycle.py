"""What following the lifetimes of L0 blocks costs: events a second, bytes a block, and the loop's part of it.

python bench/lifecycle.py [--rounds 5] [--blocks 100000]
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from common import alternate, median, table

from kvserver._native import BlockLifetimes, LifetimeMetrics, check_records
from kvserver.events import Bus, Event, RequestEnded, Subscriber
from kvserver.protocol import (
    MARK,
    RECORD_ACCESSED,
    RECORD_ALLOCATED,
    RECORD_EVICTED,
    RECORD_OPERATION_SHIFT,
    RECORD_RELEASED,
    RESIDENCY_SECONDS,
)

EVENTS = 200_000  # of one measurement, in batches
SIZES = (60, 2048)
BURSTS, BURST = 50, 100  # of events published
Batch = tuple[bytes, bytes]


def pool_events(blocks: int, count: int) -> array[int]:
    """A pool at work: blocks are allocated and found again in any order, the longest free one is evicted."""
    rng = random.Random(0)
    free = deque(rng.sample(range(1, blocks), blocks - 1))
    used: list[int] = []
    events = array("I")

    def did(operation: int, block: int) -> None:
        events.append(operation << RECORD_OPERATION_SHIFT | block)

    while len(events) < count:
        if len(used) < blocks // 2:
            block = free.popleft()
            did(RECORD_EVICTED, block)
            did(RECORD_ALLOCATED, block)
            used.append(block)
        else:
            at = rng.randrange(len(used))
            used[at], used[-1] = used[-1], used[at]
            did(RECORD_ACCESSED, used[-1])
            did(RECORD_RELEASED, used[-1])
            did(RECORD_RELEASED, block := used.pop())
            free.append(block)
    return events[:count]


def batches(events: array[int], size: int) -> list[Batch]:
    """Two marks in each, a millisecond from one to the next."""
    cut = [events[first : first + size] for first in range(0, len(events) - size + 1, size)]
    return [
        (part.tobytes(), MARK.pack(0, (2 * n + 1) * 1_000_000) + MARK.pack(size // 2, (2 * n + 2) * 1_000_000))
        for n, part in enumerate(cut)
    ]


class PlainLifetimes:
    """The same counts and spans in Python: a dict of lists, nothing checked, no buckets, no sample."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}  # born, accessed, released, owners
        self.counts = [0] * (RECORD_EVICTED + 1)
        self.seconds = 0.0

    def apply(self, records: bytes, marks: bytes) -> None:
        codes = array("I", records)
        moments = list(MARK.iter_unpack(marks))
        for (first, now), (end, _) in zip(moments, [*moments[1:], (len(codes), 0)], strict=True):
            for code in codes[first:end]:
                self._step(code >> RECORD_OPERATION_SHIFT, code & (1 << RECORD_OPERATION_SHIFT) - 1, now)

    def _step(self, operation: int, block: int, now: int) -> None:
        self.counts[operation] += 1
        if operation == RECORD_ALLOCATED:
            self.blocks[block] = [now, now, 0, 1]
        elif (life := self.blocks.get(block)) is None:
            pass
        elif operation == RECORD_ACCESSED:
            self.seconds += (now - life[1]) / 1e9
            life[1] = now
            life[3] += 1
        elif operation == RECORD_RELEASED:
            life[2] = now
            life[3] -= 1
        else:
            self.seconds += (now - life[0] + now - life[1] + now - life[2]) / 1e9
            del self.blocks[block]


def fresh(blocks: int) -> BlockLifetimes:
    return BlockLifetimes(LifetimeMetrics(list(RESIDENCY_SECONDS)), blocks, 1.0, 0)


def millions_a_second(apply: Callable[[bytes, bytes], None], work: Sequence[Batch]) -> float:
    began = time.perf_counter()
    for records, marks in work:
        apply(records, marks)
    return sum(len(records) for records, _ in work) / 4 / (time.perf_counter() - began) / 1e6


def reported_millions_a_second(blocks: int, work: Sequence[tuple[int, bytes, bytes]]) -> float:
    """Each batch is the blocks of one request, which ends 50 requests later. An event is a block owned or released."""
    lives = fresh(blocks)
    began = time.perf_counter()
    for number, ids, contents in work:
        lives.own_blocks(number, 0, ids, contents, (number + 1) * 1_000_000)
        lives.end_request(max(0, number - 50), (number + 1) * 1_000_000)
    return 2 * sum(len(ids) for _, ids, _ in work) / 4 / (time.perf_counter() - began) / 1e6


def request_blocks(blocks: int, size: int) -> list[tuple[int, bytes, bytes]]:
    """A third of each request's blocks belongs to the request before it, too."""
    rng = random.Random(0)
    pool = range(1, blocks)
    found: list[tuple[int, bytes, bytes]] = []
    shared: list[int] = []
    for number in range(EVENTS // 2 // size):
        ids = array("I", [*shared, *rng.sample(pool, size - len(shared))])
        shared = list(ids[: size // 3])
        found.append((number, ids.tobytes(), array("Q", (block * 7 + number // 200 for block in ids)).tobytes()))
    return found


def check_micros(work: Sequence[Batch], blocks: int) -> float:
    began = time.perf_counter()
    for records, marks in work:
        check_records(records, marks, blocks)
    return (time.perf_counter() - began) / len(work) * 1e6


class NullSubscriber(Subscriber):
    name = "null"

    def handle(self, event: Event) -> None:
        pass

    def close(self) -> None:
        pass


def publish_micros(bus: Bus) -> float:
    """What the loop pays: bursts with rest between them, in which the bus's thread takes what there is."""
    event = RequestEnded(time.monotonic_ns(), "instance", "model", "request")
    took = 0.0
    for _ in range(BURSTS):
        began = time.perf_counter()
        for _ in range(BURST):
            bus.publish(event)
        took += time.perf_counter() - began
        assert bus.flush()
    return took / (BURSTS * BURST) * 1e6


def bare_micros() -> float:
    """A call of a method that does nothing, as often: what no loop can be below."""
    handle, event = NullSubscriber().handle, RequestEnded(0, "instance", "model", "request")
    began = time.perf_counter()
    for _ in range(BURSTS * BURST):
        handle(event)
    return (time.perf_counter() - began) / (BURSTS * BURST) * 1e6


def show_rates(rounds: int, blocks: int) -> None:
    events = pool_events(blocks, EVENTS)
    rows: list[list[object]] = []
    for size in SIZES:
        work, owned = batches(events, size), request_blocks(blocks, size)
        found = alternate(
            rounds,
            lambda: millions_a_second(fresh(blocks).apply, work),  # noqa: B023
            lambda: reported_millions_a_second(blocks, owned),  # noqa: B023
            lambda: millions_a_second(PlainLifetimes().apply, work),  # noqa: B023
            lambda: check_micros(work, blocks),  # noqa: B023
        )
        exact, reported, plain, check = map(median, found)
        rows.append([size, exact, reported, plain, exact / plain, check])
    header = ["events a batch", "exact M/s", "reported M/s", "plain Python M/s", "exact/plain", "check us a batch"]
    print(table(header, rows))


def show_publish(rounds: int) -> None:
    watched = Bus([NullSubscriber()])
    watched.start()
    found = alternate(rounds, lambda: publish_micros(Bus()), lambda: publish_micros(watched), bare_micros)
    watched.close()
    unwatched, one, bare = map(median, found)
    print(table(["publish us: no subscriber", "one", "a bare call"], [[unwatched, one, bare]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=100_000)
    options = parser.parse_args()
    show_rates(options.rounds, options.blocks)
    print(f"{BlockLifetimes.bytes_per_block} bytes a block; {options.blocks} blocks, all lifetimes in the sample")
    show_publish(options.rounds)


if __name__ == "__main__":
    main()
