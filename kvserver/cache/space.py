"""The memory of L1: which chunks have it, and which must leave so that others get it.

Owns: index, pool, eviction policy, shares, pins, leases, protections and cleared chunks, and the counts of evictions. Refuses to know: what a
store plans (`store_plans`) and what a lookup finds (`cache`).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType

from kvserver.cache.chunk import Chunk, ModelUse, Namespace
from kvserver.cache.eviction import EvictionPolicy
from kvserver.cache.index import ChunkRows, Index
from kvserver.cache.leases import Leases
from kvserver.cache.misses import EvictedKeys
from kvserver.cache.pages import PagePool, page_count
from kvserver.cache.protections import ProtectionEnd, Protections
from kvserver.cache.sessions import Sessions
from kvserver.cache.shares import Shares
from kvserver.cache.store_plan import StorePlan
from kvserver.protocol import Durability

SLICE = 256  # chunks that one step() frees or unleases
_EVICTION_STEPS = 3  # steps of one eviction, beside the step of looking at the chunk
NO_SHARES: Mapping[str, Decimal] = MappingProxyType({})


class Space:
    def __init__(self, pool: PagePool, policy: EvictionPolicy, shares: Mapping[str, Decimal] = NO_SHARES) -> None:
        self.pool = pool
        self.policy = policy
        self.index = Index(policy.make_chunk)
        self.leases = Leases(self._used)
        self.sessions = Sessions(lambda: self.index.chunk_count)
        share_pages = {self.index.owner_of_share(name): int(share * pool.pages) for name, share in shares.items()}
        self._shares = Shares(share_pages)
        self.protections = Protections(pool.pages, share_pages, policy)
        self.evicted_chunks = 0
        self.evicted_pages = 0
        self.cleared_chunks = 0
        self.other_tenants = 0  # stores and fills that named a tenant without a share
        self.pins = 0  # over all chunks; equals the pins of open plans and loads
        self._garbage: deque[Namespace] = deque()  # cleared namespaces; a freed chunk is removed from its namespace
        self._freed_next: Chunk | None = None  # if it is of the first of these
        self.evicted_keys = EvictedKeys()

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
            if chunk.detached or not (chunk.leases or self.policy.tracks(chunk)):
                self.free_or_track(chunk)

    def clear_namespaces(self, base: bytes = b"") -> int:
        """Detach all chunks of the namespaces that begin with `base`; step() frees their pages."""
        before = self.index.chunk_count
        self.protections.end_in(lambda id: id.startswith(base), ProtectionEnd.CLEARED)
        for id in self.index.namespace_ids():
            namespace = self.index.detach_namespace(id) if id.startswith(base) else None
            if namespace is not None:
                self._garbage.append(namespace)
        cleared = before - self.index.chunk_count
        self.cleared_chunks += cleared
        return cleared

    def kept_by_a_restart(self) -> list[tuple[list[Chunk], bool]]:
        """READY chunks of namespaces that a later start of an engine can find, the next to evict last; True: the policy protects these.

        Deferred work is done first, and no chunk is protected any more. REQUIRES: nothing is filled or read.
        """
        self.protections.release_all()
        while self.step(sys.maxsize):
            pass
        durable = {
            part
            for each in self.index.namespaces()
            for part in (each, *each.parts.values())
            if each.durability is not Durability.PROCESS
        }
        order = [*self.policy.youngest_first(), (self._shares.spared(), False)]
        return [([c for c in chunks if c.ready and c.namespace in durable], protected) for chunks, protected in order]

    def adopt_chunks(
        self, namespace: Namespace, wanted: bytes, rows: ChunkRows, ready: int, protected: bool, tenant: str = ""
    ) -> list[Chunk | None]:
        """Chunks of an earlier daemon, in withheld pages: make each wanted one whose key is absent the oldest, in this order.

        None for the other rows. `tenant`: their owner, if it has a share.
        """
        done = sum(mask for group, mask in enumerate(namespace.groups.masks) if ready >> group & 1)
        part = namespace.part(self.index.tenants.get(tenant))
        added = self.index.add_rows(namespace, wanted, rows, done, ready, part)
        chunks = [chunk for chunk in added if chunk is not None]
        whole = len(chunks) == len(added)
        slots = rows.extents if whole else b"".join([chunk.joined_slots for chunk in chunks])
        part.owner.pages += self.pool.use_withheld(slots)
        self.policy.append(chunks, protected)
        self.protections.arrived(chunks)
        return added

    @property
    def has_garbage(self) -> bool:
        """Cleared chunks wait to be freed."""
        return bool(self._garbage)

    # ---- deferred work ------------------------------------------------------------------------

    def step(self, limit: int = SLICE) -> bool:
        """Free or unlease about `limit` chunks, or end one lease that has more. True while work remains."""
        while limit > 0 and (done := self._free_one_chunk() or self._end_one_claim()):
            limit -= done
        return limit <= 0

    def _end_one_claim(self) -> int:
        """End a lease or a protection that counts as ended, as Leases.end_one()."""
        return self.leases.end_one() or self.protections.end_one()

    def _free_one_chunk(self) -> int:
        """Free one cleared chunk. Returns 1, or 0 if none is left.

        Neighbours in the order of eviction come one after the other: most are neighbours in L1, whose pages merge when
        they are freed. In any other order the pool would keep an extent for every few chunks meanwhile.
        """
        while self._garbage:
            namespace = self._garbage[0]
            if namespace.chunks:
                chunk = self._freed_next
                if (
                    chunk is None
                    or chunk.namespace.chunks is not namespace.chunks
                    or namespace.chunks.get(chunk.key) is None
                ):
                    chunk = namespace.chunks.pop()  # one that was removed while it is read may still be followed
                else:
                    namespace.chunks.remove(chunk.key)
                self._freed_next = self.policy.younger(chunk)
                self.free_or_track(chunk)
                return 1
            self._garbage.popleft()
        self._freed_next = None
        return 0

    # ---- free, allocate, evict ----------------------------------------------------------------

    def free_or_track(self, *chunks: Chunk, before: Chunk | None = None) -> None:
        """Free the detached ones of chunks whose pin ended; make the others the youngest, in this order, or older than `before`."""
        for chunk in chunks:
            if chunk.detached and not chunk.pins:
                self._free_chunk(chunk)
        lent = self.protections.lend(chunks)
        self.policy.track(chunks, before)
        self.protections.take_back(lent)

    def _used(self, chunks: Sequence[Chunk]) -> None:
        """A request that had found the chunks ended: the first one is the youngest."""
        lent = self.protections.lend(chunks)
        self.policy.use(reversed(chunks))
        self.protections.take_back(lent)

    def _free_chunk(self, chunk: Chunk) -> int:
        """Free the pages of all ranks' slots. Returns their number."""
        self.sessions.disown(chunk)
        slots = chunk.remove_slots()
        self.pool.free_pages(slots)
        pages = page_count(slots)
        chunk.namespace.owner.pages -= pages
        chunk.ready = 0
        self.policy.untrack(chunk)
        return pages

    def allocate_slots(self, plan: StorePlan, owner: ModelUse) -> list[bytes] | None:
        """All of one chunk's slots, or None and none."""
        slots: list[bytes] = []
        while len(slots) < len(plan.slots):
            slot = self._allocate_slot(plan, owner)
            if slot is None:
                for allocated in slots:
                    self.pool.free_pages(allocated)
                return None
            slots.append(slot)
        return slots

    def _allocate_slot(self, plan: StorePlan, owner: ModelUse) -> bytes | None:
        """Allocate one slot of one chunk, evicting as needed. None if `plan.steps` are used up or no chunk may be evicted."""
        while (slot := self.pool.allocate_pages(plan.pages)) is None:
            if plan.steps <= 0:
                return None
            if done := self._free_one_chunk():
                plan.steps -= done
                continue
            chunk = self.policy.pop_incomplete() or self._shares.pop_released() or self._pop_chunk()
            if chunk is None:
                if done := self._end_one_claim():
                    plan.steps -= done
                    continue
                chunk = self._shares.pop_own(owner)
                if chunk is None:
                    plan.full = True
                    return None
            elif self._shares.spares(chunk, first=chunk.session is not None and chunk.session.deleted):
                plan.steps -= 1
                continue
            plan.steps -= 1
            if not (chunk.leases or chunk.pins):
                plan.steps -= _EVICTION_STEPS
                self._evict_chunk(chunk, plan)
            else:
                self.protections.pass_over(chunk)
        return slot

    def _pop_chunk(self) -> Chunk | None:
        """The READY chunk to evict next, of those that no share spares: what only deleted sessions used first."""
        if self.sessions.leaving and (chunk := self.sessions.pop_leaving()) is not None:
            self.policy.untrack(chunk)
            return chunk
        return self.policy.pop_chunk()

    def _evict_chunk(self, chunk: Chunk, plan: StorePlan) -> None:
        self.index.detach_chunk(chunk)
        if chunk.namespace.groups.tails:
            plan.evicted_tails.append((chunk.namespace, chunk.key))
            self.evicted_pages += self._free_chunk(chunk)
            return
        self.evicted_chunks += 1
        chunk.namespace.owner.evicted_chunks += 1
        chunk.namespace.owner.never_loaded_chunks += bool(chunk.ready) and not chunk.loaded
        pages = self._free_chunk(chunk)
        self.evicted_pages += pages
        self.protections.evicted((chunk.namespace.id, chunk.key), pages)
        plan.evicted.append((chunk.namespace.id, chunk.key))
        self.evicted_keys.add(chunk.namespace.id, chunk.key, self.index.chunk_count)
