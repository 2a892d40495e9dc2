"""Engine stats, as /status and /metrics show it."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families
from support.daemon import wait_until

GAUGES = {
    "kvserver_engine_running_requests",
    "kvserver_engine_waiting_requests",
    "kvserver_engine_deferred_requests",
    "kvserver_engine_kv_cache_usage_ratio",
    "kvserver_engine_prompt_token_rate",
    "kvserver_engine_generation_token_rate",
}
MOST = (1 << 63) - 1


def shown(daemon, worker):
    """Of /status; wait until it has something."""

    def row():
        rows = [row for row in daemon.status()["instances"] if row["instance_id"] == worker.instance_id]
        return rows[0]["load"] if rows else None

    return wait_until(row, 10, "the load is shown")


def series(daemon, worker):
    """The worker's series of engine families, by name."""
    code, text = daemon.http("/metrics")
    assert code == 200
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        if family.name.startswith("kvserver_engine_")
        for sample in family.samples
        if sample.labels == {"instance_id": worker.instance_id, "model_name": worker.model_name}
    }


def test_a_load_is_shown_in_status_and_metrics(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    assert daemon.status()["instances"][0]["load"] is None
    before = series(daemon, worker)
    assert not before.keys() & GAUGES
    assert before["kvserver_engine_prompt_tokens_total"] == 0
    worker.send(
        worker.stats_message(
            running=3,
            waiting=2,
            deferred=1,
            kv_cache_usage=0.25,
            preemptions=4,
            prompt_tokens=500,
            generation_tokens=60,
            prefix_queries=480,
            prefix_hits=96,
            external_queries=384,
            external_hits=256,
            finished_requests=7,
        )
    )
    load = shown(daemon, worker)
    assert load.pop("age_seconds") >= 0
    assert load == {
        "running": 3,
        "waiting": 2,
        "deferred": 1,
        "kv_cache_usage": 0.25,
        "preemptions": 4,
        "prompt_tokens": 500,
        "generation_tokens": 60,
        "prefix_queries": 480,
        "prefix_hits": 96,
        "external_queries": 384,
        "external_hits": 256,
        "finished_requests": 7,
        "prompt_tokens_per_second": 0,
        "generation_tokens_per_second": 0,
        "interval_seconds": 60,
        "stale": False,
    }
    after = series(daemon, worker)
    assert after["kvserver_engine_load_age_seconds"] >= 0
    assert after.keys() >= GAUGES
    assert after["kvserver_engine_running_requests"] == 3
    assert after["kvserver_engine_waiting_requests"] == 2
    assert after["kvserver_engine_kv_cache_usage_ratio"] == 0.25
    assert after["kvserver_engine_prefix_hit_tokens_total"] == 96
    assert after["kvserver_engine_external_hit_tokens_total"] == 256
    assert after["kvserver_engine_finished_requests_total"] == 7


def test_the_gauges_of_an_engine_that_fell_silent_end_and_its_counters_stay(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    worker.send(worker.stats_message(interval_seconds=0.05, running=3, prompt_tokens=5))
    wait_until(lambda: shown(daemon, worker)["stale"], 10, "the load is stale")
    assert shown(daemon, worker)["running"] == 3
    after = series(daemon, worker)
    assert not after.keys() & GAUGES
    assert after["kvserver_engine_load_age_seconds"] > 0.15
    assert after["kvserver_engine_prompt_tokens_total"] == 5


def test_counters_go_on_when_the_engine_restarts_under_its_id(make_daemon, make_worker):
    daemon = make_daemon()
    first = make_worker(daemon)
    first.send(first.stats_message(running=3, prompt_tokens=100))
    shown(daemon, first)
    first.close()
    wait_until(lambda: not daemon.status()["instances"], 10, "the first incarnation has disconnected")
    assert series(daemon, first) == {**series(daemon, first), "kvserver_engine_prompt_tokens_total": 100}
    second = make_worker(daemon, instance_id=first.instance_id)
    assert daemon.status()["instances"][0]["load"] is None
    second.send(second.stats_message(prompt_tokens=7))
    assert shown(daemon, second)["prompt_tokens"] == 7
    assert series(daemon, second)["kvserver_engine_prompt_tokens_total"] == 107


def test_counters_count_once_what_an_engine_reports_again_when_it_returns(make_daemon, make_worker):
    daemon = make_daemon()
    first = make_worker(daemon)
    first.send(first.stats_message(prompt_tokens=100))
    shown(daemon, first)
    first.close()  # as for sleep: the engine runs on
    wait_until(lambda: not daemon.status()["instances"], 10, "it has disconnected")
    again = make_worker(daemon, instance_id=first.instance_id, incarnation=first.incarnation)
    again.send(again.stats_message(prompt_tokens=110))
    wait_until(lambda: shown(daemon, again)["prompt_tokens"] == 110, 10)
    assert series(daemon, again)["kvserver_engine_prompt_tokens_total"] == 110


def test_the_largest_numbers_break_no_page(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    totals = ("preemptions", "prompt_tokens", "generation_tokens", "external_hits", "finished_requests")
    for number in range(4):  # up and down, so that each other one begins again
        most = dict.fromkeys(totals, MOST * (number % 2))
        worker.send(worker.stats_message(running=MOST, waiting=MOST, deferred=MOST, as_of_ns=MOST, **most))
    wait_until(lambda: shown(daemon, worker)["prompt_tokens"] == 1 << 62, 10, "the most that a total may be")
    assert all(math.isfinite(value) for value in series(daemon, worker).values())
    assert series(daemon, worker)["kvserver_engine_prompt_tokens_total"] == 1 << 62
    assert "Infinity" not in daemon.http("/status")[1]
