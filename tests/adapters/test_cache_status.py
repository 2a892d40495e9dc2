"""How the reports of an engine's halves and the daemon's answers become one status."""

from __future__ import annotations

import pytest

from kvserver.adapters.common.cache_status import CONNECTED, CacheStatus, EngineCacheStatus

HALVES = {"scheduler": CONNECTED, "rank 0": CONNECTED}


@pytest.mark.parametrize("reason", ["setup_failed", "unsupported", "cannot_share", "fault"])
@pytest.mark.parametrize("answer", [CONNECTED, CacheStatus("no_daemon"), CacheStatus("not_registered")])
def test_no_answer_of_the_daemon_outvotes_a_rank_that_has_no_cache_for_good(reason: str, answer: CacheStatus) -> None:
    engine = EngineCacheStatus()
    engine.report_halves({**HALVES, "rank 1": CacheStatus(reason, "why")}, now=1.0)
    engine.report_answer(answer, began=2.0)
    assert engine.verdict() == CacheStatus(reason, "rank 1: why")


def test_a_later_answer_of_the_daemon_ends_what_was_reported_of_the_connection() -> None:
    engine = EngineCacheStatus()
    engine.report_halves({**HALVES, "rank 1": CacheStatus("no_daemon", "why")}, now=2.0)
    engine.report_answer(CONNECTED, began=1.0)
    assert engine.verdict() == CacheStatus("no_daemon", "rank 1: why")
    engine.report_answer(CONNECTED, began=3.0)
    assert engine.verdict() == CONNECTED
