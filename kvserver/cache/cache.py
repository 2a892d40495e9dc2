"""The decisions of L1: which slots a store fills, which chunks a load reads, which chunks are evicted.

Owns: index, pool, eviction policy and leases, and the rules between them. Refuses to know: sockets,
clocks (callers pass the time), memory addresses. The cache does no I/O and copies nothing. One thread uses it.

Rules kept here:
- Lookups and loads find only READY objects. READY means that every rank's bytes were copied whole.
- Leased chunks and pinned chunks (being filled or read) are not evicted. Incomplete chunks that no store fills are
  evicted first.
- Clear and eviction detach a chunk at once. The chunk's pages are freed when its last pin ends.
- The last chunk of a prompt is stored block by block (a *tail*) in a namespace of its own, `tails_of()`, where each block is
  a chunk. It leaves L1 before the chunk that it follows.
- A chunk's objects of all groups age together and are evicted together, so no object strands those of another group.
- Within one request later chunks age faster than earlier chunks: a prefix without its start is useless. A store never
  evicts the chunks that it stores or found: of a prompt that does not fit, the prefix that fits stays.
- The cost of a call grows with the chunks of its message, never with the chunks in L1. Longer work is deferred, and
  step() does it in slices: freeing cleared chunks, ending the leases of disconnected engines and of requests that
  never ended. extend_plan() plans a store that must evict many chunks in slices. Deferred work counts as done: no
  store fails for lack of space that deferred work would free.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvserver.cache.chunk import Chunk, ModelUse, Namespace
from kvserver.cache.eviction import EvictionPolicy
from kvserver.cache.groups import Groups
from kvserver.cache.index import Index
from kvserver.cache.misses import EvictedKeys, LookupOutcome, MissReason
from kvserver.cache.namespace import tails_of
from kvserver.cache.pages import PagePool, page_count
from kvserver.protocol import KEY_BYTES, ErrorCode, KVServerError

Owner: TypeAlias = tuple[str, str]  # (instance id, request id)
SLICE = 256  # chunks that one step() frees or unleases
_EVICTION_STEPS = 3  # steps of one eviction, beside the step of looking at the chunk
_MISSES_EXAMINED = 128  # missing chunks of one lookup whose reason is determined
_FIRST_SLOT = range(1)
_NAMESPACES_SEARCHED = 64  # for each of these chunks


_KEY = struct.Struct(f"{KEY_BYTES}s")


def split_keys(keys: bytes) -> Iterator[tuple[bytes]]:
    """Each key in a tuple of one: this runs for every chunk of every lookup, and no other way is as fast."""
    return _KEY.iter_unpack(keys)


@dataclass(slots=True)
class Lease:
    """A request's claim on chunks. A lease delays eviction; it does not guarantee a later load."""

    deadline: float
    chunks: list[Chunk]


@dataclass(slots=True)
class StorePlan:
    """The objects that one rank's store copies, or that a fill reads. That of `chunks[i]` has the key number `positions[i]`.

    `prefix` is all chunks of the store in key order, skipped chunks included: they age together. `evicted` is the
    (namespace id, key) of each chunk that was evicted for this store. finish_store() adds to `ready`.
    """

    group: int
    slots: range  # the numbers of the slots of each chunk: one rank's of a store, all ranks' of a fill
    groups: Groups
    namespace_id: bytes = b""
    model_name: str = ""  # the model of the namespace if the namespace is new
    keys: bytes = b""  # of the chunks that may fit
    pages: int = 0  # of one slot
    steps: int = 0  # keys and chunks that extend_plan() may still look at before it returns
    complete: bool = True  # every key has been looked at
    full: bool = False  # no further chunk may be evicted
    found: list[Chunk] = field(default_factory=list)  # resident when planning began; pinned until the plan is complete
    prefix: list[Chunk] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ready: list[Chunk] = field(default_factory=list)  # whose object became READY
    evicted: list[tuple[bytes, bytes]] = field(default_factory=list)
    skipped: int = 0  # objects that were resident, or that another store fills
    no_space: int = 0  # objects that found no space in L1
    after: tuple[bytes, bytes] | None = None  # of a tail: (namespace id, key) of the chunk before it


def _lease(namespace: Namespace, keys: bytes) -> tuple[list[Chunk], int, int]:
    """Lease what a hit needs: these chunks, the hit's boundary, and the number of leading chunks that all full groups have.

    Without full groups that number is the boundary.
    """
    groups = namespace.groups
    if full := groups.full:
        found = namespace.chunks.find_leading(keys)
        for number, chunk in enumerate(found):
            if chunk.ready & full != full:
                del found[number:]
                break
            chunk.leases += 1
        boundary = groups.boundary(found)
        for chunk in found[boundary:]:
            chunk.leases -= 1
        return found[:boundary], boundary, len(found)
    chunks = namespace.chunks.find(keys)
    boundary = groups.boundary(chunks)
    needed = [chunk for chunk in chunks[groups.first_needed(boundary) : boundary] if chunk is not None]
    for chunk in needed:
        chunk.leases += 1
    return needed, boundary, boundary


class Cache:
    def __init__(self, pool: PagePool, policy: EvictionPolicy) -> None:
        self.pool = pool
        self.policy = policy
        self.index = Index(policy.make_chunk)
        self.evicted_chunks = 0
        self.evicted_tail_blocks = 0
        self.evicted_pages = 0
        self.cleared_chunks = 0
        self.pins = 0  # over all chunks; equals the pins of open plans and loads
        self.lease_count = 0
        # By the owner's instance and request, in the order of deadlines. OrderedDict finds its first item
        # at once, however many items before it were removed.
        self._leases: dict[str, OrderedDict[str, Lease]] = {}
        self._garbage: deque[Namespace] = deque()  # cleared namespaces; a freed chunk is removed from its namespace
        self._freed_next: Chunk | None = None  # if it is of the first of these
        self._ownerless: list[OrderedDict[str, Lease]] = []  # leases of disconnected instances
        self._expired_before = 0.0
        self._expiring: list[str] = []  # instances whose leases may have expired before _expired_before
        self._evicted_keys = EvictedKeys()

    # ---- lookup and leases --------------------------------------------------------------------

    def lookup(self, namespace_id: bytes, keys: bytes, owner: Owner, deadline: float) -> LookupOutcome:
        """Find the greatest boundary of a hit; `owner` leases what a load up to it needs until `deadline`.

        A second lookup of an owner replaces its first lease. REQUIRES: deadlines of one instance never decrease.
        """
        namespace = self.index.find_namespace(namespace_id)
        leased, hits, full_chunks = _lease(namespace, keys) if namespace is not None else ([], 0, 0)
        self.end_lease(owner)
        if leased:
            instance_id, request_id = owner
            self._leases.setdefault(instance_id, OrderedDict())[request_id] = Lease(deadline, leased)
            self.lease_count += 1
        chunks = len(keys) // KEY_BYTES
        if hits == chunks:
            return LookupOutcome(chunks, hits, full_chunks=full_chunks)
        missed: Counter[MissReason] = Counter()
        if full_chunks > hits:
            missed[MissReason.NO_BOUNDARY] = full_chunks - hits
        if full_chunks < chunks:
            missed.update(self._why_missed(namespace_id, keys, full_chunks))
        missing_key = keys[hits * KEY_BYTES : (hits + 1) * KEY_BYTES]
        elsewhere = next(iter(missed)) is MissReason.OTHER_NAMESPACE
        other = self._namespace_with(missing_key) if elsewhere else b""
        return LookupOutcome(chunks, hits, tuple(missed.items()), missing_key, other, full_chunks=full_chunks)

    def has_tails(self, namespace_id: bytes) -> bool:
        return self.index.find_namespace(tails_of(namespace_id)) is not None

    def lookup_tail(self, namespace_id: bytes, keys: bytes, owner: Owner, deadline: float) -> int:
        """How many of these blocks, from the first on, can be loaded; `owner` leases them beside what its lookup() found.

        REQUIRES: as lookup().
        """
        namespace = self.index.find_namespace(tails_of(namespace_id))
        blocks, hits, _ = _lease(namespace, keys) if namespace is not None else ([], 0, 0)
        if blocks:
            instance_id, request_id = owner
            leases = self._leases.setdefault(instance_id, OrderedDict())
            if (lease := leases.get(request_id)) is not None:
                lease.chunks += blocks
            else:
                leases[request_id] = Lease(deadline, blocks)
                self.lease_count += 1
        return hits

    def _why_missed(self, namespace_id: bytes, keys: bytes, first: int) -> Counter[MissReason]:
        """The chunks from key number `first` on, counted by miss reason; the reason of chunk `first` is the first item.

        REQUIRES: not all full groups have chunk `first`.

        A READY chunk behind a hole has the hole's reason. The first chunk that was never stored and all chunks after it
        have the reason NEVER_STORED: a larger L1 would not have made them hits. Of more than _MISSES_EXAMINED chunks
        every n-th is examined, for itself and for the chunks up to the next one examined.
        """
        total = len(keys) // KEY_BYTES
        step = -(-(total - first) // _MISSES_EXAMINED)
        namespace = self.index.find_namespace(namespace_id)
        full = namespace.groups.full if namespace is not None else 0
        found: Counter[MissReason] = Counter()
        reason = MissReason.NEVER_STORED
        for position in range(first, total, step):
            key = keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
            chunk = namespace.chunks.get(key) if namespace is not None else None
            if chunk is None:
                reason = self._why_absent(namespace_id, key)
            elif chunk.ready & full != full:
                reason = MissReason.FILLING
            if reason is MissReason.NEVER_STORED:
                found[reason] += total - position
                break
            found[reason] += min(step, total - position)
        return found

    def _why_absent(self, namespace_id: bytes, key: bytes) -> MissReason:
        if (namespace_id, key) in self._evicted_keys:
            return MissReason.EVICTED
        return MissReason.OTHER_NAMESPACE if self._namespace_with(key) else MissReason.NEVER_STORED

    def _namespace_with(self, key: bytes) -> bytes:
        """The id of a namespace that has the key; b"" if none of the searched namespaces has it."""
        return self.index.namespace_with(key, _NAMESPACES_SEARCHED)

    def end_lease(self, owner: Owner) -> None:
        instance_id, request_id = owner
        leases = self._leases.get(instance_id)
        lease = leases.pop(request_id, None) if leases else None
        if lease is not None:
            self._end_lease(lease)

    def expire_leases(self, now: float) -> None:
        """Leases whose deadline has passed count as ended; step() ends them."""
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
        groups: Groups,
        keys: bytes,
        slot_bytes: int,
        *,
        group: int = 0,
        slots: range = _FIRST_SLOT,
        places: range | None = None,
        steps: int = sys.maxsize,
        model_name: str = "",
        after: tuple[bytes, bytes] | None = None,
    ) -> StorePlan:
        """Allocate slots for the objects of `group` of which none of these slots is there yet, and pin their chunks.

        `after`: of a tail, (namespace id, key) of the chunk before it. `slots` are the numbers of one rank's slot in each chunk,
        or of all ranks' slots; `places` where the keys are among those that all ranks store
        together, if not from 0 on. Pair with finish_store().

        Objects that are resident or that another store fills are skipped (duplicate stores merge). `no_space` counts the
        first object that cannot fit, and all objects after it. An object cannot fit if L1 is too small for all ranks' bytes
        of it and of the objects before it, or if no further chunk may be evicted. KVServerError(TOO_LARGE) if L1 is too
        small for one slot. A plan that is not `complete` after `steps` steps is continued by extend_plan().
        """
        pages = self.pool.pages_for(slot_bytes)
        if pages > self.pool.pages:
            raise KVServerError(
                ErrorCode.TOO_LARGE,
                f"a chunk of {slot_bytes} bytes needs {pages} pages of {self.pool.page_bytes} bytes, L1 has "
                f"{self.pool.pages}; raise --l1-size",
            )
        count = len(keys) // KEY_BYTES
        places, room = places or range(count), max(1, self.pool.pages // (pages * groups.slots[group]))
        fitting = len(range(places.start, min(places.stop, room), places.step))
        plan = StorePlan(
            group, slots, groups, namespace_id, model_name, keys[: fitting * KEY_BYTES], pages,
            complete=False, after=after,
        )  # fmt: skip
        plan.no_space = count - fitting
        plan.found = [chunk for chunk in self.index.find_chunks(namespace_id, plan.keys) if chunk is not None]
        self.pin_chunks(plan.found)
        self.extend_plan(plan, steps)
        return plan

    def extend_plan(self, plan: StorePlan, steps: int) -> None:
        """Continue planning for at most `steps` steps; `plan.steps` is the steps that remain. REQUIRES: not complete.

        Each call may add to `evicted`. The index may change in any way between two calls.
        """
        plan.steps = steps
        namespace = self.index.find_or_make_namespace(plan.namespace_id, plan.groups, plan.model_name)
        first = len(plan.prefix)
        for position, (key,) in enumerate(split_keys(plan.keys[first * KEY_BYTES :]), first):
            if plan.steps <= 0:
                return
            chunk = namespace.chunks.get(key)
            if chunk is not None and any(map(chunk.has_slot, plan.slots)):
                plan.steps -= 1
                plan.prefix.append(chunk)
                plan.skipped += 1
                continue
            if chunk is not None:
                chunk.pins += 1  # it may have been added after planning began, then `found` does not pin it
            slots = self._allocate_slots(plan)
            if slots is None:
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
            for number, slot in zip(plan.slots, slots, strict=True):
                chunk.set_slot(number, slot)
            namespace.model.pages += plan.pages * len(plan.slots)
            self.pins += 1
            plan.steps -= 1
            plan.prefix.append(chunk)
            plan.chunks.append(chunk)
            plan.positions.append(position)
        self._complete_plan(plan)

    def finish_store(self, plan: StorePlan, copied: bool, failed: Collection[int] = ()) -> int:
        """Publish the plan's objects if `copied` (every byte of the plan's slots was copied), else free their slots.

        `failed`: the places in `plan.chunks` whose object was not copied although others were. Returns the number of objects
        that became READY; `plan.ready` has their chunks. REQUIRES: complete, or not copied.
        """
        if not plan.complete:
            self._complete_plan(plan)
        bits, mask = sum([1 << number for number in plan.slots]), plan.groups.masks[plan.group]
        for place, chunk in enumerate(plan.chunks):
            chunk.pins -= 1
            self.pins -= 1
            if copied and not chunk.detached and place not in failed:
                chunk.done |= bits
                if chunk.done & mask == mask:
                    chunk.ready |= 1 << plan.group
                    plan.ready.append(chunk)
            else:
                for number in plan.slots:
                    self.pool.free_pages(chunk.slot(number))
                    chunk.set_slot(number, b"")
                chunk.namespace.model.pages -= plan.pages * len(plan.slots)
                if not chunk.detached and chunk.empty:
                    self.index.detach_chunk(chunk)
        self._free_or_track(*reversed(plan.prefix), before=self._chunk_before(plan))
        return len(plan.ready)

    def has_objects(self, namespace_id: bytes, group: int, keys: bytes) -> bool:
        """Whether the group's objects of all keys are READY."""
        namespace = self.index.find_namespace(namespace_id)
        found = namespace.chunks.find(keys) if namespace is not None else [None]
        return all(chunk is not None and chunk.ready >> group & 1 for chunk in found)

    def drop_objects(self, namespace_id: bytes, group: int, keys: bytes) -> bytes:
        """Free objects that no kept boundary needs any more, but none of a chunk that is leased or pinned.

        Returns the keys of those that were freed.
        """
        dropped = []
        for chunk in self.index.find_chunks(namespace_id, keys):
            if chunk is None or not chunk.ready >> group & 1 or chunk.leases or chunk.pins:
                continue
            slots = chunk.remove_object(group)
            self.pool.free_pages(slots)
            chunk.namespace.model.pages -= page_count(slots)
            if not chunk.done:
                self.index.detach_chunk(chunk)
                self._free_chunk(chunk)
            dropped.append(chunk.key)
        return b"".join(dropped)

    # ---- load ---------------------------------------------------------------------------------

    def plan_load(self, namespace_id: bytes, keys: bytes, group: int = 0) -> list[Chunk]:
        """Pin the chunks of `keys` for reading the group's objects. Pair with finish_load().

        KVServerError(NOT_FOUND), and no pin, unless all objects are READY now; a lease does not guarantee it.
        """
        found = self.index.find_chunks(namespace_id, keys)
        chunks = [chunk for chunk in found if chunk is not None and chunk.ready >> group & 1]
        if len(chunks) != len(found):
            raise KVServerError(ErrorCode.NOT_FOUND, f"{len(found) - len(chunks)} of {len(found)} chunks are not READY")
        self.pin_chunks(chunks)
        return chunks

    def finish_load(self, chunks: list[Chunk], copied: bool) -> None:
        """Unpin the chunks. `copied`: every byte of this rank was copied."""
        for chunk in chunks:
            chunk.pins -= 1
            chunk.loaded |= copied
        self.pins -= len(chunks)
        self._free_or_track(*reversed(chunks))

    def pin_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Keep the chunks' pages until unpin_chunks(): they are read, by no engine."""
        for chunk in chunks:
            chunk.pins += 1
        self.pins += len(chunks)

    def unpin_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Unlike finish_load(), it leaves the chunks as old as they are."""
        self.pins -= len(chunks)
        for chunk in chunks:
            chunk.pins -= 1
            if chunk.detached or not self.policy.tracks(chunk):
                self._free_or_track(chunk)

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

    # ---- deferred work ------------------------------------------------------------------------

    def step(self, limit: int = SLICE) -> bool:
        """Free or unlease about `limit` chunks, or end one lease that has more. True while work remains."""
        while limit > 0 and (done := self._free_one_chunk() or self._end_one_lease()):
            limit -= done
        return limit <= 0

    def _free_one_chunk(self) -> int:
        """Free one cleared chunk. Returns 1, or 0 if none is left.

        Neighbours in the order of eviction come one after the other: most are neighbours in L1, whose pages merge when
        they are freed. In any other order the pool would keep an extent for every few chunks meanwhile.
        """
        while self._garbage:
            namespace = self._garbage[0]
            if namespace.chunks:
                chunk = self._freed_next
                if chunk is None or chunk.namespace is not namespace or namespace.chunks.get(chunk.key) is None:
                    chunk = namespace.chunks.pop()  # one that was removed while it is read may still be followed
                else:
                    namespace.chunks.remove(chunk.key)
                self._freed_next = self.policy.younger(chunk)
                self._free_or_track(chunk)
                return 1
            self._garbage.popleft()
        self._freed_next = None
        return 0

    def _end_one_lease(self) -> int:
        """End one lease that counts as ended, or drop one instance without such leases.

        Returns the number of chunks or instances handled; 0 if none is left.
        """
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

    # ---- accounting ---------------------------------------------------------------------------

    def audit(self) -> None:
        """Count chunks, pages, leases and pins, and compare with the counters. AssertionError names the wrong one.

        REQUIRES: no deferred work is left. Costs a walk over all chunks: for tests and idle moments.
        """
        assert not self._garbage, "free the cleared chunks first"
        assert not self._ownerless, "end the leases of disconnected instances first"
        leases = pins = 0
        chunks: Counter[ModelUse] = Counter()
        tails: Counter[ModelUse] = Counter()
        pages: Counter[ModelUse] = Counter()
        for chunk in self.index:
            (tails if chunk.namespace.groups.tails else chunks)[chunk.namespace.model] += 1
            pages[chunk.namespace.model] += chunk.page_count
            leases += chunk.leases
            pins += chunk.pins
            masks = chunk.namespace.groups.masks
            ready = sum(1 << group for group, mask in enumerate(masks) if chunk.done & mask == mask)
            assert chunk.ready == ready, "READY without every rank's bytes, or the reverse"
            assert chunk.leases or chunk.pins or self.policy.tracks(chunk), "an idle chunk that eviction cannot find"
        count = chunks.total()
        assert count == self.index.chunk_count, f"{count} chunks, the index counts {self.index.chunk_count}"
        models = self.index.models
        assert tails.total() == self.index.tail_blocks, (
            f"{tails.total()} blocks of tails, {self.index.tail_blocks} counted"
        )
        assert all(tails[model] == model.tail_blocks for model in models.values()), (
            "a model's tails are counted wrongly"
        )
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
        self.policy.track(reversed(lease.chunks))  # a detached chunk is freed by step(), leased or not
        self.lease_count -= 1

    def _complete_plan(self, plan: StorePlan) -> None:
        """Unpin all chunks but those that the plan fills."""
        plan.complete = True
        for chunk in plan.found:
            chunk.pins -= 1
        self.pins -= len(plan.found)
        self._free_or_track(*reversed(plan.found), *reversed(plan.prefix), before=self._chunk_before(plan))

    def _chunk_before(self, plan: StorePlan) -> Chunk | None:
        """The chunk that the plan's blocks follow, which is useful without them."""
        namespace = self.index.find_namespace(plan.after[0]) if plan.after is not None else None
        return namespace.chunks.get(plan.after[1]) if namespace is not None and plan.after is not None else None

    def _free_or_track(self, *chunks: Chunk, before: Chunk | None = None) -> None:
        """After a pin ended: free detached chunks, make the others the youngest, in this order, or older than `before`."""
        for chunk in chunks:
            if chunk.detached and not chunk.pins:
                self._free_chunk(chunk)
        self.policy.track(chunks, before)

    def _free_chunk(self, chunk: Chunk) -> int:
        """Free the pages of all ranks' slots. Returns their number."""
        slots = chunk.remove_slots()
        self.pool.free_pages(slots)
        pages = page_count(slots)
        chunk.namespace.model.pages -= pages
        chunk.ready = 0
        self.policy.untrack(chunk)
        return pages

    def _allocate_slots(self, plan: StorePlan) -> list[bytes] | None:
        """All of one chunk's slots, or None and none."""
        slots: list[bytes] = []
        while len(slots) < len(plan.slots):
            slot = self._allocate_slot(plan)
            if slot is None:
                for allocated in slots:
                    self.pool.free_pages(allocated)
                return None
            slots.append(slot)
        return slots

    def _allocate_slot(self, plan: StorePlan) -> bytes | None:
        """One slot of one chunk, evicting as needed. None if `plan.steps` are used up or no chunk may be evicted."""
        while (slot := self.pool.allocate_pages(plan.pages)) is None:
            if plan.steps <= 0:
                return None
            if done := self._free_one_chunk():
                plan.steps -= done
                continue
            chunk = self.policy.pop_chunk()
            if chunk is not None:
                plan.steps -= 1
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
        if chunk.namespace.groups.tails:
            self.evicted_tail_blocks += 1  # no event, for none announced the block
            self.evicted_pages += self._free_chunk(chunk)
            return
        self.evicted_chunks += 1
        chunk.namespace.model.evicted_chunks += 1
        chunk.namespace.model.never_loaded_chunks += bool(chunk.ready) and not chunk.loaded
        self.evicted_pages += self._free_chunk(chunk)
        plan.evicted.append((chunk.namespace.id, chunk.key))
        self._evicted_keys.add(chunk.namespace.id, chunk.key, self.index.chunk_count)
