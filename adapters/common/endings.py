"""Decisions about a copy in flight: DESIGN's rule 1 as two functions of what is known of the copy.

Who may still write after a wait ended:
- store: the server only reads; it publishes nothing that it copies after our CANCELLED, and nothing after the deadline.
- load, PENDING -> CANCELLED: no process; the server never began and will not.
- load, RUNNING: the server, until DONE, until it acknowledged CANCELLING by CANCELLED, or until its process has ended. Until then
  the blocks stay quarantined: failed for the request, and unused.

Refuses to know: how a copy is cancelled, and how its end is reported.
"""

from __future__ import annotations

import enum

from kvserver._native import State

_CANCEL_GRACE_SECONDS = 0.25  # how long a cancelled load may take to be acknowledged before quarantine
_ABORT_GRACE_SECONDS = (
    0.02  # the same, where no request waits for the load: a copier acknowledges after the block that it copies
)


class Action(enum.Enum):
    WAIT = enum.auto()
    TIME_OUT = enum.auto()  # cancel the copy, and look at it again
    FINISH = enum.auto()  # a load: its bytes are there
    FAIL = enum.auto()
    QUARANTINE = enum.auto()  # fail the load's request, and keep the blocks out of use: the server may still write them
    RELEASE = enum.auto()  # the server no longer writes quarantined blocks


def store_action(state: State, *, session_ended: bool, seconds_late: float, timed_out: bool) -> Action:
    """A store that is DONE waits for its reply: only then can its chunks be found."""
    if session_ended or state in (State.CANCELLED, State.FAILED):
        return Action.FAIL
    if seconds_late <= 0:
        return Action.WAIT
    return Action.FAIL if timed_out else Action.TIME_OUT


def load_action(
    state: State,
    *,
    session_ended: bool,
    seconds_late: float,
    timed_out: bool,
    seconds_given_up: float,
    quarantined: bool,
    may_quarantine: bool,
) -> Action:
    """`may_quarantine`: the engine can keep the blocks of a failed load out of use. `seconds_given_up`: so long it has not wanted the load
    any more. It keeps the request, with its id, until the load has ended.
    """
    if session_ended or state in (State.DONE, State.CANCELLED, State.FAILED):  # the server no longer writes
        if quarantined:
            return Action.RELEASE
        return Action.FINISH if state == State.DONE else Action.FAIL
    if seconds_late > 0 and not timed_out:
        return Action.TIME_OUT
    too_late = seconds_late > _CANCEL_GRACE_SECONDS or seconds_given_up > _ABORT_GRACE_SECONDS
    if too_late and may_quarantine and not quarantined:
        return Action.QUARANTINE
    return Action.WAIT
