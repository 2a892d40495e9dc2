"""The room of fills: bytes of L1 that they may occupy before their requests have loaded them.

Fills need a bound, or waiting requests would evict what others are about to load. Counted are the bytes of fills under way, and
of fills whose request has not loaded them yet. They are at most an eighth of L1, or 256 MiB if that is more, but never more than
three quarters of L1. Prefetches may use half of the bound, and one is given up when a request's fill needs its room.

Owns: the bound, and what ended fills have read. Refuses to know: which fill is next (`fills`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from kvserver.tiering.fill import Fill, Filled, Owner

_MIB = 1 << 20


def memory_bound(l1_bytes: int) -> int:
    """Bytes that fills may occupy before their requests have loaded them.

    - L1 of 2 GiB or more: an eighth of it.
    - L1 of 341 MiB or less: three quarters. It is a window on L2, where a single prompt must fit.
    - Between the two: 256 MiB.
    """
    return max(l1_bytes // 8, min(l1_bytes // 4 * 3, 256 * _MIB))


class FillRoom:
    """Room of `fills`, which wait or are under way. REQUIRES: the loop's thread uses it."""

    def __init__(self, l1_bytes: int, fills: Mapping[Owner, Fill], clock: Callable[[], float]) -> None:
        self._fills, self._clock = fills, clock
        self._filled: OrderedDict[Owner, Filled] = OrderedDict()  # by request, the oldest first
        self._bound = memory_bound(l1_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes that count for the bound."""
        return sum(each.bytes for each in self._counted())

    @property
    def _prefetched_bytes(self) -> int:
        return sum(each.bytes for each in self._counted() if each.give_up is not None)

    def _counted(self) -> Iterator[Fill | Filled]:
        yield from self._filled.values()
        yield from (fill for fill in self._fills.values() if fill.began)

    def bound_of(self, fill: Fill) -> int:
        """Bytes that this fill may plan to read."""
        if fill.began:  # it has read what was there of a promise, or waited for others
            return max(0, self._bound - self.used_bytes + fill.bytes - fill.brought_bytes)
        if fill.give_up is None:
            return self._bound
        planned = [each for each in self._fills.values() if not (each.began or each is fill)]
        return self._bound // 2 - self._prefetched_bytes - sum(each.bytes for each in planned if each.give_up)

    def make_for(self, fill: Fill) -> bool:
        """True if it may begin beside the others. Prefetches are given up for a request, the oldest first."""
        used = self.used_bytes
        if not used or used + fill.bytes <= self._bound:
            return True
        of_requests = used - self._prefetched_bytes
        if fill.give_up is not None or (of_requests and of_requests + fill.bytes > self._bound):
            return False
        while (used := self.used_bytes) > of_requests and used + fill.bytes > self._bound:
            next(each.give_up for each in self._counted() if each.give_up is not None)()
        return True

    # ---- ended fills --------------------------------------------------------------------------

    @property
    def filled(self) -> list[Owner]:
        return list(self._filled)

    def keep(self, owner: Owner, filled: Filled) -> None:
        """Count what an ended fill has read, until it is loaded, or pop() or its deadline."""
        self._filled[owner] = filled
        self._filled.move_to_end(owner)

    def pop(self, owner: Owner) -> int:
        """The request ended. Returns the tokens that were read for it."""
        filled = self._filled.pop(owner, None)
        return filled.tokens if filled is not None else 0

    def loaded(self, owner: Owner) -> None:
        """The request has begun to load: what was read for it no longer counts for the bound."""
        if (filled := self._filled.get(owner)) is not None:
            filled.bytes = 0

    def tick(self) -> None:
        """Stop counting bytes that were read for requests that never ended, once their leases have ended."""
        now = self._clock()
        for owner in [owner for owner, filled in self._filled.items() if filled.deadline <= now]:
            del self._filled[owner]
