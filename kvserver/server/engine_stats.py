"""How busy an engine is, as its front ends tell it.

Owns: what each front end told last, and what follows of it: the engine's load, its rates, by how much its totals grew.
Refuses to know: instances, clocks, and who asks.

An engine with several front ends (vLLM's API servers) has its totals in parts, one in each; what the scheduler says goes
to one of them at a time, so the newest counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvserver.protocol import EngineLoad

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
class _Told:
    """What one front end told last."""

    load: EngineLoad
    at: float
    rates: dict[str, float]


class Loads:
    """Of one instance; of several lives of its engine the last one's."""

    def __init__(self) -> None:
        self._told: dict[int, _Told] = {}  # by front end

    def take(self, load: EngineLoad, now: float) -> dict[str, int]:
        """By how much the totals grew. Those of a new life, and those that fell, began anew."""
        self._told = {n: told for n, told in self._told.items() if told.load.incarnation == load.incarnation}
        before = self._told.get(load.front_end)
        growth = {name: getattr(load, name) for name in TOTALS}
        rates = dict.fromkeys(_RATES, 0.0)
        if before is not None:
            for name in TOTALS:
                if (was := getattr(before.load, name)) <= growth[name]:
                    growth[name] -= was
            if now > before.at:
                rates = {name: growth[name] / (now - before.at) for name in _RATES}
        self._told[load.front_end] = _Told(load, now, rates)
        return growth

    def status(self, incarnation: str, now: float) -> dict[str, Any] | None:
        """None if this life told nothing. Figures of a stale one are the last that were told."""
        every = [told for told in self._told.values() if told.load.incarnation == incarnation]
        if not every:
            return None
        newest = max(every, key=lambda told: told.load.as_of_ns).load
        last = max(every, key=lambda told: told.at)
        age = now - last.at
        figures = msgspec.structs.asdict(newest)
        return {
            **{name: figures[name] for name in ("running", "waiting", "deferred", "kv_cache_usage")},
            **{name: sum(getattr(told.load, name) for told in every) for name in TOTALS},
            **{f"{name}_per_second": round(sum(told.rates[name] for told in every), 3) for name in _RATES},
            "interval_seconds": last.load.interval_seconds,
            "age_seconds": round(age, 3),
            "stale": age > _STALE_INTERVALS * last.load.interval_seconds,
        }
