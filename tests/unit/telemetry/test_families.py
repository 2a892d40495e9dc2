"""Families from several sources, and what Prometheus reads of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvserver.cache import MissReason
from kvserver.engines.counts import Counts
from kvserver.engines.instances import Instances
from kvserver.events import Bus
from kvserver.protocol import WAIT_SECONDS, Buckets, Histogram
from kvserver.protocol.status import (
    DaemonStatus,
    DepartedStatus,
    EventsStatus,
    InstanceStatus,
    L1Status,
    RequestsStatus,
    SubscriberStatus,
)
from kvserver.server.status import connects_status, requests_status
from kvserver.telemetry import Family, Kind, Rpc, all_families
from kvserver.telemetry.prometheus import render

LABELS = ("instance_id", "model_name")


def row(instance_id: str, model_name: str = "m", **values: Any) -> InstanceStatus:
    requests = msgspec.structs.replace(requests_status(Counts()), **values)
    return InstanceStatus(instance_id=instance_id, model_name=model_name, requests=requests)


def departed(instance_id: str, model_name: str = "m", **values: Any) -> DepartedStatus:
    return DepartedStatus(instance_id=instance_id, model_name=model_name, requests=RequestsStatus(**values))


def made(*instances: InstanceStatus, more: Sequence[Family] = (), **others: Any) -> dict[str, Family]:
    fresh = {"loop_turns": Histogram(WAIT_SECONDS).snapshot(), "events": Bus().status()}
    status = DaemonStatus(instances=list(instances), connects=connects_status(Instances()), **{**fresh, **others})
    families = all_families(status, Rpc().snapshot(), more)
    assert len({family.name for family in families}) == len(families), "a family is there twice"
    return {family.name: family for family in families}


def samples(*families: Family) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What Prometheus reads: values by sample name and labels."""
    found = [s for f in text_string_to_metric_families(render(families)[0].decode()) for s in f.samples]
    by_name = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}
    assert len(by_name) == len(found), "a sample is there twice"
    return by_name


# ---- the text ---------------------------------------------------------------------------------


def test_counters_and_gauges_keep_labels_of_any_text() -> None:
    counter = Family("kvserver_c", "A counter.", Kind.COUNTER, LABELS).add(3, 'a"\\\n', "ü").add(0.5, "b", "")
    gauge = Family("kvserver_g", "A gauge\nof two lines.", Kind.GAUGE).add(-1.5)
    assert samples(counter, gauge) == {
        ("kvserver_c_total", (("instance_id", 'a"\\\n'), ("model_name", "ü"))): 3,
        ("kvserver_c_total", (("instance_id", "b"), ("model_name", ""))): 0.5,
        ("kvserver_g", ()): -1.5,
    }


def test_a_histogram_is_cumulative_and_ends_with_infinity() -> None:
    family = Family("kvserver_h_seconds", "Times.", Kind.HISTOGRAM, ("type",), bounds=(0.1, 60.0))
    found = samples(family.add(Buckets([2, 0, 5], 700.25), "x"))
    assert found == {
        ("kvserver_h_seconds_bucket", (("le", "0.1"), ("type", "x"))): 2,
        ("kvserver_h_seconds_bucket", (("le", "60.0"), ("type", "x"))): 2,
        ("kvserver_h_seconds_bucket", (("le", "+Inf"), ("type", "x"))): 7,
        ("kvserver_h_seconds_count", (("type", "x"),)): 7,
        ("kvserver_h_seconds_sum", (("type", "x"),)): 700.25,
    }


def test_a_family_without_points_has_a_type_and_a_help_line() -> None:
    text = render([Family("kvserver_h_seconds", "Times.", Kind.HISTOGRAM, ("type",), bounds=(1.0,))])[0].decode()
    assert text == "# HELP kvserver_h_seconds Times.\n# TYPE kvserver_h_seconds histogram\n"


def test_a_point_has_a_value_for_each_label() -> None:
    with pytest.raises(AssertionError, match="kvserver_c has labels"):
        Family("kvserver_c", "A counter.", Kind.COUNTER, LABELS).add(1, "only one")


# ---- many sources -----------------------------------------------------------------------------


def test_families_of_other_sources_are_added() -> None:
    theirs = Family("kvserver_l0_active_blocks", "Blocks.", Kind.GAUGE, LABELS).add(7, "a", "m")
    assert made(more=[theirs])["kvserver_l0_active_blocks"].points == [(("a", "m"), 7)]


def test_a_family_of_two_sources_is_one_and_its_first_value_stays() -> None:
    name = "kvserver_lookup_requests"
    theirs = Family(name, "Theirs.", Kind.COUNTER, LABELS).add(99, "a", "m").add(5, "other", "m")
    family = made(row("a", lookups=3), more=[theirs])[name]
    assert family.points == [(("a", "m"), 3), (("other", "m"), 5)]


def test_a_family_cannot_be_of_two_kinds() -> None:
    with pytest.raises(AssertionError, match="kvserver_lookup_requests"):
        made(more=[Family("kvserver_lookup_requests", "Theirs.", Kind.GAUGE, LABELS)])


def test_disconnected_instances_are_reported_until_they_are_back() -> None:
    before = [departed("a", lookups=100), departed("b", lookups=2), departed("a", "other model", lookups=1)]
    family = made(row("a", lookups=5), departed=before)["kvserver_lookup_requests"]
    assert sorted(family.points) == [(("a", "m"), 5), (("a", "other model"), 1), (("b", "m"), 2)]


# ---- where values come from -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("kvserver_l1_stored_chunks", "stored_chunks"),
        ("kvserver_l1_stores_avoided_chunks", "avoided_chunks"),
        ("kvserver_l1_starved_chunks", "starved_chunks"),
        ("kvserver_l1_loaded_chunks", "loaded_chunks"),
        ("kvserver_saved_prefill_tokens", "saved_tokens"),
        ("kvserver_saved_prefill_seconds", "saved_seconds"),
    ],
)
def test_each_instance_reports_what_it_got_from_l1(name: str, key: str) -> None:
    values = samples(made(row("a", **{key: 1.5}), row("b", "other"))[name])
    assert values == {
        (f"{name}_total", (("instance_id", "a"), ("model_name", "m"))): 1.5,
        (f"{name}_total", (("instance_id", "b"), ("model_name", "other"))): 0,
    }


def test_missed_tokens_are_reported_by_reason_and_begin_at_zero() -> None:
    missed = {**requests_status(Counts()).missed_tokens, "evicted": 256}
    family = made(row("a", missed_tokens=missed))["kvserver_lookup_missed_tokens"]
    assert family.labels == ("instance_id", "model_name", "reason")
    by_reason = {labels[2]: value for labels, value in family.points}
    assert by_reason == {reason.value: 256 if reason == MissReason.EVICTED else 0 for reason in MissReason}
    assert {"never_stored", "evicted", "other_namespace", "filling", "partial_chunk"} <= by_reason.keys()


def test_l1_and_the_sample_rate_are_reported() -> None:
    found = made(l1=L1Status(evicted_bytes=5, cleared_chunks=6), metrics_sample_rate=0.125)
    assert found["kvserver_l1_evicted_bytes"].points == [((), 5)]
    assert found["kvserver_l1_cleared_chunks"].points == [((), 6)]
    assert found["kvserver_metrics_sample_rate"].points == [((), 0.125)]


def test_events_are_reported_by_type_and_subscriber() -> None:
    waits = Histogram(WAIT_SECONDS)
    waits.observe(2.0)
    events = EventsStatus(
        published_types={"BlockReport": 5, "CopyBegan": 0},
        dropped_types={"BlockReport": 1, "CopyBegan": 0},
        queue_depth=4,
        lag_seconds=0.5,
        waits=waits.snapshot(),
        subscribers=[SubscriberStatus(name="l0", errors=2, last_error="ValueError")],
    )
    families = made(events=events).values()
    found = {labels: value for labels, value in samples(*families).items() if labels[0].startswith("kvserver_events_")}
    waits = {name: found.pop(name) for name in list(found) if name[0].startswith("kvserver_events_wait_seconds_")}
    assert waits["kvserver_events_wait_seconds_bucket", (("le", "2.5"),)] == 1
    assert waits["kvserver_events_wait_seconds_sum", ()] == 2.0
    assert found == {
        ("kvserver_events_published_total", (("type", "BlockReport"),)): 5,
        ("kvserver_events_published_total", (("type", "CopyBegan"),)): 0,
        ("kvserver_events_dropped_total", (("type", "BlockReport"),)): 1,
        ("kvserver_events_dropped_total", (("type", "CopyBegan"),)): 0,
        ("kvserver_events_queue_depth", ()): 4,
        ("kvserver_events_lag_seconds", ()): 0.5,
        ("kvserver_events_subscriber_errors_total", (("subscriber", "l0"),)): 2,
    }


def test_values_of_a_fresh_server_are_finite_and_not_negative() -> None:
    for family in made(row("a")).values():
        for _, value in family.points:
            assert isinstance(value, Buckets) or (math.isfinite(value) and value >= 0), family.name
