"""What the messages of an engine's front ends add up to."""

from __future__ import annotations

from typing import Any

from kvserver.engines.engine_stats import TOTALS, EngineStats
from kvserver.protocol import EngineLoad


def message(**fields: Any) -> EngineLoad:
    return EngineLoad(
        **{"instance_id": "i", "incarnation": "a", "model_name": "m", "interval_seconds": 1, "running": 0, "waiting": 0}
        | fields
    )


def test_an_instance_without_messages_has_no_stats() -> None:
    assert EngineStats().status("a", 0.0) is None


def test_the_stats_are_those_of_the_last_message_and_have_an_age() -> None:
    stats = EngineStats()
    stats.add_report(message(running=9), 9.0)
    stats.add_report(message(running=2, waiting=3, deferred=1, kv_cache_usage=0.5, prompt_tokens=7), 10.0)
    status = stats.status("a", 12.5)
    assert status is not None
    assert (status.running, status.waiting, status.deferred, status.kv_cache_usage) == (2, 3, 1, 0.5)
    assert (status.prompt_tokens, status.age_seconds, status.stale) == (7, 2.5, False)


def test_stats_are_stale_after_three_of_the_intervals_they_name() -> None:
    stats = EngineStats()
    stats.add_report(message(interval_seconds=2), 10.0)
    ages = {seconds: stats.status("a", 10.0 + seconds) for seconds in (6.0, 6.1)}
    assert [status.stale for status in ages.values() if status] == [False, True]


def test_rates_are_of_the_last_two_messages() -> None:
    stats = EngineStats()
    stats.add_report(message(prompt_tokens=1000, generation_tokens=10), 10.0)
    first = stats.status("a", 10.0)
    stats.add_report(message(prompt_tokens=1500, generation_tokens=20), 12.0)
    second = stats.status("a", 12.0)
    assert first is not None
    assert second is not None
    assert (first.prompt_tokens_per_second, first.generation_tokens_per_second) == (0, 0)
    assert (second.prompt_tokens_per_second, second.generation_tokens_per_second) == (250, 5)


def test_messages_at_one_moment_have_no_rate() -> None:
    stats = EngineStats()
    for tokens in (1, 1000):
        stats.add_report(message(prompt_tokens=tokens), 10.0)
    status = stats.status("a", 10.0)
    assert status is not None
    assert status.prompt_tokens_per_second == 0


def test_totals_grow_by_the_difference_from_the_message_before() -> None:
    stats = EngineStats()
    assert stats.add_report(message(prompt_tokens=10, preemptions=1), 1.0) == dict.fromkeys(TOTALS, 0) | {
        "prompt_tokens": 10,
        "preemptions": 1,
    }
    assert stats.add_report(message(prompt_tokens=15, preemptions=1), 2.0)["prompt_tokens"] == 5


def test_totals_that_fell_began_anew_and_nothing_is_negative() -> None:
    stats = EngineStats()
    stats.add_report(message(prompt_tokens=100), 1.0)
    assert stats.add_report(message(prompt_tokens=3), 2.0)["prompt_tokens"] == 3
    status = stats.status("a", 2.0)
    assert status is not None
    assert status.prompt_tokens_per_second == 3


def test_a_new_incarnation_begins_with_its_first_message() -> None:
    stats = EngineStats()
    stats.add_report(message(prompt_tokens=100, front_end=0), 1.0)
    stats.add_report(message(prompt_tokens=100, front_end=1), 1.0)
    assert stats.status("b", 1.0) is None
    assert stats.add_report(message(incarnation="b", prompt_tokens=120), 2.0)["prompt_tokens"] == 120
    status = stats.status("b", 2.0)
    assert status is not None
    assert status.prompt_tokens == 120
    assert stats.status("a", 2.0) is None


def test_front_ends_add_up_and_the_newest_message_of_the_scheduler_counts() -> None:
    stats = EngineStats()
    stats.add_report(message(front_end=0, running=5, as_of_ns=200, prompt_tokens=10), 1.0)
    stats.add_report(message(front_end=1, running=7, as_of_ns=100, prompt_tokens=20), 1.5)
    stats.add_report(message(front_end=1, running=7, as_of_ns=100, prompt_tokens=22), 2.5)
    status = stats.status("a", 2.5)
    assert status is not None
    assert (status.running, status.prompt_tokens, status.prompt_tokens_per_second) == (5, 32, 2)
    assert status.age_seconds == 0
