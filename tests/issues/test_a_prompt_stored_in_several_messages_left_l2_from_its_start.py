"""A prompt that was stored in several messages, as chunked prefill does, was several chains to a file tier: the first chunk of a message had no
parent. The end of the oldest message was evicted first: a tier had 82 chunks, of which 14 were of use. The same happened where writes ended in
another order than they had begun, and where a message began with chunks that L1 had.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.file_tiers import NAMESPACE, PAGE, FaultyDisk, FileRig, key_of, name_of
from support.worker import make_keys
from unit.tiering.test_spill import Spilling, spilling

from kvserver.l2 import TierOutcome


def parents(s: Spilling, keys: list[bytes]) -> list[bytes]:
    """Of the objects in the tier."""
    found = {name.key: parent for name, parent in s.tier.parents.items()}
    return [found[key] for key in keys]


def test_the_first_chunk_of_a_message_has_the_last_one_of_the_message_before_as_its_parent() -> None:
    with spilling() as s:
        keys = make_keys(12)
        for first in range(0, 12, 4):
            after = keys[first - 1] if first else None
            s.worker.store(keys[first : first + 4], s.worker.blocks_for(4), after=after)
        s.written(12)
        assert parents(s, keys) == [b"", *keys[:-1]]


def test_without_a_named_chunk_a_message_begins_a_chain() -> None:
    """As of an adapter that names none."""
    with spilling() as s:
        keys = make_keys(4)
        s.worker.store(keys[:2], s.worker.blocks_for(2))
        s.worker.store(keys[2:], s.worker.blocks_for(2))
        s.written(4)
        assert parents(s, keys) == [b"", keys[0], b"", keys[2]]


def test_a_chunk_behind_those_that_l1_has_keeps_its_parent() -> None:
    with spilling() as s:
        keys = make_keys(6)
        s.worker.store(keys[:2], s.worker.blocks_for(2))
        s.worker.store(keys[4:5], s.worker.blocks_for(1), after=keys[3])
        s.worker.store(keys, s.worker.blocks_for(6))
        s.written(6)
        assert parents(s, keys) == [b"", *keys[:-1]]


def test_a_load_offers_what_a_tier_lacks_with_its_parent() -> None:
    with spilling() as s:
        keys = make_keys(4)
        s.tier.fail = {keys[3]: TierOutcome.UNAVAILABLE}
        s.store(keys)
        s.written(3)
        assert s.worker.lookup(keys) == 4
        s.worker.load(keys, s.worker.blocks_for(4, first=30))
        s.written(4)
        assert parents(s, keys) == [b"", *keys[:-1]]


def test_a_record_whose_write_ends_before_that_of_its_parent_is_still_its_child(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = FileRig(tmp_path / "tier", size="1MiB", disk=disk).opened()
    try:
        disk.file.writes.most_bytes = PAGE
        disk.file.writes.delay_micros = 2000
        assert rig.put(name_of(0), PAGE) is TierOutcome.DONE
        slow, _ = rig.begin_put(name_of(1), 40 * PAGE, parent=key_of(0))
        fast, _ = rig.begin_put(name_of(2), PAGE, parent=key_of(1))
        assert {rig.end(ticket).outcome for ticket in (slow, fast)} == {TierOutcome.DONE}
        disk.file.writes.delay_micros = 0
        assert rig.put(name_of(3), PAGE, parent=key_of(2)) is TierOutcome.DONE
        other = 1000
        while len(held := rig.holds(0, 1, 2, 3)) == 4:
            assert rig.put(name_of(other), PAGE) is TierOutcome.DONE
            other += 1
        assert held == [0, 1, 2], "the end of the chain leaves first"
    finally:
        rig.close()


@pytest.mark.parametrize("how", ["drop", "clear"])
def test_a_record_that_waits_for_its_parent_is_dropped_like_any_other(tmp_path: Path, how: str) -> None:
    disk = FaultyDisk()
    rig = FileRig(tmp_path / "tier", size="1MiB", disk=disk).opened()
    try:
        disk.file.writes.most_bytes = PAGE
        disk.file.writes.delay_micros = 5000
        slow, _ = rig.begin_put(name_of(1), 40 * PAGE)
        fast, _ = rig.begin_put(name_of(2), PAGE, parent=key_of(1))
        rig.until(lambda: disk.file.writes.calls >= 10)  # the second one needs two
        assert not rig.ended(fast)
        if how == "drop":
            rig.tier.drop(NAMESPACE, 0, key_of(2))
        else:
            assert rig.clear() is TierOutcome.DONE
        assert rig.end(fast).outcome is TierOutcome.CANCELLED
        assert rig.end(slow).outcome is (TierOutcome.DONE if how == "drop" else TierOutcome.CANCELLED)
        assert rig.holds(1, 2) == ([1] if how == "drop" else [])
    finally:
        rig.close()
