"""The decisions of L1: which slots a store fills, which chunks a load reads, who is evicted.

Owns: index, pool, eviction policy and leases, and the rules between them. Refuses to know: sockets,
clocks (callers pass the time), memory addresses; it does no I/O and copies nothing. One thread.

Rules kept here:
- Only a READY chunk is found, and READY means every rank's bytes were copied whole.
- Leased, pinned (being filled or read) chunks are not evicted; incomplete ones nobody fills go first.
- Clear and eviction detach at once; pages are freed when the last pin is gone.
- Within one request later chunks age faster than earlier ones: a prefix without its start is useless. A store never
  evicts what it stores, or found: of a prompt that does not fit the prefix that fits stays.
- No call costs more than its message has chunks, however many L1 holds. What would is put off, and step() does it in
  slices: freeing what was cleared, ending the leases of engines that are gone and of requests that never ended. A store
  that must evict much is planned in slices by extend_plan(). What was put off counts as done: nothing is starved for it.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from kvserver.cache.eviction import EvictionPolicy
from kvserver.cache.index import Chunk, Index, ModelUse, Namespace
from kvserver.cache.misses import EvictedKeys, MissReason
from kvserver.cache.pages import PagePool, page_count
from kvserver.protocol import KEY_BYTES, ErrorCode, KVServerError

Owner: TypeAlias = tuple[str, str]  # (instance id, request id)
SLICE = 256  # chunks that step() lets go of in one turn
_EVICTION_STEPS = 3  # what it costs beside looking at the chunk
_MISSES_ASKED = 128  # chunks of one lookup that are asked why they are missing
_NAMESPACES_ASKED = 64  # for each of these


_KEY = struct.Struct(f"{KEY_BYTES}s")


def split_keys(keys: bytes) -> Iterator[tuple[bytes]]:
    """One key after the other, each in a tuple: it runs for every chunk of every lookup, and nothing else is as fast."""
    return _KEY.iter_unpack(keys)


@dataclass(slots=True)
class Lease:
    """A request's hold on chunks. It delays eviction; it is no authority."""

    deadline: float
    chunks: list[Chunk]


@dataclass(slots=True)
class StorePlan:
    """What one rank's store should copy. `positions[i]` is which of the store's keys `chunks[i]` is.

    `prefix` is all chunks of the store in key order, also the skipped ones: they age together. `evicted` left L1 to
    make room, as (namespace id, key); `ready` became so when the plan was finished.
    """

    rank: int
    namespace_id: bytes = b""
    world_size: int = 1
    model_name: str = ""  # whose the namespace is if it is new
    keys: bytes = b""  # those that may fit
    pages: int = 0  # of one slot
    steps: int = 0  # it may still look at so many keys and chunks before extend_plan() returns
    complete: bool = True  # all keys were looked at
    full: bool = False  # nothing more may be evicted
    found: list[Chunk] = field(default_factory=list)  # that were there when it began; pinned until it is complete
    prefix: list[Chunk] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ready: list[Chunk] = field(default_factory=list)
    evicted: list[tuple[bytes, bytes]] = field(default_factory=list)
    skipped: int = 0
    no_space: int = 0


class Cache:
    def __init__(self, pool: PagePool, policy: EvictionPolicy) -> None:
        self.pool = pool
        self.policy = policy
        self.index = Index()
        self.evicted_chunks = 0
        self.evicted_pages = 0
        self.cleared_chunks = 0
        self.pins = 0  # over all chunks; equals what open plans hold
        self.lease_count = 0
        # By owner's instance and request, in the order of deadlines. The dicts are ordered ones, whose first item is found
        # at once however many before it are gone.
        self._leases: dict[str, OrderedDict[str, Lease]] = {}
        self._garbage: deque[Namespace] = deque()  # cleared; its chunks leave it as they are freed
        self._ownerless: list[OrderedDict[str, Lease]] = []  # leases of instances that are gone
        self._expired_before = 0.0
        self._expiring: list[str] = []  # instances whose leases may have expired by then
        self._evicted_keys = EvictedKeys()

    # ---- lookup and leases --------------------------------------------------------------------

    def lookup(self, namespace_id: bytes, keys: bytes, owner: Owner, deadline: float) -> int:
        """How many chunks from the first on are READY; `owner` leases them until `deadline`.

        A second lookup of an owner replaces its first. REQUIRES: deadlines of one instance never go back.
        """
        found: list[Chunk] = []
        namespace = self.index.find_namespace(namespace_id)
        if namespace is not None:
            get = namespace.chunks.get
            for (key,) in split_keys(keys):
                chunk = get(key)
                if chunk is None or not chunk.ready:
                    break
                chunk.leases += 1
                found.append(chunk)
        self.end_lease(owner)
        if found:
            instance_id, request_id = owner
            self._leases.setdefault(instance_id, OrderedDict())[request_id] = Lease(deadline, found)
            self.lease_count += 1
        return len(found)

    def why_missed(self, namespace_id: bytes, keys: bytes, first: int) -> Counter[MissReason]:
        """Chunks from the `first` one of `keys` on, by the reason why each is no hit, that of the first one first.

        REQUIRES: that one is not READY.

        A READY chunk behind a hole has the hole's reason. From the first chunk on that was never stored all have that
        reason: nothing that L1 could have kept would have made them hits. Of more than _MISSES_ASKED chunks each n-th is
        looked at, for itself and those up to the next.
        """
        total = len(keys) // KEY_BYTES
        step = -(-(total - first) // _MISSES_ASKED)
        namespace = self.index.find_namespace(namespace_id)
        known = namespace.chunks if namespace is not None else {}
        found: Counter[MissReason] = Counter()
        reason = MissReason.NEVER_STORED
        for position in range(first, total, step):
            key = keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
            chunk = known.get(key)
            if chunk is None:
                reason = self._why_absent(namespace_id, key)
            elif not chunk.ready:
                reason = MissReason.FILLING
            if reason is MissReason.NEVER_STORED:
                found[reason] += total - position
                break
            found[reason] += min(step, total - position)
        return found

    def _why_absent(self, namespace_id: bytes, key: bytes) -> MissReason:
        if (namespace_id, key) in self._evicted_keys:
            return MissReason.EVICTED
        return MissReason.OTHER_NAMESPACE if self.namespace_with(key) else MissReason.NEVER_STORED

    def namespace_with(self, key: bytes) -> bytes:
        """The id of a namespace that has the key; b"" if none of those that are asked has."""
        return self.index.namespace_with(key, _NAMESPACES_ASKED)

    def end_lease(self, owner: Owner) -> None:
        instance_id, request_id = owner
        leases = self._leases.get(instance_id)
        lease = leases.pop(request_id, None) if leases else None
        if lease is not None:
            self._end_lease(lease)

    def expire_leases(self, now: float) -> None:
        """The leases whose deadline has come count as ended; step() ends them."""
        self._expired_before = now
        self._expiring = list(self._leases)

    def end_leases_of(self, instance_id: str) -> None:
        """All of the instance's leases count as ended; step() ends them."""
        if leases := self._leases.pop(instance_id, None):
            self._ownerless.append(leases)

    # ---- store --------------------------------------------------------------------------------

    def plan_store(
        self,
        namespace_id: bytes,
        world_size: int,
        rank: int,
        keys: bytes,
        slot_bytes: int,
        steps: int = sys.maxsize,
        model_name: str = "",
    ) -> StorePlan:
        """Reserve slots for the chunks that this rank still misses; pins them. Pair with finish_store.

        Chunks that are there or on their way are skipped (duplicate stores merge). What L1 has no room for counts as `no_space`:
        from the first chunk on that could not fit with those before it and all ranks' bytes, or for which nothing may be
        evicted. KVServerError(TOO_LARGE) if not even one could ever fit. extend_plan() goes on with a plan that is not
        `complete` after so many steps.
        """
        pages = self.pool.pages_for(slot_bytes)
        if pages > self.pool.pages:
            raise KVServerError(
                ErrorCode.TOO_LARGE,
                f"a chunk of {slot_bytes} bytes needs {pages} pages of {self.pool.page_bytes} bytes, L1 has "
                f"{self.pool.pages}; raise --l1-size",
            )
        count = len(keys) // KEY_BYTES
        fitting = min(count, max(1, self.pool.pages // (pages * world_size)))
        plan = StorePlan(rank, namespace_id, world_size, model_name, keys[: fitting * KEY_BYTES], pages, complete=False)
        plan.no_space = count - fitting
        if (namespace := self.index.find_namespace(namespace_id)) is not None:
            get = namespace.chunks.get
            plan.found = [chunk for (key,) in split_keys(plan.keys) if (chunk := get(key)) is not None]
            self._pin_chunks(plan.found)
        self.extend_plan(plan, steps)
        return plan

    def extend_plan(self, plan: StorePlan, steps: int) -> None:
        """Go on for so many steps; what is left of them is in `plan.steps`. REQUIRES: not complete.

        Meanwhile `evicted` grows, and anything may happen to the index between two calls.
        """
        plan.steps = steps
        namespace = self.index.find_or_make_namespace(plan.namespace_id, plan.world_size, plan.model_name)
        bit = 1 << plan.rank
        first = len(plan.prefix)
        for position, (key,) in enumerate(split_keys(plan.keys[first * KEY_BYTES :]), first):
            if plan.steps <= 0:
                return
            chunk = namespace.chunks.get(key)
            if chunk is not None and (chunk.done | chunk.filling) & bit:
                plan.steps -= 1
                plan.prefix.append(chunk)
                plan.skipped += 1
                continue
            if chunk is not None:
                chunk.pins += 1  # it may have come after the plan began
            slot = self._allocate_slot(plan)
            if slot is None:
                if chunk is not None:
                    chunk.pins -= 1
                    self._free_or_track(chunk)
                if not plan.full:
                    return
                plan.no_space += len(plan.keys) // KEY_BYTES - position
                break
            if chunk is None:
                chunk = self.index.add_chunk(namespace, key)
                chunk.pins += 1
            chunk.set_slot(plan.rank, slot)
            namespace.model.pages += plan.pages
            chunk.filling |= bit
            self.pins += 1
            plan.steps -= 1
            plan.prefix.append(chunk)
            plan.chunks.append(chunk)
            plan.positions.append(position)
        self._complete_plan(plan)

    def finish_store(self, plan: StorePlan, copied: bool) -> int:
        """Publish the plan's chunks if `copied` (every byte of this rank), else give their slots back.

        Returns how many became READY; they are in `plan.ready`. REQUIRES: complete, or not copied.
        """
        if not plan.complete:
            self._complete_plan(plan)
        bit = 1 << plan.rank
        for chunk in plan.chunks:
            chunk.filling &= ~bit
            chunk.pins -= 1
            self.pins -= 1
            if copied and not chunk.detached:
                chunk.done |= bit
                if chunk.done == (1 << chunk.namespace.world_size) - 1:
                    chunk.ready = True
                    plan.ready.append(chunk)
            else:
                self.pool.free_pages(chunk.slot(plan.rank))
                chunk.namespace.model.pages -= plan.pages
                chunk.set_slot(plan.rank, b"")
                if not chunk.detached and not chunk.done and not chunk.filling:
                    self.index.detach_chunk(chunk)
        self._free_or_track(*reversed(plan.prefix))
        return len(plan.ready)

    # ---- load ---------------------------------------------------------------------------------

    def plan_load(self, namespace_id: bytes, keys: bytes) -> list[Chunk]:
        """Pin the chunks of `keys` for reading. Pair with finish_load.

        KVServerError(NOT_FOUND) and nothing pinned unless all are READY now, whatever a lease said.
        """
        namespace = self.index.find_namespace(namespace_id)
        known = namespace.chunks if namespace is not None else {}
        found = [known.get(key) for (key,) in split_keys(keys)]
        chunks = [chunk for chunk in found if chunk is not None and chunk.ready]
        if len(chunks) != len(found):
            raise KVServerError(ErrorCode.NOT_FOUND, f"{len(found) - len(chunks)} of {len(found)} chunks are not READY")
        self._pin_chunks(chunks)
        return chunks

    def finish_load(self, chunks: list[Chunk], copied: bool) -> None:
        """`copied`: every byte of this rank was."""
        for chunk in chunks:
            chunk.pins -= 1
            chunk.loaded |= copied
        self.pins -= len(chunks)
        self._free_or_track(*reversed(chunks))

    # ---- clear --------------------------------------------------------------------------------

    def clear_namespaces(self, base: bytes = b"") -> int:
        """Detach all chunks of the namespaces that begin with `base`; step() frees their pages."""
        before = self.index.chunk_count
        for id in self.index.namespace_ids():
            namespace = self.index.detach_namespace(id) if id.startswith(base) else None
            if namespace is not None:
                self._garbage.append(namespace)
        cleared = before - self.index.chunk_count
        self.cleared_chunks += cleared
        return cleared

    # ---- what was put off ---------------------------------------------------------------------

    def step(self, limit: int = SLICE) -> bool:
        """Let go of some `limit` chunks, or of one lease that has more; True while there is more to do."""
        while limit > 0 and (done := self._free_one_chunk() or self._end_one_lease()):
            limit -= done
        return limit <= 0

    def _free_one_chunk(self) -> int:
        """How many detached chunks it looked at: 0 if none is left."""
        while self._garbage:
            if chunks := self._garbage[0].chunks:
                _, chunk = chunks.popitem()
                self._free_or_track(chunk)
                return 1
            self._garbage.popleft()
        return 0

    def _end_one_lease(self) -> int:
        """How many chunks had a lease that it ended, or instances no more that has: 0 if none is left."""
        if self._ownerless:
            leases = self._ownerless[-1]
            if not leases:
                self._ownerless.pop()
                return 1
        elif self._expiring:
            leases = self._leases.get(self._expiring[-1], OrderedDict())
            if not leases or next(iter(leases.values())).deadline > self._expired_before:
                instance_id = self._expiring.pop()
                if not leases:
                    self._leases.pop(instance_id, None)
                return 1
        else:
            return 0
        _, lease = leases.popitem(last=False)
        self._end_lease(lease)
        return len(lease.chunks)

    # ---- the books ----------------------------------------------------------------------------

    def audit(self) -> None:
        """Count everything again and compare. AssertionError names the book that does not balance.

        REQUIRES: no garbage is left. Costs a walk over all chunks: for tests and idle moments.
        """
        assert not self._garbage, "free the garbage first"
        assert not self._ownerless, "end the leases of those that are gone first"
        leases = pins = 0
        chunks: Counter[ModelUse] = Counter()
        pages: Counter[ModelUse] = Counter()
        for chunk in self.index:
            chunks[chunk.namespace.model] += 1
            pages[chunk.namespace.model] += chunk.page_count
            leases += chunk.leases
            pins += chunk.pins
            full = (1 << chunk.namespace.world_size) - 1
            assert chunk.ready == (chunk.done == full), "READY without every rank's bytes, or the reverse"
            held = bool(chunk.leases or chunk.pins)
            assert held or chunk.tracked, "an idle chunk that eviction cannot find"
        count = chunks.total()
        assert count == self.index.chunk_count, f"{count} chunks, index says {self.index.chunk_count}"
        models = self.index.models
        assert all(chunks[model] == model.chunks for model in models.values()), "chunks of a model are counted wrongly"
        evicted = sum(model.evicted_chunks for model in models.values())
        assert evicted == self.evicted_chunks, f"models count {evicted} evictions of {self.evicted_chunks}"
        used = sum(model.pages for model in models.values())
        assert used == self.pool.used_pages, f"models count {used} pages, {self.pool.used_pages} are used"
        all_leases = [lease for leases in self._leases.values() for lease in leases.values()]
        assert len(all_leases) == self.lease_count, f"{len(all_leases)} leases, {self.lease_count} counted"
        in_leases = sum(not chunk.detached for lease in all_leases for chunk in lease.chunks)
        assert leases == in_leases, f"chunks count {leases} leases, leases hold {in_leases} chunks"
        assert pins <= self.pins, f"chunks count {pins} pins, open plans {self.pins}"
        if self.pins == 0:
            assert all(pages[model] == model.pages for model in models.values()), "pages of a model are counted wrongly"
            assert pages.total() == used, f"chunks have {pages.total()} pages, {used} are used"

    # ---- inside -------------------------------------------------------------------------------

    def _end_lease(self, lease: Lease) -> None:
        for chunk in lease.chunks:
            chunk.leases -= 1
        self.policy.track(reversed(lease.chunks))  # what is detached is freed with the garbage, whoever leases it
        self.lease_count -= 1

    def _complete_plan(self, plan: StorePlan) -> None:
        """Only what it fills stays pinned."""
        plan.complete = True
        for chunk in plan.found:
            chunk.pins -= 1
        self.pins -= len(plan.found)
        self._free_or_track(*reversed(plan.found), *reversed(plan.prefix))

    def _pin_chunks(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            chunk.pins += 1
        self.pins += len(chunks)

    def _free_or_track(self, *chunks: Chunk) -> None:
        """Something let go of these, or used them: free what is detached, the rest becomes the youngest, in this order."""
        for chunk in chunks:
            if chunk.detached and not chunk.pins:
                self._free_chunk(chunk)
        self.policy.track(chunks)

    def _free_chunk(self, chunk: Chunk) -> int:
        """How many pages that gave back."""
        slots = chunk.remove_slots()
        self.pool.free_pages(slots)
        pages = page_count(slots)
        chunk.namespace.model.pages -= pages
        chunk.ready = False
        if chunk.tracked:
            self.policy.untrack(chunk)
        return pages

    def _allocate_slot(self, plan: StorePlan) -> bytes | None:
        """Pages for one slot, evicting as needed for the plan; None if its steps are up, or nothing more may be evicted."""
        while (slot := self.pool.allocate_pages(plan.pages)) is None:
            if plan.steps <= 0:
                return None
            if done := self._free_one_chunk():
                plan.steps -= done
                continue
            chunk = self.policy.oldest_chunk()
            if chunk is not None:
                plan.steps -= 1
                self.policy.untrack(chunk)
                if not (chunk.leases or chunk.pins):
                    plan.steps -= _EVICTION_STEPS
                    self._evict_chunk(chunk, plan)
            elif done := self._end_one_lease():
                plan.steps -= done
            else:
                plan.full = True
                return None
        return slot

    def _evict_chunk(self, chunk: Chunk, plan: StorePlan) -> None:
        self.index.detach_chunk(chunk)
        self.evicted_chunks += 1
        chunk.namespace.model.evicted_chunks += 1
        chunk.namespace.model.never_loaded_chunks += chunk.ready and not chunk.loaded
        self.evicted_pages += self._free_chunk(chunk)
        plan.evicted.append((chunk.namespace.id, chunk.key))
        self._evicted_keys.add(chunk.namespace.id, chunk.key, self.index.chunk_count)
