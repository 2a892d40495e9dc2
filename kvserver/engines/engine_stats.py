"""Engine stats: how busy an engine is, as its front ends report.

An engine with several front ends (vLLM's API servers) has its totals in parts, one in each. Its scheduler reports to one front
end at a time, so the newest report has the scheduler's stats.

Owns: the last report of each front end, and what is computed from it: the engine's stats, its rates, the growth of its totals.
Refuses to know: instances, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvserver.protocol import EngineLoad
from kvserver.protocol.status import EngineStatus
from kvserver.telemetry import MOST

TOTALS = (
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "prefix_queries",
    "prefix_hits",
    "external_queries",
    "external_hits",
    "finished_requests",
)
_RATES = ("prompt_tokens", "generation_tokens")
_STALE_INTERVALS = 3


@dataclass(slots=True)
class _FrontEnd:
    """The last report of one front end."""

    report: EngineLoad
    at: float
    rates: dict[str, float]


class EngineStats:
    """Stats of one instance. Only the last incarnation of its engine counts."""

    def __init__(self) -> None:
        self._front_ends: dict[int, _FrontEnd] = {}

    def add_report(self, report: EngineLoad, now: float) -> dict[str, int]:
        """Growth of the totals. A total of a new incarnation counts from 0, and so does one that fell."""
        self._front_ends = self._of_incarnation(report.incarnation)
        before = self._front_ends.get(report.front_end)
        growth = {name: getattr(report, name) for name in TOTALS}
        rates = dict.fromkeys(_RATES, 0.0)
        if before is not None:
            for name in TOTALS:
                if (was := getattr(before.report, name)) <= growth[name]:
                    growth[name] -= was
            if now > before.at:
                rates = {name: growth[name] / (now - before.at) for name in _RATES}
        self._front_ends[report.front_end] = _FrontEnd(report, now, rates)
        return growth

    def has_report(self, incarnation: str) -> bool:
        return bool(self._of_incarnation(incarnation))

    def status(self, incarnation: str, now: float) -> EngineStatus | None:
        """Stats of the last reports; `stale` if these are old. None if this incarnation has not reported."""
        front_ends = self._of_incarnation(incarnation).values()
        if not front_ends:
            return None
        newest = max(front_ends, key=lambda front_end: front_end.report.as_of_ns).report
        last = max(front_ends, key=lambda front_end: front_end.at)
        age = now - last.at
        shown: dict[str, Any] = {
            name: min(sum(getattr(front_end.report, name) for front_end in front_ends), MOST) for name in TOTALS
        }
        shown |= {f"{n}_per_second": round(sum(front_end.rates[n] for front_end in front_ends), 3) for n in _RATES}
        return EngineStatus(
            running=newest.running,
            waiting=newest.waiting,
            deferred=newest.deferred,
            kv_cache_usage=newest.kv_cache_usage,
            interval_seconds=last.report.interval_seconds,
            age_seconds=round(age, 3),
            stale=age > _STALE_INTERVALS * last.report.interval_seconds,
            **shown,
        )

    def _of_incarnation(self, incarnation: str) -> dict[int, _FrontEnd]:
        return {
            n: front_end for n, front_end in self._front_ends.items() if front_end.report.incarnation == incarnation
        }
