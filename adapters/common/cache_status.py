"""Status of an engine's cache: whether it has one, and the reason if not.

Owns: the codes of the reasons, and how the reports of both halves and the daemon's answer become one status. Refuses to know: how
reports and answers are obtained, metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvserver.protocol import REGISTERED, SERVING_OFF, ErrorCode

SCHEDULER = "scheduler"  # the half's name; those of workers are "rank 0" and so on
_REFUSED = "refused_"

# The values of the label `reason`, and their meaning. Others are "refused_" with a code of kvserver.protocol.errors.
REASONS = {
    "starting": "nothing is known yet",
    "no_daemon": "no daemon is at the endpoint: none was started, it ended, or the endpoint is another",
    "no_answer": "a daemon is at the endpoint and does not answer",
    "breaker_open": "the daemon did not answer in time, and nothing is sent until it answers",
    "not_permitted": "the daemon is another user's, and this user may not connect to it",
    "foreign_daemon": "the default endpoint's folder is another user's",
    "not_registered": "the daemon answers, and not all ranks of this engine are registered: they start, or they sleep",
    "serving_off": "the daemon's operator has switched its serving off: lookups find nothing, nothing is stored",
    "unsupported": "this engine's configuration is not served",
    "cannot_share": "the KV cache's memory cannot be handed to the daemon",
    "setup_failed": "the connector could not be set up: its settings are wrong, or a fault in the connector",
    "fault": "a fault in the connector ended the use of the cache",
    "asleep": "the engine sleeps, and its KV cache is not in memory",
    "other": "a reason that this version does not know",
}
CONNECTED_REASON = "connected"
# Only the engine itself knows these, and only the engine ends them.
_LASTING = ("setup_failed", "unsupported", "cannot_share", "fault")
_ABSENT = ("unknown_instance", "not_ready")


class CacheStatus(NamedTuple):
    """Cache status of a whole engine or of one half of it."""

    reason: str  # "connected", or of REASONS
    detail: str = ""  # for people

    @property
    def connected(self) -> bool:
        return self.reason == CONNECTED_REASON


CONNECTED = CacheStatus(CONNECTED_REASON)
STARTING = CacheStatus("starting", "no attempt has ended yet")


def refused(code: str) -> str:
    """The reason for an error code of the daemon's."""
    return _REFUSED + code if code in ErrorCode._value2member_map_ else "other"


def known(reason: str) -> str:
    """`reason` if it is in the table, else "other": the number of series must not grow with what peers send."""
    is_known = reason in REASONS or reason == refused(reason.removeprefix(_REFUSED))
    return reason if is_known or reason == CONNECTED_REASON else "other"


def from_hello(state: str, text: str) -> CacheStatus:
    """An engine's state in the daemon's HelloReply."""
    if state == REGISTERED:
        return CONNECTED
    if state == SERVING_OFF:
        return CacheStatus(SERVING_OFF, text)
    return CacheStatus("not_registered" if state in _ABSENT else refused(state), text)


@dataclass
class EngineCacheStatus:
    """Cache status of one engine, from its own reports and from the daemon's answers.

    The halves report with the engine's steps, so an idle engine reports nothing. For it the front end queries a daemon once a
    second. That daemon may not know the engine: the front end may run on another machine.
    """

    known_here: bool = True  # whether the daemon that is queried is the engine's own, as far as can be seen
    halves: dict[str, CacheStatus] = field(default_factory=dict)
    _halves_reported_at: float = 0.0
    _asked_at: float = -1.0
    _answer: CacheStatus | None = None  # of the daemon; None before the first

    def report_halves(self, halves: Mapping[str, CacheStatus], now: float) -> None:
        self.halves.update(halves)
        self._halves_reported_at = now

    def report_answer(self, answer: CacheStatus, began: float) -> None:
        """`began`: when the query was sent."""
        self._answer = answer
        self._asked_at = began
        self.known_here |= answer.connected

    @property
    def _answer_is_newer(self) -> bool:
        return self._asked_at > self._halves_reported_at

    @property
    def breaker_open(self) -> bool:
        closed = self._answer is not None and self._answer.connected and self._answer_is_newer
        return not closed and any(half.reason == "breaker_open" for half in self.halves.values())

    def verdict(self) -> CacheStatus:
        """Status of the engine as a whole. One refused worker means no cache, so the first half without a daemon decides for all."""
        bad = {name: half for name, half in self.halves.items() if not half.connected}
        if lasting := {name: half for name, half in bad.items() if half.reason in _LASTING}:
            return self._by_halves(lasting)
        answer = self._answer
        if answer is None:  # only the engine knows
            return self._by_halves(bad)
        if answer.connected:
            return CONNECTED if self._answer_is_newer or not bad else self._by_halves(bad)
        if self.halves and not bad and not self.known_here:
            return CONNECTED  # its daemon is another
        if answer.reason == "not_registered" and bad:
            return self._by_halves(bad)
        if answer.reason == "no_answer" and self.breaker_open:
            return self._by_halves({n: half for n, half in bad.items() if half.reason == "breaker_open"})
        return answer

    def _by_halves(self, bad: Mapping[str, CacheStatus]) -> CacheStatus:
        for name, half in bad.items():
            return CacheStatus(half.reason, f"{name}: {half.detail}")
        return CONNECTED if self.halves else STARTING
