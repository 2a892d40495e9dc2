"""Fills: objects that a prompt needs are read from L2 into L1 before its engine computes them.

Owns: the fills under way and those that wait for room, the bound on the memory of both, and the one reply of each. Refuses to
know: how a tier reads (`l2`), which hit is the greatest (`presence`), the reply's content (`lookups`).

A fill reads in batches, windows and states before the chunks of the body. A batch becomes READY when its reads have ended,
those whose reads failed left out, and its chunks stay pinned until the fill ends: then the request leases what L1 has and gets
its reply, in one step. A fill ends when all is read, at its deadline, when its request, engine or namespace ends. Reads that
run then are cancelled; their pages stay allocated until their tickets end.

Bytes of fills under way, and of fills whose request has not loaded them yet, are at most an eighth of L1, or 256 MiB if that is
more, but never more than three quarters of L1: else waiting requests would evict what others are about to load. A fill that
finds no room waits for its turn; one that never fits is cut.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvserver.cache import Cache, Chunk, StorePlan
from kvserver.events import Bus, ChunksStored
from kvserver.l2 import ObjectName, TierEnd, TierOutcome
from kvserver.protocol import KEY_BYTES, AwaitFill, Lookup, LookupReply
from kvserver.server.chunk_events import publish_evicted
from kvserver.server.coverage import Coverage
from kvserver.server.instances import Instance, Worker
from kvserver.server.presence import Attainable, MissingObjects, Presence, keys_of
from kvserver.server.tickets import Respond
from kvserver.server.tiers import Tiers

BATCH = 16  # objects that become READY together
MOST_FILLS = 1024  # under way and waiting
_STEPS_PER_TURN = 1024  # of the plans of all fills (StorePlan.steps)
_MOST_READS = 64  # of one tier under way at a time, those that hang included
_MIB = 1 << 20

Owner = tuple[str, str]  # (instance id, request id)


def memory_bound(l1_bytes: int) -> int:
    """Bytes that fills may occupy before their requests have loaded them."""
    return max(l1_bytes // 8, min(l1_bytes // 4 * 3, 256 * _MIB))


@dataclass(eq=False, slots=True)
class _Batch:
    """Objects of one group whose reads run."""

    plan: StorePlan
    coverage: Coverage
    failed: set[int] = field(default_factory=set)  # places in plan.chunks
    reads: dict[int, tuple[int, int]] = field(default_factory=dict)  # place in plan.chunks -> (tier, ticket)


@dataclass(slots=True)
class _Filled:
    """What an ended fill has read."""

    bytes: int  # that its request has not loaded
    tokens: int
    deadline: float  # of the request's lease


@dataclass(eq=False, slots=True)
class _Fill:
    owner: Owner
    lookup: Lookup
    respond: Respond
    namespace: bytes
    instance: Instance
    worker: Worker  # one of the instance's, also after it disconnected
    coverages: Sequence[Coverage | None]
    due_ns: int
    hit_chunks: int  # of L1 when the fill began
    probes: int = 0  # that have not ended; nothing is planned before
    todo: deque[MissingObjects] = field(default_factory=deque)
    bytes: int = 0
    began: bool = False
    replanned: bool = False
    ended: bool = False
    batches: list[_Batch] = field(default_factory=list)
    pinned: list[Chunk] = field(default_factory=list)
    awaited: list[tuple[Chunk, int]] = field(default_factory=list)  # with the group: another fill or a store fills them
    tokens: int = 0  # of the objects of group 0 that were read


class Fills:
    """REQUIRES: the loop's thread uses it. `answer` looks the request up in L1, leases what it finds and makes the reply."""

    def __init__(
        self,
        cache: Cache,
        tiers: Tiers,
        presence: Presence,
        bus: Bus,
        answer: Callable[[Lookup], LookupReply],
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._tiers, self._presence, self._bus, self._answer = cache, tiers, presence, bus, answer
        self._lease_seconds, self._clock = lease_seconds, clock
        self._fills: OrderedDict[Owner, _Fill] = OrderedDict()  # the first that has not begun is the next to begin
        self._filled: OrderedDict[Owner, _Filled] = OrderedDict()  # by request, in the order of their deadlines
        self._reads = [0] * len(tiers.all)  # under way, by tier
        self._bound = memory_bound(cache.pool.pages * cache.pool.page_bytes)
        self._open_batches = 0

    @property
    def open(self) -> int:
        """Fills without a reply, and batches whose reads have not ended."""
        return len(self._fills) + self._open_batches

    @property
    def used_bytes(self) -> int:
        """What counts for the bound."""
        return sum(fill.bytes for fill in self._fills.values() if fill.began) + sum(
            filled.bytes for filled in self._filled.values()
        )

    @property
    def next_due_ns(self) -> int | None:
        """When the next fill must be answered."""
        return min((fill.due_ns for fill in self._fills.values()), default=None)

    # ---- begin and end ------------------------------------------------------------------------

    def begin(self, request: AwaitFill, instance: Instance, respond: Respond) -> None:
        """Fill what the lookup lacks; answer when that has ended, or after request.wait_ms."""
        lookup = request.lookup
        owner = (lookup.instance_id, lookup.request_id)
        self.end(owner)
        reply = self._answer(lookup)  # what L1 has is leased meanwhile
        namespace = instance.namespace_of(lookup.variant)
        if namespace is None or instance.private or not instance.coverages or len(self._fills) >= MOST_FILLS:
            respond(reply)
            return
        fill = self._fills[owner] = _Fill(
            owner, lookup, respond, namespace, instance, instance.any_worker(), list(instance.coverages),
            int(self._clock() * 1e9) + request.wait_ms * 1_000_000, reply.hit_chunks,
        )  # fmt: skip
        self._probe(fill)
        if not fill.probes:
            self._plan(fill)

    def _probe(self, fill: _Fill) -> None:
        """Ask the tiers that other daemons write to what they have; then plan."""

        def ended(end: TierEnd) -> None:
            fill.probes -= 1
            if not fill.probes and not fill.ended:
                self._plan(fill)

        for tier in self._tiers.shared:
            for group, spec in enumerate(fill.worker.spec.object_groups):
                chain = spec.kind == "full"
                keys = fill.lookup.keys[fill.hit_chunks * KEY_BYTES :] if chain else fill.lookup.keys
                self._tiers.probe(tier, fill.namespace, group, keys, chain, fill.due_ns, ended)
                fill.probes += 1

    def _plan(self, fill: _Fill) -> None:
        """Queue what is to be read; answer at once if that is nothing."""
        found = None
        if fill.instance.coverages == fill.coverages:  # else a rank has disconnected
            found = self._fitting(fill.instance, fill.namespace, fill.lookup.keys, fill.hit_chunks)
        if found is None:
            self._finish(fill)
            return
        fill.todo = deque(_batches(found.missing))
        if not fill.replanned:
            fill.bytes = _bytes_of(found, fill.coverages)
            fill.instance.counts.fills += 1

    def _fitting(self, instance: Instance, namespace: bytes, keys: bytes, hit_chunks: int) -> Attainable | None:
        """The greatest hit, or one of half, a quarter ... as many more chunks, whose fill is within the bound."""
        found = self._presence.attainable(instance, namespace, keys, hit_chunks)
        while found is not None and _bytes_of(found, instance.coverages) > self._bound:
            most = hit_chunks + (found.chunks - hit_chunks) // 2
            found = self._presence.attainable(instance, namespace, keys, hit_chunks, most)
        return found

    def end(self, owner: Owner) -> int:
        """The request ended: nothing more is read for it. Returns the tokens that were read for it."""
        if (fill := self._fills.get(owner)) is not None:
            self._finish(fill)
        filled = self._filled.pop(owner, None)
        return filled.tokens if filled is not None else 0

    def loaded(self, owner: Owner) -> None:
        """The request has begun to load: what was read for it no longer counts for the bound."""
        if (filled := self._filled.get(owner)) is not None:
            filled.bytes = 0

    def tick(self) -> None:
        """What was read for requests that never ended counts no longer than their leases."""
        now = self._clock()
        while self._filled and (owner := next(iter(self._filled))) and self._filled[owner].deadline <= now:
            del self._filled[owner]

    def end_of_instance(self, instance_id: str) -> None:
        for owner in [owner for owner in (*self._fills, *self._filled) if owner[0] == instance_id]:
            self.end(owner)

    def clear(self, base: bytes) -> None:
        """The namespaces with this prefix were cleared: what is being read for them is useless."""
        for fill in [fill for fill in self._fills.values() if fill.namespace.startswith(base)]:
            self._finish(fill)

    def end_all(self) -> None:
        for fill in list(self._fills.values()):
            self._finish(fill)

    # ---- reading ------------------------------------------------------------------------------

    def step(self) -> bool:
        """At the end of a turn: answer what is due, begin reads. True while there is more to do at once."""
        if not self._fills:
            return False
        now_ns, steps = int(self._clock() * 1e9), _STEPS_PER_TURN
        for fill in list(self._fills.values()):
            if fill.due_ns <= now_ns:
                self._finish(fill)
        for fill in list(self._fills.values()):
            if fill.probes or fill.ended:
                continue
            if not fill.began:
                if self.used_bytes and self.used_bytes + fill.bytes > self._bound:
                    return False  # none overtakes another
                fill.began = True
            self._finish_if_done(fill)  # or plan what another fill did not bring
            while not fill.ended and fill.todo and min(self._reads) < _MOST_READS and steps > 0:
                steps = self._begin_batch(fill, steps)
            if fill.todo and steps <= 0:
                return True
            self._finish_if_done(fill)
        return False

    def _begin_batch(self, fill: _Fill, steps: int) -> int:
        """Reserve and read the next batch; returns the steps that remain of the turn."""
        missing = fill.todo.popleft()
        coverage = fill.coverages[missing.group]
        assert coverage is not None
        worker = fill.worker
        plan = self._cache.plan_store(
            fill.namespace, worker.layout, keys_of(fill.lookup.keys, missing.places), coverage.slot_bytes,
            group=missing.group, slots=coverage.slots, model_name=worker.spec.model_name,
        )  # fmt: skip
        publish_evicted(self._bus, int(self._clock() * 1e9), plan)
        if plan.no_space:
            fill.todo.clear()  # what is behind needs these
        own = set(map(id, plan.chunks))
        fill.awaited += [(chunk, missing.group) for chunk in plan.prefix if id(chunk) not in own]
        batch = _Batch(plan, coverage)
        fill.batches.append(batch)
        self._open_batches += 1
        for place in range(len(plan.chunks)):
            self._read(fill, batch, place, -1)
        if not batch.reads:
            self._batch_ended(fill, batch)
        return steps - BATCH - 4 * len(plan.evicted)

    def _read(self, fill: _Fill, batch: _Batch, place: int, after: int) -> None:
        """Read the object from the first tier after tier number `after` that holds it, or count it as failed."""
        chunk, group = batch.plan.chunks[place], batch.coverage.group
        bits = list(self._tiers.present(fill.namespace, group, chunk.key))
        usable = (
            number for number in range(after + 1, len(bits)) if bits[number] and self._reads[number] < _MOST_READS
        )
        tier = next(usable, None)
        if tier is None or chunk.detached:
            batch.failed.add(place)
            return

        def ended(end: TierEnd) -> None:
            self._reads[tier] -= 1
            del batch.reads[place]
            if end.outcome is not TierOutcome.DONE:
                if fill.ended:
                    batch.failed.add(place)
                else:
                    self._read(fill, batch, place, tier)
            if not batch.reads:
                self._batch_ended(fill, batch)

        name = ObjectName(fill.namespace, group, chunk.key)
        ticket = self._tiers.get(tier, name, batch.coverage.memory_of(chunk), fill.due_ns, ended)
        batch.reads[place] = (tier, ticket)
        self._reads[tier] += 1

    def _batch_ended(self, fill: _Fill, batch: _Batch) -> None:
        plan = batch.plan
        self._open_batches -= 1
        fill.batches.remove(batch)
        self._cache.finish_store(plan, copied=True, failed=batch.failed)
        if ready := plan.ready:
            self._count_ready(fill, batch.coverage.group, ready)
        if fill.ended:
            return
        self._cache.pin_chunks(ready)
        fill.pinned += ready
        if batch.failed and batch.coverage.group == 0:
            fill.todo.clear()  # a hit ends before what is missing
        self._finish_if_done(fill)

    def _finish_if_done(self, fill: _Fill) -> None:
        if fill.ended or fill.todo or fill.batches:
            return
        if any(_is_filling(chunk, group) for chunk, group in fill.awaited):
            return
        lost = any(not chunk.ready >> group & 1 for chunk, group in fill.awaited)
        fill.awaited.clear()
        if lost and not fill.replanned:  # whom it waited for has ended early: its own reads bring the rest
            fill.replanned = True
            self._plan(fill)
        else:
            self._finish(fill)

    def _count_ready(self, fill: _Fill, group: int, ready: Sequence[Chunk]) -> None:
        keys, instance = b"".join([chunk.key for chunk in ready]), fill.instance
        event = ChunksStored(
            int(self._clock() * 1e9), instance.instance_id, instance.model_name, fill.namespace, keys,
            fill.worker.layout.objects[group],
        )  # fmt: skip
        self._bus.publish(event, len(keys))
        if group == 0:
            tokens = len(ready) * fill.worker.spec.chunk_tokens
            fill.tokens += tokens
            instance.counts.filled_tokens += tokens

    def _finish(self, fill: _Fill) -> None:
        """Answer with what L1 has now. Reads that still run end as they do; what they bring is not pinned."""
        fill.ended = True
        del self._fills[fill.owner]
        fill.todo.clear()
        for batch in list(fill.batches):
            for tier, ticket in list(batch.reads.values()):
                self._tiers.cancel(tier, ticket)
        if fill.began:
            deadline = self._clock() + self._lease_seconds
            self._filled[fill.owner] = _Filled(fill.bytes, fill.tokens, deadline)
            self._filled.move_to_end(fill.owner)
        try:
            reply = self._answer(fill.lookup)
        finally:
            self._cache.unpin_chunks(fill.pinned)
        fill.respond(reply)


def _is_filling(chunk: Chunk, group: int) -> bool:
    groups = chunk.namespace.groups
    slots = range(groups.first[group], groups.first[group] + groups.slots[group])
    return not chunk.detached and not chunk.ready >> group & 1 and any(map(chunk.has_slot, slots))


def _bytes_of(found: Attainable, coverages: Sequence[Coverage | None]) -> int:
    total = 0
    for missing in found.missing:
        coverage = coverages[missing.group]
        assert coverage is not None, "a tier holds objects of groups with a coverage only"
        total += coverage.bytes * len(missing.places)
    return total


def _batches(missing: Sequence[MissingObjects]) -> Iterator[MissingObjects]:
    for each in missing:
        for first in range(0, len(each.places), BATCH):
            yield MissingObjects(each.group, each.places[first : first + BATCH])
