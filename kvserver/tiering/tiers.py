"""Tiers of L2 as the loop uses them: one table of their open tickets, each with what follows from its end.

Owns: the open tickets of all tiers. Refuses to know: which objects are written (`spill`) or read (`fills`), and how a tier stores
them (`l2`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvserver.config import TierUrl
from kvserver.l2 import LocalTier, ObjectMemory, ObjectName, StorageTier, TierEnd, TierOutcome
from kvserver.protocol import Durability

log = logging.getLogger(__name__)

UNUSABLE = ("unavailable", "closed")

Ended: TypeAlias = Callable[[TierEnd], None]


@dataclass(frozen=True)
class ConfiguredTier:
    """A tier, and how the settings want it used."""

    tier: StorageTier
    url: TierUrl

    @property
    def writable(self) -> bool:
        return self.tier.state == "ready" and not self.url.read_only

    def admits(self, durability: Durability) -> bool:
        """True if objects of this durability may be in the tier."""
        return durability >= (Durability.ANYWHERE if self.tier.shared else Durability.MACHINE)

    def timeout_ns(self, size: int) -> int:
        """Time-out of a put of so many bytes."""
        return int(self.url.seconds_for(size) * 1e9)


class Tiers:
    """Tiers in the order of preference. REQUIRES: one thread uses it."""

    def __init__(self, tiers: Sequence[ConfiguredTier] = ()) -> None:
        self.all = list(tiers)
        self._open: dict[tuple[int, int], Ended] = {}  # by the tier's place in `all` and its ticket
        self._logged: list[str] = [""] * len(self.all)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def completion_fds(self) -> list[int]:
        return [each.tier.completion_fd for each in self.all]

    @property
    def open_tickets(self) -> int:
        return len(self._open)

    @property
    def failure(self) -> str:
        """Reason why a tier that the settings require cannot be used; empty while all can."""
        for each in self.all:
            if each.url.required and each.tier.state in UNUSABLE:
                return f"the required tier {each.tier.name} of L2 is {each.tier.state}: {each.tier.failure}"
        return ""

    # ---- tickets ------------------------------------------------------------------------------

    def put(self, place: int, name: ObjectName, memory: ObjectMemory, parent: bytes, now_ns: int, ended: Ended) -> None:
        """Write the object to the tier; `ended` is called once, by complete()."""
        each = self.all[place]
        ticket = each.tier.put(name, memory, parent, now_ns + each.timeout_ns(memory.bytes))
        self._open[place, ticket] = ended

    def get(self, place: int, name: ObjectName, memory: ObjectMemory, deadline_ns: int, ended: Ended) -> int:
        """Read the object from the tier; `ended` is called once, by complete(). Returns the ticket, for cancel()."""
        ticket = self.all[place].tier.get(name, memory, deadline_ns)
        self._open[place, ticket] = ended
        return ticket

    def probe(
        self,
        place: int,
        namespace: bytes,
        group: int,
        keys: bytes,
        chain: bool,
        deadline_ns: int,
        again: bool,
        ended: Ended,
    ) -> int:
        """Find out which objects the tier has, for present(); `ended` is called once, by complete(). Returns the ticket."""
        ticket = self.all[place].tier.probe(namespace, group, keys, chain, deadline_ns, again)
        self._open[place, ticket] = ended
        return ticket

    def cancel(self, place: int, ticket: int) -> None:
        self.all[place].tier.cancel(ticket)

    def clear(self, prefix: bytes, done: Callable[[str], None]) -> None:
        """Forget all objects of the namespaces with this prefix in every tier, then call `done` with what failed, or "".

        Without tiers `done` is called at once.
        """
        left, failures = len(self.all), list[str]()
        if not left:
            done("")

        def one_ended(name: str) -> Ended:
            def ended(end: TierEnd) -> None:
                nonlocal left
                left -= 1
                if end.outcome is not TierOutcome.DONE:
                    failures.append(f"{name}: {end.outcome.value} {end.what}".strip())
                elif end.what:
                    log.warning("L2 tier %s: a clear is done, but %s", name, end.what, extra={"tier": name})
                if not left:
                    done("; ".join(failures))

            return ended

        for place, each in enumerate(self.all):
            self._open[place, each.tier.clear(prefix)] = one_ended(each.tier.name)

    def complete(self) -> None:
        """Call `ended` of every ticket that has ended. Never raises: a fault in one stops no other."""
        for place, each in enumerate(self.all):
            for end in self._drained(each):
                try:
                    self._open.pop((place, end.ticket))(end)
                except Exception:
                    log.exception(
                        "internal error at the end of ticket %d of tier %s", end.ticket, each.tier.name,
                        extra={"tier": each.tier.name},
                    )  # fmt: skip

    @staticmethod
    def _drained(each: ConfiguredTier) -> Sequence[TierEnd]:
        try:
            return each.tier.drain()
        except Exception:
            log.exception("internal error in tier %s", each.tier.name, extra={"tier": each.tier.name})
            return ()

    # ---- memory -------------------------------------------------------------------------------

    def present(self, namespace: bytes, group: int, keys: bytes, durability: Durability) -> Iterator[int]:
        """Bits of the keys whose object a tier holds, by tier. In memory only."""
        for each in self.all:
            yield each.tier.holds(namespace, group, keys) if each.admits(durability) else 0

    def touch(self, namespace: bytes, group: int, keys: bytes, durability: Durability) -> None:
        """Make objects that were used the youngest of the tiers that hold them, the last key first."""
        for each in self.all:
            if each.admits(durability):
                each.tier.touch(namespace, group, keys)

    def unknown_to(self, durability: Durability) -> list[int]:
        """The tiers, by their places, that may have such objects which only probe() finds."""
        return [
            place
            for place, each in enumerate(self.all)
            if each.tier.shared and each.tier.state not in UNUSABLE and each.admits(durability)
        ]

    @property
    def local(self) -> list[LocalTier]:
        """Tiers that know at any time all that they hold."""
        tiers = [each.tier for each in self.all]
        return [tier for tier in tiers if not tier.shared and isinstance(tier, LocalTier)]

    # ---- time ---------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        for place, each in enumerate(self.all):
            each.tier.tick(now_ns)
            if each.tier.failure != self._logged[place]:
                self._logged[place] = each.tier.failure
                log.warning(
                    "tier %s of L2 is %s: %s", each.tier.name, each.tier.state, each.tier.failure or "no fault",
                    extra={"tier": each.tier.name},
                )  # fmt: skip

    def close(self, deadline_ns: int) -> None:
        """End all tiers. After it returns, no tier reads or writes L1."""
        for each in self.all:
            each.tier.close(deadline_ns)
        self.complete()
