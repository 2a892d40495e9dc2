"""The numbers of `kvserver top`: rates of one incarnation of the daemon only, medians of ages, and how both are shown."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvserver.cli import top
from kvserver.cli.http_client import NoAnswer
from kvserver.cli.top_frame import frame, number, sparkline
from kvserver.cli.top_view import Reading, median_ages, rates
from kvserver.protocol.status import (
    DaemonStatus,
    DepartedStatus,
    InstanceStatus,
    L1Status,
    RefusedEngineStatus,
    RequestsStatus,
    TierStatus,
    TotalsStatus,
)


def status(seconds: float, tokens: int, **changes: object) -> DaemonStatus:
    """After so many seconds and prompt tokens, half of which were computed."""
    prompts = {"l0": 0, "l1": tokens // 2, "l2": 0, "computed": tokens // 2}
    requests = RequestsStatus(lookups=tokens // 100, missed_tokens={"evicted": tokens // 4}, prompt_tokens=prompts)
    given = DaemonStatus(
        boot_id="b",
        uptime_seconds=seconds,
        totals=TotalsStatus(
            lookup_tokens=tokens, hit_tokens=tokens // 2, stored_bytes=tokens * 10, prompt_tokens=prompts
        ),
        instances=[InstanceStatus(instance_id="e", model_name="m", namespace="n", world_size=1, requests=requests)],
        l1=L1Status(size_bytes=100, used_bytes=50, evictions=tokens // 10),
        l2=[TierStatus(name="file", state="ready", read_bytes=tokens)],
    )
    return replace(given, **changes)


def text(reading: Reading) -> str:
    console = Console(width=200, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(*frame(reading), sep="\n")
    return captured.get()


def test_rates_are_of_the_time_between_two_statuses_of_the_daemons_own_clock() -> None:
    found = rates(status(14.0, 3000), status(10.0, 1000))
    assert found is not None
    assert found.window_seconds == 4.0
    assert found.prompt_tokens == {"l0": 0, "l1": 250, "l2": 0, "computed": 250}
    assert (found.lookups, found.stored_bytes, found.hit_rate, found.evicted_chunks) == (5, 5000, 0.5, 50)
    assert found.l2["file"].read_bytes == 500
    assert (found.engines, found.missed_tokens) == ({"e": 500}, {"evicted": 125})


@pytest.mark.parametrize("before", [status(14.0, 3000), status(10.0, 1000, boot_id="a")])
def test_without_an_earlier_status_of_the_same_incarnation_there_are_no_rates(before: DaemonStatus) -> None:
    now = status(14.0, 3000)
    assert rates(now, before) is None
    assert "50.0% since the start" in text(Reading(status=now))


def test_rates_are_of_two_readings_however_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 60.0, 120.0])
    statuses = iter([status(5.0, 1000), status(65.0, 4000), status(125.0, 7000)])
    monkeypatch.setattr(top, "http_client", SimpleNamespace(get=lambda *_: next(statuses), NoAnswer=NoAnswer))
    monkeypatch.setattr(top, "time", SimpleNamespace(monotonic=lambda: next(times)))
    readings = top.Readings(argparse.Namespace())
    monkeypatch.setattr(readings, "_read_beside", lambda reading: reading)
    found = [readings.read().rates for _ in range(3)]
    assert found[0] is None
    assert [one.window_seconds for one in found[1:] if one is not None] == [60.0, 60.0]


def test_an_engine_that_left_in_between_lowers_no_rate_below_zero() -> None:
    found = rates(status(14.0, 3000, instances=[]), status(10.0, 1000))
    assert found is not None
    assert (found.lookups, found.missed_tokens) == (0, {})


def test_a_median_is_within_the_bucket_in_which_it_is_over_all_models() -> None:
    name = "kvserver_l1_hit_age_seconds_bucket"
    metrics = "\n".join(
        f'{name}{{model_name="{model}",instance_id="a,le=\\"9\\"",le="{bound}"}} {count}'
        for model in ("one", "two")
        for bound, count in (("1.0", 0), ("2.0", 1), ("4.0", 5), ("+Inf", 6))
    )
    assert median_ages(metrics + '\nkvserver_l1_chunk_residency_seconds_bucket{le="+Inf"} 0\n') == {"hit": 3.0}
    beyond = median_ages(f'{name}{{le="5.0"}} 0\n{name}{{le="+Inf"}} 4\n')
    assert beyond["hit"] == 5.0, "the least that it can be"


def test_top_states_each_problem_in_words_of_its_own() -> None:
    found = status(
        9.0,
        1000,
        stale_seconds=7.25,
        l2=[TierStatus(name="s3", state="unavailable", failure="no route")],
        refused_engines=[RefusedEngineStatus(instance_id="x", code="bad_planes", message="overlap")],
        departed=[DepartedStatus(instance_id="old", model_name="m")],
    )
    shown = text(Reading(status=found, median_age_seconds={"hit": 65.0}, worst=["r-1: all was computed"]))
    for words in (
        "NOT READY", "STALE      the event loop has not answered for 7.2 s", "L2         s3 is UNAVAILABLE: no route",
        "x runs without cache: bad_planes: overlap", "left", "hits are 1 min 5 s old (medians)", "r-1: all was computed",
    ):  # fmt: skip
        assert words in shown, shown


def test_numbers_and_histories_are_short() -> None:
    assert [number(n) for n in (0, 2.25, 999, 12_345, 4_560_000, 7.1e9)] == ["0", "2.2", "999", "12.3k", "4.6M", "7.1G"]
    assert [sparkline([0, 1, 2], 2), sparkline([0, 0], 0)] == ["▁▅█", "▁▁"]
