"""Probes of the tiers that other daemons write to, and which of them a request waits for.

A request that waits for a probe pays the store's latency, even if the store has nothing. So it waits only if that costs less than
the prefill which probes of this tier are expected to save, or than a small share of its own prefill. Any other probe runs beside
the prefill. Its answers serve the next request with these keys, and show whether probes are worth their time again.

Owns: what the last probes of each tier took and found, and the number that run beside a prefill. Refuses to know: which hit
follows from the answers (`presence`), and how a tier finds them (`l2`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvserver.l2 import TierEnd, TierOutcome
from kvserver.protocol import KEY_BYTES
from kvserver.tiering.fill import Fill
from kvserver.tiering.tiers import Tiers

MOST_BESIDE = 8  # probes of one tier that no request waits for; further ones are left out
_SHORT_SECONDS = 0.02  # of a probe: about one step of an engine, always waited for
_LEAST_SHARE = 1 / 32  # of its own prefill, which a request may always wait
_LAST = 3  # probes, of which the shortest one is what the next is expected to take
_WEIGHT = 1 / 8  # of the last probe in what probes find


@dataclass(slots=True)
class ProbeWorth:
    """Times and finds of the last probes of one tier."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    found: float = 0.0  # chunks; a fading mean, as is the next one
    unknown: float = 0.0  # chunks, before the probe
    beside: int = 0  # under way

    def note(self, seconds: float, found: int, unknown: int) -> None:
        """`found`: chunks, of the `unknown` ones. REQUIRES: unknown > 0."""
        self.seconds.append(seconds)
        self.found += (found - self.found) * _WEIGHT
        self.unknown += (unknown - self.unknown) * _WEIGHT

    def is_waited_for(self, tokens: int, speed: float) -> bool:
        """True if a request waits that has so many tokens to compute at this speed; 0: not known."""
        if len(self.seconds) < _LAST or min(self.seconds) <= _SHORT_SECONDS:
            return True
        share = self.found / self.unknown
        if not speed:
            return share > _LEAST_SHARE
        return min(self.seconds) * speed <= tokens * max(share, _LEAST_SHARE)


class Probes:
    """Probes of all tiers. REQUIRES: the loop's thread uses it."""

    def __init__(self, tiers: Tiers, clock: Callable[[], float]) -> None:
        self._tiers, self._clock = tiers, clock
        self._worth = [ProbeWorth() for _ in range(len(tiers))]

    def begin(self, fill: Fill, again: bool = False) -> None:
        """Ask the tiers what they have of the fill's keys; `fill.probes` counts the probes that it waits for.

        `again`: what was absent may have come.
        """
        groups = fill.worker.spec.object_groups
        for tier in self._tiers.unknown_to(fill.durability):
            worth = self._worth[tier]
            known = [
                self._known_chunks(fill, tier, group) if spec.kind == "full" else fill.hit_chunks
                for group, spec in enumerate(groups)
            ]
            tokens = (_chunks(fill) - min(known)) * fill.worker.spec.chunk_tokens
            expected = fill.give_up is not None or fill.promised > fill.hit_chunks
            waits = expected or worth.is_waited_for(tokens, fill.instance.expected_speed)
            if waits or worth.beside < MOST_BESIDE:
                for group, spec in enumerate(groups):
                    self._probe(fill, tier, group, spec.kind == "full", known[group], waits, again)

    def _probe(self, fill: Fill, tier: int, group: int, chain: bool, known: int, waits: bool, again: bool) -> None:
        worth, began = self._worth[tier], self._clock()

        def ended(end: TierEnd) -> None:
            if waits:
                fill.probes -= 1
            else:
                worth.beside -= 1
            asked = end.nanos > 0 if end.outcome is TierOutcome.DONE else end.outcome is TierOutcome.TIMEOUT
            # The others were answered from memory, cancelled, or refused; a promise is asked for before it is there.
            if chain and asked and not fill.promised:
                found = self._known_chunks(fill, tier, group) - known
                worth.note(self._clock() - began, max(0, found), max(1, _chunks(fill) - known))

        last = fill.promised if again else _chunks(fill)
        keys = fill.lookup.keys[(fill.hit_chunks if chain else 0) * KEY_BYTES : last * KEY_BYTES]
        self._tiers.probe(tier, fill.namespace, group, keys, chain, fill.read_due_ns(began), again, ended)
        if waits:
            fill.probes += 1
        else:
            worth.beside += 1

    def _known_chunks(self, fill: Fill, tier: int, group: int) -> int:
        """The boundary to which L1's hit and the tier are known to have the chain. In few steps: prompts are long."""

        def is_unknown(place: int) -> bool:
            key = fill.lookup.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]
            return not self._tiers.all[tier].tier.holds(fill.namespace, group, key)

        return fill.hit_chunks + bisect_left(range(fill.hit_chunks, _chunks(fill)), True, key=is_unknown)


def _chunks(fill: Fill) -> int:
    return len(fill.lookup.keys) // KEY_BYTES
