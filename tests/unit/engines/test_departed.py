"""Counters of disconnected instances: shown for five minutes, continued by one that comes back, never lost in sums."""

from __future__ import annotations

from typing import Any

from support.instances import add_worker

from kvserver.cache import MissReason
from kvserver.engines.counts import Counts
from kvserver.engines.instances import Instances
from kvserver.protocol import DEPARTED_SECONDS, MOST_DEPARTED


def serve(instances: Instances, worker: Any, lookups: int) -> None:
    counts = instances.instance_of(worker).counts
    counts.lookups += lookups
    counts.missed_tokens[MissReason.EVICTED] += 10 * lookups


def test_a_disconnected_instance_is_shown_for_five_minutes() -> None:
    instances = Instances()
    worker = add_worker(instances, "a")
    serve(instances, worker, 3)
    instances.remove_worker(worker, now=100.0)
    instances.forget_departed(100.0 + DEPARTED_SECONDS)
    (departed,) = instances.departed.values()
    assert (departed.instance_id, departed.model_name, departed.counts.lookups) == ("a", "m", 3)
    instances.forget_departed(100.1 + DEPARTED_SECONDS)
    assert not instances.departed
    assert instances.totals().lookups == 3
    assert instances.totals().missed_tokens == {MissReason.EVICTED: 30}


def test_reconnected_instance_continues_its_counts_and_is_counted_once() -> None:
    instances = Instances()
    worker = add_worker(instances, "a")
    serve(instances, worker, 3)
    instances.remove_worker(worker, now=100.0)
    again = add_worker(instances, "a")
    serve(instances, again, 1)
    assert instances.instance_of(again).counts.lookups == 4
    assert not instances.departed
    assert instances.totals().lookups == 4


def test_another_model_under_the_same_id_begins_anew() -> None:
    instances = Instances()
    worker = add_worker(instances, "a")
    serve(instances, worker, 3)
    instances.remove_worker(worker, now=100.0)
    other = add_worker(instances, "a", "another model")
    assert instances.instance_of(other).counts.lookups == 0
    assert set(instances.departed) == {("a", "m")}
    assert instances.totals().lookups == 3


def test_copy_that_ends_after_its_instance_is_counted_with_it() -> None:
    instances = Instances()
    worker = add_worker(instances, "a")
    instances.remove_worker(worker, now=100.0)
    instances.counts_of(worker.spec).failed_loads += 1
    instances.forget_departed(1e9)
    instances.counts_of(worker.spec).failed_loads += 1
    assert instances.totals().failed_loads == 2


def test_of_very_many_disconnected_instances_the_newest_are_shown_and_none_is_lost_in_sums() -> None:
    instances = Instances()
    for number in range(3 * MOST_DEPARTED):
        worker = add_worker(instances, f"hostile {number}", model_name=f"model {number}")
        serve(instances, worker, 1)
        instances.remove_worker(worker, now=100.0)
    assert len(instances.departed) == MOST_DEPARTED
    assert (f"hostile {3 * MOST_DEPARTED - 1}", f"model {3 * MOST_DEPARTED - 1}") in instances.departed
    assert instances.totals().lookups == 3 * MOST_DEPARTED


def test_counts_of_all_kinds_add_up() -> None:
    one, other = Counts(lookups=1, saved_seconds=0.5), Counts(lookups=2, saved_seconds=0.25)
    other.missed_tokens[MissReason.FILLING] = 7
    one.add(other)
    assert (one.lookups, one.saved_seconds, one.missed_tokens) == (3, 0.75, {MissReason.FILLING: 7})
