"""Spill: READY objects are written behind from L1 to the tiers of L2.

Not every object is offered to every tier:
- Objects that no later start of an engine can find are offered to no tier.
- Objects that must stay on this machine are offered to no tier that machines share.
- A tier with `read_only=true` is offered nothing.

A queued object is not pinned: eviction never waits for storage. An object that left L1 before its turn is dropped and counted. It
is pinned from its turn until its put ends. Keys are queued in the order of a prompt, so that parents are written first. A dropped
object takes with it what is queued behind it by then, and nothing that is offered later. A later load offers all of it again.

A tier may not be writable at first, as while it reads its journal. What is offered until then waits in its queue.

Owns: the queue of each tier, what is admitted to it, and its rate. Refuses to know: how a tier stores objects (`l2`), and what is
read back (`fills`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from kvserver.cache import Cache, Chunk
from kvserver.l2 import Coverage, ObjectName, TierEnd, TierOutcome
from kvserver.protocol import Durability
from kvserver.protocol.status import TierStatus
from kvserver.tiering.rates import ReadRates
from kvserver.tiering.tiers import ConfiguredTier, Tiers

MOST_QUEUED = 1 << 16  # objects of each tier
_MOST_PUTS = 16  # under way at a time. Of a tier that is not shared more if they are small: with a sixteenth of L1, and
MOST_SMALL_PUTS, _SMALL_PUT_BYTES = 256, 32 << 20
# of L1 that all pin: a sixteenth of it, and never more than half, but for a single larger object
_LEAST_PUT_BYTES, _MOST_PUT_BYTES = 64 << 20, 256 << 20
_REASONS = dict.fromkeys(  # why an object was not written
    ("queue_full", "not_writable", "left_l1", "parent", "full", "timeout", "unavailable", "cancelled"), 0
)
_PER_STEP = 64  # objects of each tier that one step looks at

_Link: TypeAlias = tuple[bytes, Chunk]  # with the key of the chunk before it; b"" if that is not known


def _links(chunks: Sequence[Chunk], after: bytes) -> list[_Link]:
    return list(zip([after, *[chunk.key for chunk in chunks]], chunks, strict=False))


@dataclass(frozen=True, slots=True)
class _Queued:
    number: int  # in the order of the queue, from 1 on
    chunk: Chunk
    namespace: bytes  # of the chunk when it was queued
    coverage: Coverage
    parent: bytes  # key of the object before it; b"" if that is not known


@dataclass
class _Queue:
    """The objects that wait for one tier."""

    configured: ConfiguredTier
    has_opened: bool = False  # it could be written to since the start
    waiting: deque[_Queued] = field(default_factory=deque)
    names: set[ObjectName] = field(default_factory=set)  # of those that wait or are being written
    queued: int = 0  # so far: the number of the last one
    waiting_bytes: int = 0
    puts: int = 0
    put_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lost: dict[ObjectName, int] = field(default_factory=dict)  # of each dropped one: the last number queued by then
    credit: float = 0.0  # bytes that may be written now, of a tier with a write limit
    credited_ns: int = 0

    def opens(self) -> bool:
        """True while nothing could be written to the tier yet, and that may change."""
        if not self.has_opened:
            self.has_opened = self.configured.tier.state not in ("opening", "unavailable")
        return not self.has_opened


class Spill:
    """Queues of the tiers. REQUIRES: the loop's thread uses it."""

    def __init__(
        self, cache: Cache, tiers: Tiers, rates: ReadRates, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._tiers = tiers
        self._rates = rates
        self._clock = clock
        l1_bytes = cache.pool.pages * cache.pool.page_bytes
        self._most_put_bytes = min(_MOST_PUT_BYTES, max(_LEAST_PUT_BYTES, l1_bytes // 16), l1_bytes // 2)
        self._small_put_bytes = min(_SMALL_PUT_BYTES, l1_bytes // 16)
        self._queues = [_Queue(each) for each in tiers.all]

    @property
    def waiting(self) -> int:
        """Objects that wait, of all tiers."""
        return sum(len(queue.waiting) for queue in self._queues)

    @property
    def ends(self) -> bool:
        """True if all that waits for an open tier has had its turn."""
        return not any(queue.waiting and not queue.opens() for queue in self._queues)

    @property
    def puts(self) -> int:
        """Objects that are being written; each has a pin."""
        return sum(queue.puts for queue in self._queues)

    # ---- which objects are offered ------------------------------------------------------------

    def stored(
        self, namespace: bytes, coverage: Coverage, durability: Durability,
        chunks: Sequence[Chunk], after: bytes, ready: Set[Chunk],
    ) -> None:  # fmt: skip
        """The objects of `ready` became READY. They are among `chunks`: neighbours in a prompt, behind the chunk `after`."""
        links = [link for link in _links(chunks, after) if link[1] in ready]
        for queue in self._queues:
            if queue.configured.admits(durability) and queue.configured.url.admit == "all":
                self._offer(queue, namespace, coverage, links)

    def loaded(
        self, namespace: bytes, coverage: Coverage, durability: Durability, chunks: Sequence[Chunk], may_write: bool
    ) -> None:
        """Note loaded objects: a tier that has them keeps them, and the other tiers that may be written to are offered them."""
        keys = b"".join([chunk.key for chunk in chunks])
        present = self._tiers.present(namespace, coverage.group, keys, durability)
        for queue, in_l2 in zip(self._queues, present, strict=True):
            if not queue.configured.admits(durability):
                continue
            queue.configured.tier.touch(namespace, coverage.group, keys)
            missing = [link for place, link in enumerate(_links(chunks, b"")) if not in_l2 >> place & 1]
            if missing and may_write:
                self._offer(queue, namespace, coverage, missing)

    def _offer(self, queue: _Queue, namespace: bytes, coverage: Coverage, links: Sequence[_Link]) -> None:
        if queue.configured.url.read_only:
            return
        if not queue.configured.writable and not queue.opens():
            queue.dropped["not_writable"] += len(links)
            return
        for parent, chunk in links:
            name = ObjectName(namespace, coverage.group, chunk.key)
            if name not in queue.names:
                if len(queue.names) >= MOST_QUEUED:
                    self._drop(queue, name, "queue_full")
                else:
                    queue.names.add(name)
                    queue.queued += 1
                    queue.waiting.append(_Queued(queue.queued, chunk, namespace, coverage, parent))
                    queue.waiting_bytes += coverage.bytes

    # ---- writing ------------------------------------------------------------------------------

    def step(self) -> bool:
        """Begin puts at the end of a turn. True while there is more to do at once."""
        more = False
        now_ns = int(self._clock() * 1e9)
        for place, queue in enumerate(self._queues):
            if queue.opens() or not queue.waiting:
                continue
            self._add_credit(queue, now_ns)
            for _ in range(_PER_STEP):
                if not queue.waiting or not self._may_put(queue):
                    break
                self._put_next(place, queue, now_ns)
                if not queue.waiting:
                    queue.lost.clear()
            else:
                more |= bool(queue.waiting)
        return more

    def _may_put(self, queue: _Queue) -> bool:
        size = queue.waiting[0].coverage.bytes
        small = 0 if queue.configured.tier.shared else min(MOST_SMALL_PUTS, self._small_put_bytes // size)
        if queue.puts and (queue.puts >= max(_MOST_PUTS, small) or queue.put_bytes + size > self._most_put_bytes):
            return False
        return not queue.configured.url.write_limit or queue.credit > 0

    def _add_credit(self, queue: _Queue, now_ns: int) -> None:
        """A second's worth at most: the loop turns at least once a second. One object may overdraw it."""
        if limit := queue.configured.url.write_limit:
            queue.credit = min(limit, queue.credit + (now_ns - queue.credited_ns) * 1e-9 * limit)
            queue.credited_ns = now_ns

    def _put_next(self, place: int, queue: _Queue, now_ns: int) -> None:
        item = queue.waiting.popleft()
        size, chunk = item.coverage.bytes, item.chunk
        queue.waiting_bytes -= size
        name = ObjectName(item.namespace, item.coverage.group, chunk.key)
        why = ""
        if not queue.configured.writable:
            why = "not_writable"
        elif chunk.detached or not chunk.ready >> item.coverage.group & 1:
            why = "left_l1"
        elif item.number <= queue.lost.get(name._replace(key=item.parent), 0):
            why = "parent"
        if why:
            queue.names.discard(name)
            self._drop(queue, name, why)
            return
        self._cache.pin_chunks([chunk])
        queue.puts += 1
        queue.put_bytes += size
        queue.credit -= size

        def ended(end: TierEnd) -> None:
            queue.puts -= 1
            queue.put_bytes -= size
            queue.names.discard(name)
            self._cache.unpin_chunks([chunk])
            if end.outcome is not TierOutcome.DONE:
                self._drop(queue, name, end.outcome.value)

        try:
            self._tiers.put(place, name, item.coverage.memory_of(chunk), item.parent, now_ns, ended)
        except BaseException:
            ended(TierEnd(0, TierOutcome.UNAVAILABLE))
            raise

    def _drop(self, queue: _Queue, name: ObjectName, reason: str) -> None:
        queue.dropped[reason] += 1
        if queue.waiting:
            if len(queue.lost) >= MOST_QUEUED:
                queue.lost.clear()
            queue.lost[name] = queue.queued

    # ---- the end, status ----------------------------------------------------------------------

    def status(self) -> list[TierStatus]:
        return [
            replace(
                queue.configured.tier.status(),
                required=queue.configured.url.required,
                read_only=queue.configured.url.read_only,
                queue_objects=len(queue.waiting) + queue.puts,
                queue_bytes=queue.waiting_bytes + queue.put_bytes,
                dropped=_REASONS | queue.dropped,
                read_bytes_per_second=self._rates.bytes_per_second(place),
            )
            for place, queue in enumerate(self._queues)
        ]
