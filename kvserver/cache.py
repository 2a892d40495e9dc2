"""The decisions of L1: which slots a store fills, which chunks a load reads, who is evicted.

Owns: index, pool, eviction policy and leases, and the rules between them. Refuses to know: sockets,
clocks (callers pass the time), memory addresses; it does no I/O and copies nothing. One thread.

Rules kept here:
- Only a READY chunk is found, and READY means every rank's bytes were copied whole.
- Leased, pinned (being filled or read) chunks are not evicted; incomplete ones nobody fills go first.
- Clear and eviction detach at once; pages are freed when the last pin is gone.
- Within one request later chunks age faster than earlier ones: a prefix without its start is useless.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from kvserver.errors import ErrorCode, KVServerError
from kvserver.eviction import EvictionPolicy
from kvserver.index import Chunk, Index
from kvserver.misses import EvictedKeys, MissReason
from kvserver.pool import PagePool
from kvserver.protocol import KEY_BYTES

Owner: TypeAlias = tuple[str, str]  # (instance id, request id)
FREE_SLICE = 256  # detached chunks freed per loop turn
_NAMESPACES_ASKED = 64  # for a chunk that a lookup missed


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
    prefix: list[Chunk] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ready: list[Chunk] = field(default_factory=list)
    evicted: list[tuple[bytes, bytes]] = field(default_factory=list)
    skipped: int = 0
    starved: int = 0


class Cache:
    def __init__(self, pool: PagePool, policy: EvictionPolicy) -> None:
        self.pool = pool
        self.policy = policy
        self.index = Index()
        self.evicted_chunks = 0
        self.evicted_pages = 0
        self.cleared_chunks = 0
        self.pins = 0  # over all chunks; equals what open plans hold
        self._leases: dict[Owner, Lease] = {}
        self._garbage: deque[Iterator[Chunk]] = deque()
        self._evicted_keys = EvictedKeys()
        self._tick = 0

    # ---- lookup and leases --------------------------------------------------------------------

    def lookup(self, namespace_id: bytes, keys: bytes, owner: Owner, deadline: float) -> int:
        """How many chunks from the first on are READY; `owner` leases them until `deadline`.

        A second lookup of an owner replaces its first.
        """
        found: list[Chunk] = []
        namespace = self.index.find(namespace_id)
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
            self._leases[owner] = Lease(deadline, found)
        return len(found)

    def why_missed(self, namespace_id: bytes, key: bytes) -> MissReason:
        """REQUIRES: the chunk is not READY there."""
        namespace = self.index.find(namespace_id)
        if namespace is not None and key in namespace.chunks:
            return MissReason.FILLING
        if (namespace_id, key) in self._evicted_keys:
            return MissReason.EVICTED
        return MissReason.OTHER_NAMESPACE if self.index.holds(key, _NAMESPACES_ASKED) else MissReason.NEVER_STORED

    def end_lease(self, owner: Owner) -> None:
        lease = self._leases.pop(owner, None)
        if lease is None:
            return
        tick = self._tick
        for chunk in reversed(lease.chunks):  # as _use() and _settle() do, which as calls would take twice the time
            if chunk.ready:
                tick += 1
                chunk.last_used = tick
            chunk.leases -= 1
            if not (chunk.leases or chunk.queued):
                self._settle(chunk)
        self._tick = tick

    def expire_leases(self, now: float) -> int:
        expired = [owner for owner, lease in self._leases.items() if lease.deadline <= now]
        for owner in expired:
            self.end_lease(owner)
        return len(expired)

    def end_leases_of(self, holder: str) -> None:
        """End every lease whose owner is (holder, ...)."""
        for owner in [owner for owner in self._leases if owner[0] == holder]:
            self.end_lease(owner)

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    # ---- store --------------------------------------------------------------------------------

    def plan_store(self, namespace_id: bytes, world_size: int, rank: int, keys: bytes, slot_bytes: int) -> StorePlan:
        """Reserve slots for the chunks that this rank still misses; pins them. Pair with finish_store.

        Chunks that are there or on their way are skipped (duplicate stores merge). When L1 has no room
        that may be taken, the rest is starved. KVServerError(TOO_LARGE) if L1 could never hold it.
        """
        pages = self.pool.pages_for(slot_bytes)
        count = len(keys) // KEY_BYTES
        if pages * count > self.pool.pages:
            raise KVServerError(
                ErrorCode.TOO_LARGE,
                f"a store of {count} chunks of {slot_bytes} bytes needs {pages * count} pages of "
                f"{self.pool.page_bytes} bytes, L1 has {self.pool.pages}; raise --l1-size",
            )
        namespace = self.index.find_or_make(namespace_id, world_size)
        plan = StorePlan(rank)
        bit = 1 << rank
        for position, (key,) in enumerate(split_keys(keys)):
            chunk = namespace.chunks.get(key)
            if chunk is not None and (chunk.done | chunk.filling) & bit:
                self._use([chunk])  # so that the room for later chunks is taken elsewhere
                plan.prefix.append(chunk)
                plan.skipped += 1
                continue
            if chunk is not None:
                chunk.pins += 1  # making room must not evict the chunk that needs it
            slot = self._take(pages, plan)
            if chunk is not None:
                chunk.pins -= 1
            if slot is None:
                plan.starved = count - position
                if chunk is not None:
                    self._settle(chunk)
                break
            if chunk is None:
                chunk = self.index.add(namespace, key)
            chunk.put_slot(rank, slot)
            chunk.filling |= bit
            chunk.pins += 1
            self.pins += 1
            plan.prefix.append(chunk)
            plan.chunks.append(chunk)
            plan.positions.append(position)
        self._use(plan.prefix)
        return plan

    def finish_store(self, plan: StorePlan, copied: bool) -> int:
        """Publish the plan's chunks if `copied` (every byte of this rank), else give their slots back.

        Returns how many became READY; they are in `plan.ready`.
        """
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
                self.pool.give(chunk.slot(plan.rank))
                chunk.put_slot(plan.rank, b"")
                if not chunk.detached and not chunk.done and not chunk.filling:
                    self.index.remove(chunk)
        self._use(plan.prefix)
        for chunk in plan.chunks:
            self._settle(chunk)
        return len(plan.ready)

    # ---- load ---------------------------------------------------------------------------------

    def plan_load(self, namespace_id: bytes, keys: bytes) -> list[Chunk]:
        """Pin the chunks of `keys` for reading. Pair with finish_load.

        KVServerError(NOT_FOUND) and nothing pinned unless all are READY now, whatever a lease said.
        """
        namespace = self.index.find(namespace_id)
        known = namespace.chunks if namespace is not None else {}
        found = [known.get(key) for (key,) in split_keys(keys)]
        chunks = [chunk for chunk in found if chunk is not None and chunk.ready]
        if len(chunks) != len(found):
            raise KVServerError(ErrorCode.NOT_FOUND, f"{len(found) - len(chunks)} of {len(found)} chunks are not READY")
        for chunk in chunks:
            chunk.pins += 1
        self.pins += len(chunks)
        return chunks

    def finish_load(self, chunks: list[Chunk]) -> None:
        self._use(chunks)
        for chunk in chunks:
            chunk.pins -= 1
            self._settle(chunk)
        self.pins -= len(chunks)

    # ---- clear --------------------------------------------------------------------------------

    def clear(self, base: bytes = b"") -> int:
        """Detach all chunks of the namespaces that begin with `base`; their pages are freed by free_garbage()."""
        before = self.index.chunk_count
        for id in self.index.ids():
            namespace = self.index.clear(id) if id.startswith(base) else None
            if namespace is not None:
                self._garbage.append(iter(namespace.chunks.values()))
        if self.index.chunk_count == 0:
            self.policy.reset()
        cleared = before - self.index.chunk_count
        self.cleared_chunks += cleared
        return cleared

    def free_garbage(self, limit: int = FREE_SLICE) -> bool:
        """Free up to `limit` detached chunks; True while more are left."""
        while self._garbage and limit > 0:
            chunk = next(self._garbage[0], None)
            if chunk is None:
                self._garbage.popleft()
                continue
            self._settle(chunk)
            limit -= 1
        return bool(self._garbage)

    # ---- the books ----------------------------------------------------------------------------

    def audit(self) -> None:
        """Count everything again and compare. AssertionError names the book that does not balance.

        REQUIRES: no garbage is left. Costs a walk over all chunks: for tests and idle moments.
        """
        assert not self._garbage, "free the garbage first"
        pages = leases = pins = chunks = 0
        for chunk in self.index:
            chunks += 1
            pages += chunk.page_count
            leases += chunk.leases
            pins += chunk.pins
            full = (1 << chunk.namespace.world_size) - 1
            assert chunk.ready == (chunk.done == full), "READY without every rank's bytes, or the reverse"
            held = bool(chunk.leases or chunk.pins)
            assert held or chunk.queued, "an idle chunk that eviction cannot find"
        assert chunks == self.index.chunk_count, f"{chunks} chunks, index says {self.index.chunk_count}"
        in_leases = sum(not chunk.detached for lease in self._leases.values() for chunk in lease.chunks)
        assert leases == in_leases, f"chunks count {leases} leases, leases hold {in_leases} chunks"
        assert pins <= self.pins, f"chunks count {pins} pins, open plans {self.pins}"
        if self.pins == 0:
            assert pages == self.pool.used_pages, f"chunks hold {pages} pages, {self.pool.used_pages} are used"

    # ---- inside -------------------------------------------------------------------------------

    def _use(self, prefix: list[Chunk]) -> None:
        """The chunks of one request were used: the first becomes the youngest. Incomplete ones stay first to go."""
        for chunk in reversed(prefix):
            if chunk.ready:
                self._tick += 1
                chunk.last_used = self._tick

    def _settle(self, chunk: Chunk) -> None:
        """Something let go of the chunk: free it if detached, else let eviction see it."""
        if chunk.pins:
            return
        if chunk.detached:
            self._free(chunk)
        elif not chunk.leases and not chunk.queued:
            self.policy.track(chunk)

    def _free(self, chunk: Chunk) -> None:
        self.pool.give(chunk.take_slots())
        chunk.ready = False
        if chunk.queued:
            self.policy.forget(chunk)

    def _take(self, pages: int, plan: StorePlan) -> bytes | None:
        """Pages for one slot, evicting as needed for the plan; None when nothing more may be evicted."""
        while (slot := self.pool.take(pages)) is None:
            if self._garbage:
                self.free_garbage(1)
                continue
            victim = self.policy.victim()
            if victim is None:
                return None
            self.index.remove(victim)
            self.evicted_chunks += 1
            self.evicted_pages += victim.page_count
            self._free(victim)
            plan.evicted.append((victim.namespace.id, victim.key))
            self._evicted_keys.add(victim.namespace.id, victim.key)
        return slot
