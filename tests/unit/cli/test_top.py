"""The numbers of `kvserver top`: rates of one incarnation of the daemon only, medians of ages, and how numbers are shown."""

from __future__ import annotations

import io
import sys

import pytest
from msgspec.structs import replace

from kvserver.cli.screen import painted
from kvserver.cli.terminal import clipped, padded, plain, width_of
from kvserver.cli.top_frame import frame, number, sparkline
from kvserver.cli.top_view import Beside, TopView, make_view, median_ages
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

NOTHING = Beside()


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


def text(view: TopView) -> str:
    return "\n".join(painted(line) for line in frame(view))


def test_rates_are_of_the_time_between_two_statuses_of_the_daemons_own_clock() -> None:
    view = make_view(status(14.0, 3000), status(10.0, 1000), NOTHING)
    assert view.window_seconds == 4.0
    assert view.prompt_tokens_per_second == 500
    assert {one.name: one.per_second for one in view.prompt_tokens} == {"l0": 0, "l1": 250, "l2": 0, "computed": 250}
    assert (view.lookups_per_second, view.stored_bytes_per_second, view.recent_hit_rate) == (5, 5000, 0.5)
    assert view.l1.evicted_per_second == 50
    assert view.l2[0].read_bytes_per_second == 500
    assert view.engines[0].prompt_tokens_per_second == 500
    assert [(one.name, one.tokens, one.per_second) for one in view.missed] == [("evicted", 750, 125)]


@pytest.mark.parametrize("before", [None, status(14.0, 3000), status(10.0, 1000, boot_id="a")])
def test_without_an_earlier_status_of_the_same_incarnation_there_are_no_rates(before: DaemonStatus | None) -> None:
    view = make_view(status(14.0, 3000), before, NOTHING)
    assert view.window_seconds == 0
    assert view.prompt_tokens_per_second is None
    assert view.recent_hit_rate is None
    assert view.engines[0].prompt_tokens_per_second is None
    assert view.hit_rate == 0.5


def test_an_engine_that_left_in_between_lowers_no_rate_below_zero() -> None:
    view = make_view(status(14.0, 3000, instances=[]), status(10.0, 1000), NOTHING)
    assert view.lookups_per_second == 0
    assert all(one.per_second == 0 for one in view.missed)


def test_a_median_is_within_the_bucket_in_which_it_is_over_all_models() -> None:
    name = "kvserver_l1_hit_age_seconds_bucket"
    metrics = "\n".join(
        f'{name}{{model_name="{model}",instance_id="a,le=\\"9\\"",le="{bound}"}} {count}'
        for model in ("one", "two")
        for bound, count in (("1.0", 0), ("2.0", 1), ("4.0", 5), ("+Inf", 6))
    )
    ages = median_ages(metrics + '\nkvserver_l1_chunk_residency_seconds_bucket{le="+Inf"} 0\n')
    assert ages == {"hit": 3.0, "residency": None, "idle_before_evict": None}
    beyond = median_ages(
        'kvserver_l1_hit_age_seconds_bucket{le="5.0"} 0\nkvserver_l1_hit_age_seconds_bucket{le="+Inf"} 4\n'
    )
    assert beyond["hit"] == 5.0, "the least that it can be"


def test_all_that_is_wrong_has_words_of_its_own() -> None:
    shown = text(
        make_view(
            status(
                9.0,
                1000,
                stale_seconds=7.25,
                l2=[TierStatus(name="s3", state="unavailable", failure="no route")],
                refused_engines=[RefusedEngineStatus(instance_id="x", code="bad_planes", message="overlap")],
                departed=[DepartedStatus(instance_id="old", model_name="m")],
            ),
            None,
            Beside({"hit": 65.0}, ["r-1: all was computed"]),
        )
    )
    for words in (
        "NOT READY", "STALE  the event loop has not answered for 7.2 s", "L2 s3       is UNAVAILABLE: no route",
        "runs without cache: bad_planes: overlap", "left", "hits are 1 min 5 s old (medians)", "r-1: all was computed",
    ):  # fmt: skip
        assert words in shown, shown


def test_text_is_cut_and_filled_by_cells_of_the_terminal() -> None:
    wide = "\u4e2d\u6587ab"
    assert width_of(wide) == 6
    assert (clipped(wide, 3), padded(wide, 3), padded("ab", 4, right=True)) == ("\u4e2d", "\u4e2d ", "  ab")
    assert width_of("e\u0301") == 1
    assert plain("a\x1b\u202e\n") == "a\\x1b\\u202e\\x0a"
    assert painted([("abc", "bad"), ("def", "")], 4, colours=True) == "\x1b[1;31mabc\x1b[0md"


def test_numbers_and_histories_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [number(n) for n in (None, 0, 2.25, 999, 12_345, 4_560_000, 7.1e9)] == [
        "-", "0", "2.2", "999", "12.3k", "4.6M", "7.1G",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    assert sparkline([0, 1, 2]) == "▁▅█"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert sparkline([0, 0.5], highest=1.0) == "_-".replace("-", "=")
