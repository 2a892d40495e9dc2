"""Clears that other daemons made in L2 while no daemon had this L1.

A clear of a shared store, or of a folder that another daemon uses meanwhile, is meant for L1, too. Each clear changes the generation of its
namespaces in that tier. So the state has the generations of each namespace, and its chunks are adopted once every tier has been asked and
still has the same one. A tier that does not answer in time costs its namespaces.

Owns: which generations count, the comparison, and its deadline. Refuses to know: how a tier keeps generations (`l2`), chunks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from kvserver.cache import chunks_of
from kvserver.protocol import Durability
from kvserver.restart.state import KeptNamespace
from kvserver.tiering import ConfiguredTier

WAIT_SECONDS = 30.0  # for tiers that do not answer: their chunks use L1 meanwhile
_LEARNT_AT_ONCE = 64  # namespaces
_WAITS = "a tier of L2 did not answer"


class MissedClears:
    """Verdicts on the namespaces of one state. REQUIRES: the loop's thread uses it."""

    def __init__(self, namespaces: Sequence[KeptNamespace], tiers: Sequence[ConfiguredTier]) -> None:
        self._namespaces, self._tiers = namespaces, tiers
        self._until = time.monotonic() + WAIT_SECONDS
        self._next = 0  # the first namespace without a verdict
        self._lost: dict[int, str] = {}

    def concerned(self) -> list[bool]:
        """True for each namespace that a tier is to be asked about."""
        return [any(each.tier.url in of.generations for each in self._tiers) for of in self._namespaces]

    def lost(self) -> dict[int, str] | None:
        """Places of the namespaces that may have been cleared, and why; None: a tier that was asked has not answered yet."""
        while self._next < len(self._namespaces):
            why = self._why_lost(self._namespaces[self._next])
            if why == _WAITS and time.monotonic() < self._until:
                coming = self._namespaces[self._next : self._next + _LEARNT_AT_ONCE]
                learn(self._tiers, [(_name(of.id, of.tails), of.durability) for of in coming])
                return None
            if why:
                self._lost[self._next] = why
            self._next += 1
        return self._lost

    def _why_lost(self, of: KeptNamespace) -> str:
        waits = ""
        for each in self._tiers:
            before = of.generations.get(each.tier.url, 0)
            if before is None:
                return "its generation was not known at the end"
            if each.tier.url in of.generations:
                now = each.tier.generation(_name(of.id, of.tails))
                if now is None:
                    waits = _WAITS
                elif now != before:
                    return f"it was cleared in {each.tier.url}"
        return waits


def generations_of(
    id: bytes, tails: bool, durability: Durability, tiers: Iterable[ConfiguredTier]
) -> dict[str, int | None]:
    """Generations that the tiers have for a namespace, by their URLs; of tiers that may have its objects."""
    return {each.tier.url: each.tier.generation(_name(id, tails)) for each in tiers if each.admits(durability)}


def learn(tiers: Iterable[ConfiguredTier], namespaces: Sequence[tuple[bytes, Durability]]) -> None:
    """Ask each tier for the generations that it does not know, of some namespaces at a time."""
    for each in tiers:
        unknown = [id for id, of in namespaces if each.admits(of) and each.tier.generation(id) is None]
        each.tier.learn_generations(list(dict.fromkeys(unknown))[:_LEARNT_AT_ONCE])


def _name(id: bytes, tails: bool) -> bytes:
    """The namespace by which a tier knows it."""
    return chunks_of(id) if tails else id
