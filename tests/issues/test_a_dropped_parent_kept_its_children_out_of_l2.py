"""An object that a tier's queue had dropped once kept everything behind it out of the tier for as long as the queue was never empty, though it
was written later: a hot prompt lost its end.
"""

from __future__ import annotations

from support.daemon import wait_until
from support.worker import make_keys
from unit.tiering.test_spill import Spilling, spilling

from kvserver.l2 import TierOutcome

STUCK = 16  # puts that a tier has at a time


def drop_prompt_of_a_busy_queue(s: Spilling) -> list[bytes]:
    """The keys of a prompt whose first object failed, and with it those behind it; the queue has others, and no turn comes."""
    s.tier.stopped = True
    keys, busy = make_keys(4), make_keys(STUCK + 8)
    s.store(make_keys(15))
    s.store(keys)
    s.store(busy)
    wait_until(lambda: len(s.tier.waiting) == STUCK)
    s.tier.fail[keys[0]] = TierOutcome.UNAVAILABLE
    s.tier.kept_waiting = set(busy)
    s.tier.release()
    wait_until(lambda: s.dropped() == {"unavailable": 1, "parent": 3})
    wait_until(lambda: {begun.name.key for begun in s.tier.waiting} == set(busy[:STUCK]))
    assert s.status().queue_objects == len(busy), "the queue is not empty"
    return keys


def go_on(s: Spilling) -> None:
    s.tier.kept_waiting = set()
    s.tier.release()
    wait_until(lambda: not s.status().queue_objects)


def test_a_prompt_that_was_dropped_is_written_whole_by_the_next_load_while_the_queue_is_busy() -> None:
    with spilling() as s:
        keys = drop_prompt_of_a_busy_queue(s)
        assert s.worker.lookup(keys) == 4
        s.worker.load(keys, s.worker.blocks_for(4, first=30))
        go_on(s)
        written = s.keys()
        assert [key for key in written if key in keys] == keys
        assert s.dropped() == {"unavailable": 1, "parent": 3}, "nothing is dropped again"


def test_what_is_stored_behind_a_chunk_after_it_was_dropped_is_written() -> None:
    """L1 has the chunk, and engines that have it themselves load it never again."""
    with spilling() as s:
        keys, later = drop_prompt_of_a_busy_queue(s), make_keys(2)
        s.worker.store(later, s.worker.blocks_for(2), after=keys[-1])
        go_on(s)
        written = s.keys()
        assert [key for key in written if key in later] == later
