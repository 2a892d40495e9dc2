"""What a worker does with a copy, for all that it may know of the copy: no block is free while the server may write it."""

from __future__ import annotations

import itertools

import pytest

from kvserver._native import State
from kvserver.adapters.common.endings import Action, load_action, store_action

PENDING, RUNNING, CANCELLING = State.PENDING, State.RUNNING, State.CANCELLING
DONE, FAILED, CANCELLED = State.DONE, State.FAILED, State.CANCELLED
OVER = (DONE, FAILED, CANCELLED)
EARLY, LATE, TOO_LATE = -1.0, 0.1, 1.0  # seconds from the deadline; a cancel is given 0.25


def load(
    state, seconds_late=EARLY, *, given_up=-1.0, ended=False, timed_out=False, quarantined=False, may_quarantine=True
):
    return load_action(
        state,
        session_ended=ended,
        seconds_late=seconds_late,
        timed_out=timed_out,
        seconds_given_up=given_up,
        quarantined=quarantined,
        may_quarantine=may_quarantine,
    )


def store(state, seconds_late=EARLY, *, ended=False, timed_out=False):
    return store_action(state, session_ended=ended, seconds_late=seconds_late, timed_out=timed_out)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (load(PENDING), Action.WAIT),
        (load(RUNNING), Action.WAIT),
        (load(CANCELLING, given_up=0.01), Action.WAIT),  # its request was aborted
        (load(CANCELLING, given_up=0.1), Action.QUARANTINE),
        (load(CANCELLING, given_up=0.1, quarantined=True), Action.WAIT),
        (load(CANCELLING, given_up=0.1, may_quarantine=False), Action.WAIT),
        (load(CANCELLED, given_up=0.1), Action.FAIL),
        (load(DONE), Action.FINISH),
        (load(FAILED), Action.FAIL),
        (load(CANCELLED), Action.FAIL),
        (load(DONE, LATE), Action.FINISH),  # late or not, its bytes are there
        (load(DONE, TOO_LATE, timed_out=True), Action.FINISH),
        (load(PENDING, LATE), Action.TIME_OUT),
        (load(RUNNING, LATE), Action.TIME_OUT),
        (load(CANCELLING, LATE), Action.TIME_OUT),
        (load(RUNNING, TOO_LATE), Action.TIME_OUT),  # first the cancel, however late
        (load(CANCELLING, LATE, timed_out=True), Action.WAIT),  # for the acknowledgement
        (load(CANCELLING, TOO_LATE, timed_out=True), Action.QUARANTINE),
        (load(CANCELLING, TOO_LATE, timed_out=True, may_quarantine=False), Action.WAIT),
        (load(CANCELLING, TOO_LATE, timed_out=True, quarantined=True), Action.WAIT),
        (load(CANCELLED, TOO_LATE, timed_out=True, quarantined=True), Action.RELEASE),
        (load(DONE, TOO_LATE, timed_out=True, quarantined=True), Action.RELEASE),
        (load(RUNNING, ended=True), Action.FAIL),
        (load(PENDING, LATE, ended=True), Action.FAIL),  # no timeout: there is no server that could be slow
        (load(CANCELLING, TOO_LATE, timed_out=True, quarantined=True, ended=True), Action.RELEASE),
        (store(PENDING), Action.WAIT),
        (store(RUNNING), Action.WAIT),
        (store(DONE), Action.WAIT),
        (store(CANCELLED), Action.FAIL),
        (store(FAILED), Action.FAIL),
        (store(RUNNING, ended=True), Action.FAIL),
        (store(RUNNING, LATE), Action.TIME_OUT),
        (store(DONE, LATE), Action.TIME_OUT),  # its reply is
        (store(RUNNING, LATE, timed_out=True), Action.FAIL),  # the server publishes nothing after the deadline
    ],
)
def test_state_and_age_of_a_copy_decide_its_action(found, expected):
    assert found is expected


EVERY_LOAD = list(
    itertools.product((PENDING, RUNNING, CANCELLING, *OVER), (EARLY, LATE, TOO_LATE), *[(False, True)] * 3)
)


@pytest.mark.parametrize("may_quarantine", [False, True])
def test_blocks_of_a_load_are_free_only_when_no_server_may_write_them(may_quarantine):
    for state, late, ended, timed_out, quarantined in EVERY_LOAD:
        action = load(
            state, late, ended=ended, timed_out=timed_out, quarantined=quarantined, may_quarantine=may_quarantine
        )
        over = ended or state in OVER
        assert (action in (Action.FINISH, Action.FAIL, Action.RELEASE)) == over, (state, late, ended)
        assert (action is Action.RELEASE) == (over and quarantined)
        assert action is not Action.FINISH or state is DONE
        assert action is not Action.QUARANTINE or (may_quarantine and timed_out and late == TOO_LATE)


def test_a_copy_that_timed_out_does_not_time_out_again():
    for state in (PENDING, RUNNING, CANCELLING, *OVER):
        assert load(state, TOO_LATE, timed_out=True) is not Action.TIME_OUT
        assert store(state, TOO_LATE, timed_out=True) is not Action.TIME_OUT
