"""Families from several sources, and what Prometheus reads of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvserver.cache import MissReason
from kvserver.events import Bus
from kvserver.protocol import WAIT_SECONDS, Buckets, Histogram
from kvserver.server.instances import Counts, Instances
from kvserver.server.status import connects_status, counts_status
from kvserver.telemetry import Family, Kind, Rpc, all_families
from kvserver.telemetry.prometheus import render

LABELS = ("instance_id", "model_name")


def row(instance_id: str, model_name: str = "m", **values: Any) -> dict[str, Any]:
    """One of `status["instances"]`."""
    return {
        "instance_id": instance_id,
        "model_name": model_name,
        "world_size": 1,
        "l0_source": "exact",
        "block_tokens": 16,
        "chunk_tokens": 256,
        "workers": [{"device": "cpu"}],
        "private": "",
        "prefill_tokens_per_second": 0.0,
        "load": None,
        "requests": counts_status(Counts()) | values,
    }


def status(
    *instances: dict[str, Any], events: dict[str, Any] | None = None, departed: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    keys = ("size_bytes", "used_bytes", "pinned_bytes", "chunks", "evictions", "evicted_bytes", "cleared_chunks")
    return {
        "l1": {key: number for number, key in enumerate(keys)} | {"models": {}},
        "gpus": [],
        "loop_lag_seconds": 0.25,
        "loop_turns": Histogram(WAIT_SECONDS).status(),
        "metrics_sample_rate": 0.125,
        "events": events or Bus().status(),
        "instances": list(instances),
        "departed": list(departed),
        "ready": True,
        "connects": connects_status(Instances()),
        "refused_registrations": {},
        "books": {"tickets": 1, "leases": 2, "pins": 3, "unbalanced": 0},
        "totals": {"undelivered_replies": 0},
    }


def made(*instances: dict[str, Any], more: Sequence[Family] = (), **options: Any) -> dict[str, Family]:
    families = all_families(status(*instances, **options), Rpc().snapshot(), more)
    assert len({family.name for family in families}) == len(families), "a family is there twice"
    return {family.name: family for family in families}


def samples(*families: Family) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What Prometheus reads: values by sample name and labels."""
    found = [s for f in text_string_to_metric_families(render(families).decode()) for s in f.samples]
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
    text = render([Family("kvserver_h_seconds", "Times.", Kind.HISTOGRAM, ("type",), bounds=(1.0,))]).decode()
    assert text == "# HELP kvserver_h_seconds Times.\n# TYPE kvserver_h_seconds histogram\n"


def test_a_point_has_a_value_for_each_label() -> None:
    with pytest.raises(AssertionError, match="kvserver_c has labels"):
        Family("kvserver_c", "A counter.", Kind.COUNTER, LABELS).add(1, "only one")


# ---- many sources -----------------------------------------------------------------------------


def test_what_others_know_is_added() -> None:
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
    departed = [row("a", lookups=100), row("b", lookups=2), row("a", "other model", lookups=1)]
    family = made(row("a", lookups=5), departed=departed)["kvserver_lookup_requests"]
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
    missed = {**counts_status(Counts())["missed_tokens"], "evicted": 256}
    family = made(row("a", missed_tokens=missed))["kvserver_lookup_missed_tokens"]
    assert family.labels == ("instance_id", "model_name", "reason")
    by_reason = {labels[2]: value for labels, value in family.points}
    assert by_reason == {reason.value: 256 if reason == MissReason.EVICTED else 0 for reason in MissReason}
    assert {"never_stored", "evicted", "other_namespace", "filling", "partial_chunk"} <= by_reason.keys()


def test_l1_and_the_sample_rate_are_reported() -> None:
    found = made()
    assert found["kvserver_l1_evicted_bytes"].points == [((), 5)]
    assert found["kvserver_l1_cleared_chunks"].points == [((), 6)]
    assert found["kvserver_metrics_sample_rate"].points == [((), 0.125)]


def test_events_are_reported_by_type_and_subscriber() -> None:
    waits = Histogram(WAIT_SECONDS)
    waits.observe(2.0)
    events = {
        "published": 5,
        "dropped": 1,
        "published_types": {"BlockReport": 5, "CopyBegan": 0},
        "dropped_types": {"BlockReport": 1},
        "queue_depth": 4,
        "lag_seconds": 0.5,
        "waits": waits.status(),
        "subscribers": [{"name": "l0", "errors": 2, "last_error": "ValueError"}],
    }
    families = all_families(status(events=events), Rpc().snapshot())
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


def test_no_value_of_a_fresh_server_is_strange() -> None:
    for family in made(row("a")).values():
        for _, value in family.points:
            assert isinstance(value, Buckets) or (math.isfinite(value) and value >= 0), family.name
