"""Fills: objects that a prompt needs are read from L2 into L1 before its engine computes them.

A fill reserves slots for all that it will read, or is cut to a hit whose objects fit. Then it reads in batches, windows and
states before the chunks of the body. A batch becomes READY when its reads have ended; objects whose reads failed are left out.
Its chunks stay pinned until the fill ends. Then the request leases what L1 has and gets its reply, in one step. A fill ends when
all is read, at its deadline, or when its request, engine or namespace ends. Reads that run then are cancelled; their pages stay
allocated until their tickets end.

A prefetch is a fill for a request that may come. It reads after all requests' fills, however slow its tier is. Its bytes count until
it is ended.

Chunks may be promised: an engine of another daemon has computed the prompt, and writes it to a shared tier meanwhile. The fill reads
what is there, and asks the tier for the rest, a little later each time. It gives up when the engine could have computed the tokens.

A turn of the loop plans one fill, reserves one batch, or begins to read one: other requests are answered between.

A fill that finds no room waits for its turn, and fills that have room overtake it for half of its time. A fill that never fits is
cut to the greatest hit that does.

Owns: the fills under way and those that wait for room, and the one reply of each. Refuses to know: how much room there is
(`fill_room`), which tier is read (`fill_reads`), which probes are waited for (`probes`), which hit is the greatest and whether it
is worth reading (`presence`), the reply's content (`lookups`).
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from kvserver.cache import Cache, Chunk
from kvserver.engines import Counts, Instance, Respond
from kvserver.events import Bus, ChunksStored, publish_evicted
from kvserver.protocol import KEY_BYTES, AwaitFill, Durability, Lookup
from kvserver.tiering.fill import (
    LONGEST_ASK_NS,
    Answer,
    Fill,
    FillBatch,
    Filled,
    GiveUp,
    Owner,
    Work,
    batches,
    bytes_of,
    is_filling,
)
from kvserver.tiering.fill_reads import FillReads
from kvserver.tiering.fill_room import FillRoom
from kvserver.tiering.presence import Attainable, MissingObjects, Presence, keys_of, most_within
from kvserver.tiering.probes import Probes
from kvserver.tiering.rates import ReadRates
from kvserver.tiering.tiers import Tiers

MOST_FILLS = 1024  # under way and waiting
_MOST_PROMISED = 64  # fills that ask the tiers again and again; the others ask once


class Fills:
    """Fills of the daemon. REQUIRES: the loop's thread uses it."""

    def __init__(
        self,
        cache: Cache,
        tiers: Tiers,
        presence: Presence,
        rates: ReadRates,
        bus: Bus,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._tiers, self._presence, self._rates = cache, tiers, presence, rates
        self._probes = Probes(tiers, clock)
        self._bus = bus
        self._lease_seconds, self._clock = lease_seconds, clock
        self._fills: OrderedDict[Owner, Fill] = OrderedDict()  # the first that has not begun is the next to begin
        self.room = FillRoom(cache.pool.pages * cache.pool.page_bytes, self._fills, clock)
        self.loaded, self.tick = self.room.loaded, self.room.tick
        self._reads = FillReads(tiers, rates, self._batch_ended, clock)
        self._open_batches = 0

    @property
    def open(self) -> int:
        """Fills without a reply, and batches whose reads have not ended."""
        return len(self._fills) + self._open_batches

    @property
    def next_due_ns(self) -> int | None:
        """Time at which the next fill must be answered; None without fills."""
        return min((fill.asks_at_ns or fill.due_ns for fill in self._fills.values()), default=None)

    # ---- begin and end ------------------------------------------------------------------------

    def begin(
        self, request: AwaitFill, instance: Instance, respond: Respond, answer: Answer, promised: int = 0
    ) -> None:
        """Fill what the lookup lacks; answer when that has ended, or after request.wait_ms. `promised`: chunks, by another daemon."""
        lookup = request.lookup
        owner = (lookup.instance_id, lookup.request_id)
        self.end(owner)
        reply = answer(lookup, 0)  # what L1 has is leased meanwhile
        namespace, durability = instance.namespace_of(lookup.variant), instance.durability(lookup.durability)
        if namespace is None or durability is Durability.PROCESS or len(self._fills) >= MOST_FILLS:
            respond(reply)
            return
        now_ns, wait_ns = int(self._clock() * 1e9), request.wait_ms * 1_000_000
        fill = self._fills[owner] = Fill(
            owner, lookup, respond, answer, namespace, durability, instance, instance.any_worker(), list(instance.coverages),
            now_ns + wait_ns // 2, now_ns + wait_ns, reply.hit_chunks, instance.counts,
        )  # fmt: skip
        if promised > fill.hit_chunks and sum(each.promised > 0 for each in self._fills.values()) < _MOST_PROMISED:
            fill.promised = min(promised, len(lookup.keys) // KEY_BYTES)
            tokens, speed = (fill.promised - fill.hit_chunks) * fill.worker.spec.chunk_tokens, instance.expected_speed
            fill.promised_until_ns = now_ns + min(wait_ns, int(tokens / speed * 1e9) if speed else wait_ns)
        self._probes.begin(fill)

    def prefetch(
        self, lookup: Lookup, namespace: bytes, instance: Instance, due_ns: int, answer: Answer, give_up: GiveUp
    ) -> Fill | None:
        """Fill for no request what the lookup lacks, until end() of its owner. It is planned unless tiers must be asked; None if L2 has none."""
        owner, durability = (lookup.instance_id, lookup.request_id), instance.durability(lookup.durability)
        hit_chunks = answer(lookup, 0).hit_chunks
        if durability is Durability.PROCESS or len(self._fills) >= MOST_FILLS:
            return None
        fill = self._fills[owner] = Fill(
            owner, lookup, lambda _: None, answer, namespace, durability, instance, instance.any_worker(), list(instance.coverages),
            due_ns, due_ns, hit_chunks, Counts(), give_up,
        )  # fmt: skip
        self._probes.begin(fill)
        if not fill.probes:
            self._plan(fill)
        return fill

    def _plan(self, fill: Fill) -> None:
        """Queue what is to be read; answer at once if that is nothing, or would take longer than to compute it."""
        fill.planned = True
        found = self._fitting(fill, self.room.bound_of(fill))
        if found is None or not found.missing:  # nothing, or what has come to L1 meanwhile
            if not self._asks_again(fill):
                self._finish(fill)
            return
        if not fill.planned_at:
            worth_it = (
                fill.give_up is not None or fill.promised > found.chunks
            )  # of a part of a promise nothing is known
            if not worth_it and self._presence.is_slow(fill.instance, found.chunks - fill.hit_chunks, found.reads):
                fill.counts.fills_not_begun += 1
                self._finish(fill)
                return
            fill.counts.fills += 1
            fill.planned_at, fill.expected_seconds = self._clock(), self._rates.expected_seconds(found.reads)
        self._queue(fill, found)

    def _asks_again(self, fill: Fill) -> bool:
        """True if more was promised than has come, and the tiers are asked for it once more."""
        now_ns = int(self._clock() * 1e9)
        if (
            fill.promised <= fill.hit_chunks
            or fill.clipped
            or now_ns >= fill.promised_until_ns
            or not self._tiers.unknown_to(fill.durability)
            or fill.promised <= self._cache.leading(fill.namespace, fill.lookup.keys)
        ):
            return False
        fill.asks_at_ns = min(now_ns + fill.asks_after_ns, fill.promised_until_ns)
        fill.asks_after_ns = min(2 * fill.asks_after_ns, LONGEST_ASK_NS)
        return True

    def _ask(self, fill: Fill) -> None:
        fill.asks_at_ns, fill.planned = 0, False
        self._probes.begin(fill, again=True)

    def _fitting(self, fill: Fill, bound: int) -> Attainable | None:
        """The greatest hit whose fill reads at most `bound` bytes."""
        if fill.instance.coverages != fill.coverages:  # a rank has disconnected
            return None
        most = None
        while True:
            found = self._presence.attainable(
                fill.instance, fill.namespace, fill.lookup.keys, fill.hit_chunks, fill.durability, most
            )
            if found is None or bytes_of(found) <= bound:
                return found
            fill.clipped = True
            most = most_within(bound, found, fill.worker.spec.object_groups, fill.coverages)

    def _queue(self, fill: Fill, found: Attainable) -> None:
        fill.chunks, fill.todo = found.chunks, deque(batches(found.missing))
        fill.bytes = fill.brought_bytes + bytes_of(found)
        self._reads.queue(fill, found)

    def end(self, owner: Owner) -> int:
        """The request ended: nothing more is read for it. Returns the tokens that were read for it."""
        if (fill := self._fills.get(owner)) is not None:
            self._finish(fill)
        return self.room.pop(owner)

    def end_of_instance(self, instance_id: str) -> None:
        for owner in [owner for owner in (*self._fills, *self.room.filled) if owner[0] == instance_id]:
            self.end(owner)

    def clear(self, base: bytes) -> None:
        """The namespaces with this prefix were cleared: what is being read for them is useless."""
        for fill in [fill for fill in self._fills.values() if fill.namespace.startswith(base)]:
            self._finish(fill)

    def end_all(self) -> None:
        for fill in list(self._fills.values()):
            self._finish(fill)

    # ---- reserving ----------------------------------------------------------------------------

    def step(self) -> bool:
        """Answer what is due or done at the end of a turn; then plan one fill, reserve one batch or begin its reads.

        True while there is more to do at once.
        """
        now_ns = int(self._clock() * 1e9)
        for fill in list(self._fills.values()):
            if fill.due_ns <= now_ns:
                self._finish(fill)
            elif fill.asks_at_ns:
                if fill.asks_at_ns <= now_ns:
                    self._ask(fill)
            elif fill.began:
                self._finish_if_done(fill)  # or plan what another fill did not bring
        match self._next(now_ns):
            case None:
                return False
            case Work.PLAN, fill:
                self._plan(fill)
            case Work.RESERVE, fill:
                fill.began = True
                self._reserve_batch(fill, fill.todo.popleft())
            case Work.READ, fill:
                self._reads.begin(fill, fill.reserved.popleft())
        return True

    def _next(self, now_ns: int) -> tuple[Work, Fill] | None:
        """The work to do next, and for which fill. Plans first: their answer may be that nothing is read."""
        fills = sorted(self._fills.values(), key=lambda fill: fill.give_up is not None)
        for fill in fills:
            if not fill.planned and not fill.probes:
                return Work.PLAN, fill
        may_overtake = True
        for fill in fills:
            if fill.probes or fill.asks_at_ns:
                continue
            if not fill.began and not (may_overtake and self.room.make_for(fill)):
                may_overtake = may_overtake and now_ns < fill.overtaken_until_ns  # else it might never have room
            elif fill.todo:
                return Work.RESERVE, fill
            elif fill.reserved and self._reads.has_room(fill, fill.reserved[0]):
                return Work.READ, fill
        return None

    def _reserve_batch(self, fill: Fill, missing: MissingObjects) -> None:
        coverage = fill.coverages[missing.group]
        assert coverage is not None
        worker, keys = fill.worker, keys_of(fill.lookup.keys, missing.places)
        self._cache.drop_incomplete(fill.namespace, missing.group, keys)
        plan = self._cache.plan_store(
            fill.namespace, worker.layout, keys, coverage.slot_bytes,
            group=missing.group, slots=coverage.slots, model_name=worker.spec.model_name, durability=fill.durability,
            shares=False, tenant=fill.lookup.tenant,
        )  # fmt: skip
        publish_evicted(self._bus, int(self._clock() * 1e9), plan)
        own = set(map(id, plan.chunks))
        fill.awaited += [(chunk, missing.group) for chunk in plan.prefix if id(chunk) not in own]
        fill.reserved.append(FillBatch(plan, coverage))
        self._open_batches += 1
        if plan.no_space:
            self._cut(fill)

    def _cut(self, fill: Fill) -> None:
        """L1 has no space for all of it now: the hit ends where what was reserved ends, or a smaller one is tried."""
        fill.clipped = True
        fill.todo.clear()
        if fill.only_chunks:
            return
        had_space = sum(batch.coverage.bytes * len(batch.plan.prefix) for batch in fill.reserved)
        self._release(fill)
        fill.awaited.clear()
        found = self._fitting(fill, had_space)
        if found is not None:
            self._queue(fill, found)

    def _release(self, fill: Fill) -> None:
        """Free the slots of what it has not begun to read."""
        while fill.reserved:
            self._cache.finish_store(fill.reserved.popleft().plan, copied=False)
            self._open_batches -= 1

    # ---- ends of reads ------------------------------------------------------------------------

    def _batch_ended(self, fill: Fill, batch: FillBatch) -> None:
        plan = batch.plan
        self._open_batches -= 1
        fill.reading.remove(batch)
        self._cache.finish_store(plan, copied=True, failed=batch.failed)
        if ready := plan.ready:
            fill.brought_bytes += batch.coverage.bytes * len(ready)
            self._count_ready(fill, batch.coverage.group, ready, plan.pages * len(plan.slots))
        if fill.ended:
            return
        self._pin(fill, ready)
        if batch.failed and batch.coverage.group == 0:
            self._release(fill)  # a hit ends before what is missing
        self._finish_if_done(fill)

    def _pin(self, fill: Fill, chunks: list[Chunk]) -> None:
        self._cache.pin_chunks(chunks)
        fill.pinned += chunks

    def _finish_if_done(self, fill: Fill) -> None:
        if fill.ended or fill.waits or not fill.planned:
            return
        while fill.awaited:
            chunk, group = fill.awaited[0]
            if is_filling(chunk, group):
                return
            fill.awaited.popleft()  # each is looked at once in all, however many turns the others take
            if chunk.ready >> group & 1:
                self._pin(fill, [chunk])
            else:
                fill.lost = True
        if fill.lost and not fill.replanned:  # whom it waited for has ended early: its own reads bring the rest
            fill.replanned, fill.lost = True, False
            self._plan(fill)
        elif not self._asks_again(fill):
            self._finish(fill)

    def _count_ready(self, fill: Fill, group: int, ready: Sequence[Chunk], pages: int) -> None:
        keys, instance = b"".join([chunk.key for chunk in ready]), fill.instance
        event = ChunksStored(
            int(self._clock() * 1e9), instance.instance_id, instance.model_name, fill.namespace, keys,
            fill.worker.layout.objects[group], pages,
        )  # fmt: skip
        self._bus.publish(event, len(keys))
        if group == 0:
            tokens = len(ready) * fill.worker.spec.chunk_tokens
            fill.tokens += tokens
            instance.counts.filled_tokens += tokens

    def _finish(self, fill: Fill) -> None:
        """Answer with what L1 has now. Reads that still run end as they do; what they bring is not pinned."""
        fill.ended = True
        del self._fills[fill.owner]
        fill.todo.clear()
        self._release(fill)
        self._reads.unqueue(fill)
        self._reads.cancel(fill)
        now = self._clock()
        if fill.began:
            deadline = now + self._lease_seconds if fill.give_up is None else math.inf  # a prefetch is always ended
            self.room.keep(fill.owner, Filled(fill.bytes, fill.tokens, deadline, fill.give_up))
        if fill.planned_at:
            fill.counts.fill_seconds += now - fill.planned_at
        if fill.expected_seconds is not None and not fill.promised and now - fill.planned_at > fill.expected_seconds:
            fill.counts.fills_slower += 1
        try:
            reply = fill.answer(fill.lookup, fill.tokens)
        finally:
            self._cache.unpin_chunks(fill.pinned)
        fill.respond(reply)
