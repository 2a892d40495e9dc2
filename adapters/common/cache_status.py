"""Why an engine has no cache: the reasons, and what is said of one engine as a whole.

Owns: the codes, and how what the engine's halves said and what its daemon said become one answer. Refuses to know: how
either is asked, metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvserver.protocol import REGISTERED, ErrorCode

SCHEDULER = "scheduler"  # the half's name; those of workers are "rank 0" and so on
_REFUSED = "refused_"

# What the label `reason` may say, and what it means. Beside these: "refused_" and one of the codes of kvserver.protocol.errors.
REASONS = {
    "starting": "nothing is known yet",
    "no_daemon": "no daemon is there: none was started, it ended, or the endpoint is another",
    "no_answer": "a daemon is there and does not answer",
    "breaker_open": "waits for the daemon ran out, and nothing is sent until it answers",
    "foreign_daemon": "the default endpoint's folder is another user's",
    "not_registered": "the daemon answers, and does not have all ranks of this engine: they are on their way, or asleep",
    "unsupported": "this engine's configuration is not served",
    "cannot_share": "the KV cache's memory cannot be handed to the daemon",
    "setup_failed": "the connector could not be set up: its settings, or a fault of ours",
    "fault": "a fault of ours ended the use of the cache",
    "asleep": "the engine sleeps, its KV cache is gone",
    "other": "a reason that this version does not know",
}
CONNECTED_REASON = "connected"
_LASTING = ("setup_failed", "unsupported", "cannot_share", "fault")  # only the engine itself knows, and ends, these
_ABSENT = ("unknown_instance", "not_ready")


class CacheStatus(NamedTuple):
    """Of one half of an engine, or of a whole one."""

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
    """`reason`, if it is one; metrics must not grow with what others say."""
    is_known = reason in REASONS or reason == refused(reason.removeprefix(_REFUSED))
    return reason if is_known or reason == CONNECTED_REASON else "other"


def from_hello(state: str, text: str) -> CacheStatus | None:
    """What the daemon's Hello says of an engine; None if it says nothing, as older ones."""
    if not state:
        return None
    if state == REGISTERED:
        return CONNECTED
    return CacheStatus("not_registered" if state in _ABSENT else refused(state), text)


@dataclass
class EngineCacheStatus:
    """What is known of one engine, from both sides.

    Its halves tell with the steps it makes, so an idle one tells nothing. Its daemon is asked all the time, but by the front
    end, which may be on another machine and then asks a daemon that never heard of the engine.
    """

    known_here: bool = True  # whether the daemon that is asked is the engine's own, as far as one can see
    halves: dict[str, CacheStatus] = field(default_factory=dict)
    _halves_reported_at: float = 0.0
    _asked_at: float = -1.0
    _answer: CacheStatus | None = None  # of the daemon

    def report_halves(self, halves: Mapping[str, CacheStatus], now: float) -> None:
        self.halves.update(halves)
        self._halves_reported_at = now

    def report_answer(self, answer: CacheStatus | None, began: float) -> None:
        """`began`: when the question was put. None: the daemon answers and does not tell, as older ones."""
        self._answer = answer
        self._asked_at = began
        self.known_here |= answer is None or answer.connected

    @property
    def _answer_is_newer(self) -> bool:
        return self._asked_at > self._halves_reported_at

    @property
    def breaker_open(self) -> bool:
        closed = self._answer is not None and self._answer.connected and self._answer_is_newer
        return not closed and any(half.reason == "breaker_open" for half in self.halves.values())

    def verdict(self) -> CacheStatus:
        """One refused worker means no cache, so the first half that has none speaks for all."""
        bad = {name: half for name, half in self.halves.items() if not half.connected}
        for name, half in bad.items():
            if half.reason in _LASTING:
                return _of(name, half)
        answer = self._answer
        if answer is None:  # only the engine can tell
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
            return _of(name, half)
        return CONNECTED if self.halves else STARTING


def _of(name: str, half: CacheStatus) -> CacheStatus:
    return CacheStatus(half.reason, f"{name}: {half.detail}")
