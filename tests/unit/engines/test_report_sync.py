"""When an engine's full state is requested."""

from __future__ import annotations

import pytest

from kvserver.engines.report_sync import ReportSync


def reported(sync: ReportSync, sequence: int, now: float, full: bool = False) -> bool:
    """Whether the report of pool 0 is answered with a demand."""
    sync.receive(sequence)
    sync.add_report("exact", 0, full, now)
    return sync.demands(now)


def test_the_first_report_must_be_a_full_state() -> None:
    assert reported(ReportSync(), 0, now=10.0)
    sync = ReportSync()
    assert not reported(sync, 7, now=10.0, full=True)
    assert not reported(sync, 8, now=99.0)


def test_a_full_state_is_requested_once_a_second_until_it_arrives() -> None:
    sync = ReportSync()
    asked = [reported(sync, n, now=10 + n / 4) for n in range(12)]
    assert asked == [n % 4 == 0 for n in range(12)]
    assert not reported(sync, 12, now=20.0, full=True)
    assert not reported(sync, 13, now=30.0)


def test_gap_requests_a_full_state_at_once_and_the_next_event_states_the_gap() -> None:
    sync = ReportSync()
    reported(sync, 0, now=10.0, full=True)
    assert not sync.gap
    assert reported(sync, 2, now=10.1)
    assert sync.gap
    assert not reported(sync, 3, now=10.2)


@pytest.mark.parametrize("lose", [ReportSync.lose, ReportSync.lose_states])
def test_loss_behind_a_full_state_requests_another_a_second_later(lose) -> None:
    """So that a bus without space gets some before the next full state."""
    sync = ReportSync()
    reported(sync, 0, now=10.0, full=True)
    lose(sync)
    assert not reported(sync, 1, now=10.5)
    assert reported(sync, 2, now=11.0)
    assert not sync.in_sync
    assert not reported(sync, 3, now=11.1, full=True)
    assert sync.in_sync
