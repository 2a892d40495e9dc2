"""One call of the file tier's index looked at all its records: an eviction where all had been used since they were written, the
first leaf that was queued after a clear. The loop stood still for 0.14 to 2.4 s at 1 to 3 million records."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.file_tiers import PAGE, FaultyDisk, FileRig, SmallL1, key_of, keys_of, name_of

from kvserver._native import RecordTable
from kvserver.l2 import TierOutcome

NAMESPACE, OTHER, CHAIN, UNIT, MOST = b"n" * 32, b"o" * 32, 32, 16, 64
FEW, MANY = 6_000, 60_000
LOOP_CALLS = (
    "holds", "find", "add", "remove", "touch", "evict", "spaces", "walk", "drop_space", "sweep", "begin_next_log",
    "fill_next_log", "switch_logs", "drop_next_log",
)  # fmt: skip


class Measured:
    """A table and the steps of its longest call, by method."""

    def __init__(self) -> None:
        self.table = RecordTable(7)
        self.longest = Counter[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            before = self.table.steps
            result = getattr(self.table, name)(*arguments)
            self.longest[name] = max(self.longest[name], self.table.steps - before)
            return result

        return call

    def fill(self, namespace: bytes, records: int) -> None:
        """Every other chain is of units."""
        number = 0
        while number < records:
            unit = 1 if number // CHAIN % 2 else min(UNIT, records - number)
            parent = key_of(number - 1) if number % CHAIN else b""
            extent = number.to_bytes(4, "little") + bytes([unit, 0, 0, 0])
            self.add(namespace, 1, 0, keys_of(*range(number, number + unit)), parent, 1, extent)
            number += unit


def longest_calls(records: int) -> Counter[str]:
    """All that a loop does with a table, in the states in which it had most to look at."""
    rig = Measured()
    rig.table.begin_log(1, 0)
    rig.fill(NAMESPACE, records)
    chains = list(range(0, records, CHAIN))
    random.Random(1).shuffle(chains)
    for first in chains:  # all are used since they were written
        rig.touch(NAMESPACE, 1, 0, keys_of(*range(first, min(first + CHAIN, records))))
    for _ in range(100):
        assert rig.evict() is not None
    rig.fill(OTHER, records // 10)
    rig.holds(NAMESPACE, 1, 0, keys_of(*range(CHAIN)))
    rig.find(NAMESPACE, 1, 0, key_of(5))
    rig.remove(NAMESPACE, 1, 0, key_of(5))
    at: int | None = 0
    while at is not None:
        at, _ = rig.walk(at, MOST)
    rig.begin_next_log(2)
    while not rig.fill_next_log(MOST):
        rig.table.drain_next_log()
    rig.switch_logs()
    rig.begin_next_log(3)
    rig.drop_next_log()
    assert len(rig.spaces()) == 2
    assert rig.drop_space(NAMESPACE, 1, 0)
    while rig.evict() is None:
        pass  # the oldest leaves are of what was dropped
    while not rig.table.swept:
        rig.sweep(MOST)
    rig.add(OTHER, 1, 0, key_of(records), b"", 1, bytes([1, 0, 0, 0, 1, 0, 0, 0]))
    assert rig.evict() is not None
    assert rig.longest.keys() == set(LOOP_CALLS)
    return rig.longest


@pytest.fixture(scope="module")
def longest() -> tuple[Counter[str], Counter[str]]:
    return longest_calls(FEW), longest_calls(MANY)


@pytest.mark.parametrize("call", LOOP_CALLS)
def test_no_call_looks_at_more_where_the_tier_holds_ten_times_more(
    longest: tuple[Counter[str], Counter[str]], call: str
) -> None:
    few, many = longest
    assert many[call] <= 1.5 * few[call] + 8, "a heap and the chains of a hash table grow with the logarithm"


RECORDS = 1500  # of two pages each


@pytest.fixture(scope="module")
def full_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileRig]:
    l1 = SmallL1(2 * RECORDS + 64, fragmented=False)
    rig = FileRig(tmp_path_factory.mktemp("l2") / "tier", f"{(2 * RECORDS + 1) * PAGE}B", l1=l1).opened()
    for number in range(RECORDS):
        assert rig.put(name_of(number), PAGE) is TierOutcome.DONE
    yield rig.written()
    rig.close()


def test_room_for_a_large_object_is_made_in_slices(full_rig: FileRig) -> None:
    large, _ = full_rig.begin_put(name_of(RECORDS), 2 * (RECORDS - 100) * PAGE)
    at_once = full_rig.tier.status().evictions
    assert 0 < at_once <= 256
    assert full_rig.end(large).outcome is TierOutcome.DONE
    assert full_rig.tier.status().evictions > 1000


class SlowFirst(FaultyDisk):
    """The first batch without entries, of pages that a clear freed, is slow: meanwhile the next one grows."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on_writing = threading.Event()
        self.go_on_writing.set()  # an opening writes such a batch, too

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if not data:
            self.go_on_writing.wait(20)
        super().write(fd, data, offset)


def test_a_clear_frees_its_pages_in_slices(tmp_path: Path) -> None:
    disk, records = SlowFirst(), 2 * RECORDS
    l1 = SmallL1(64, fragmented=False)
    rig = FileRig(tmp_path / "tier", f"{(2 * records + 1) * PAGE}B", l1=l1, disk=disk).opened()
    for number in range(records):
        assert rig.put(name_of(number), PAGE) is TierOutcome.DONE
    rig.written()
    used = [rig.tier.status().used_bytes]
    disk.go_on_writing.clear()
    assert rig.clear() is TierOutcome.DONE
    for _ in range(20):
        rig.turn(0.01)  # the sweep ends
    assert rig.tier.status().used_bytes == used[0]
    disk.go_on_writing.set()
    while used[-1] > PAGE:
        rig.turn()
        used.append(rig.tier.status().used_bytes)
    assert max(before - after for before, after in itertools.pairwise(used)) <= 2 * 512 * 2 * PAGE
    rig.close()
