"""Reads of fills: the objects of a batch come from the first tier that holds them, and from the next one where that fails.

Owns: which tier is read, how many reads may wait there, and the bytes that its expected time counts. Refuses to know: what
becomes of a batch whose reads have ended (`fills`).
"""

from __future__ import annotations

from collections.abc import Callable

from kvserver.l2 import ObjectName, TierEnd, TierOutcome
from kvserver.tiering.fill import BATCH, Fill, FillBatch
from kvserver.tiering.presence import Attainable
from kvserver.tiering.rates import MOST_READS, ReadRates
from kvserver.tiering.tiers import Tiers


class FillReads:
    """Reads of fills under way. `batch_ended`: called once for each batch. REQUIRES: the loop's thread uses it."""

    def __init__(
        self, tiers: Tiers, rates: ReadRates, batch_ended: Callable[[Fill, FillBatch], None], clock: Callable[[], float]
    ) -> None:
        self._tiers, self._rates, self._batch_ended, self._clock = tiers, rates, batch_ended, clock

    def queue(self, fill: Fill, found: Attainable) -> None:
        """Count what the fill will read, instead of what it counted so far."""
        self.unqueue(fill)
        fill.queued = [part.bytes for part in found.reads]
        for tier, size in enumerate(fill.queued):
            self._rates.queue(tier, size)

    def unqueue(self, fill: Fill) -> None:
        for tier, size in enumerate(fill.queued):
            self._rates.queue(tier, -size)
        fill.queued = []

    def has_room(self, fill: Fill, batch: FillBatch) -> bool:
        """True if no object of the batch would have to wait for a read of another one."""
        group, keys = batch.coverage.group, b"".join([chunk.key for chunk in batch.plan.chunks])
        known = free = 0
        for tier, bits in enumerate(self._tiers.present(fill.namespace, group, keys, fill.durability)):
            known |= bits
            free |= bits if self._rates.open(tier) < MOST_READS else 0
        return known == free

    def begin(self, fill: Fill, batch: FillBatch) -> None:
        fill.reading.append(batch)
        for place in range(len(batch.plan.chunks)):
            self._read(fill, batch, place, -1)
        if not batch.reads:
            self._batch_ended(fill, batch)

    def cancel(self, fill: Fill) -> None:
        """Ask the tiers to end what they read for it; batches end all the same."""
        for batch in list(fill.reading):
            for tier, ticket in list(batch.reads.values()):
                self._tiers.cancel(tier, ticket)

    def _read(self, fill: Fill, batch: FillBatch, place: int, after: int) -> None:
        """Read the object from the first tier after tier number `after` that holds it, or count it as failed."""
        chunk, group = batch.plan.chunks[place], batch.coverage.group
        bits = list(self._tiers.present(fill.namespace, group, chunk.key, fill.durability))
        usable = (
            number
            for number in range(after + 1, len(bits))
            if bits[number] and self._rates.open(number) < MOST_READS + BATCH
        )
        tier = next(usable, None)
        if tier is None or chunk.detached:
            batch.failed.add(place)
            return

        def ended(end: TierEnd) -> None:
            done = end.outcome is TierOutcome.DONE
            self._rates.ended(tier, began, batch.coverage.bytes if done else 0)
            if fill.queued:
                less = min(fill.queued[tier], batch.coverage.bytes)
                fill.queued[tier] -= less
                self._rates.queue(tier, -less)
            del batch.reads[place]
            if not done:
                if fill.ended:
                    batch.failed.add(place)
                else:
                    self._read(fill, batch, place, tier)
            if not batch.reads:
                self._batch_ended(fill, batch)

        name = ObjectName(fill.namespace, group, chunk.key)
        ticket = self._tiers.get(tier, name, batch.coverage.memory_of(chunk), fill.read_due_ns(self._clock()), ended)
        batch.reads[place] = (tier, ticket)
        began = self._rates.begun(tier)
