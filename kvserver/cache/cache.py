"""The decisions of L1: which slots a store fills, which chunks a load reads, which chunks are evicted.

Owns: index, pool, eviction policy, leases and protections, and the rules between them. Refuses to know: sockets, clocks (callers pass the
time), memory addresses. The cache does no I/O and copies nothing. One thread uses it.

Rules kept here:
- Lookups and loads find only READY objects. READY means that every rank's bytes were copied whole.
- Leased chunks and pinned chunks (being filled or read) are not evicted. Incomplete chunks that no store fills are evicted first.
- A chunk that an operator's pin names (`protections`) is leased as long as the pin lasts.
- Clear and eviction detach a chunk at once. The chunk's pages are freed when its last pin ends.
- Chunks that only deleted sessions used (`sessions`) are evicted before what the policy chooses, after incomplete ones.
- The last chunk of a prompt is stored block by block (a *tail*) in a namespace of its own, `tails_of()`, where each block is a
  chunk. The policy evicts a tail before the chunk that it follows. Tails are of no session.
- A chunk's objects of all groups age together and are evicted together, so no object strands those of another group.
- Within one request later chunks age faster than earlier chunks: a prefix without its start is useless. A store never evicts
  chunks that it stores or has found. If a prompt does not fit, the prefix that fits stays.
- The cost of a call grows with the chunks of its message, never with the chunks in L1. Longer work is deferred, and step() does
  it in slices: freeing cleared chunks, and ending the leases of disconnected engines and of requests that never ended.
  extend_plan() plans a store that must evict many chunks in slices. Deferred work counts as done: no store fails for lack of
  space that deferred work would free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal

from kvserver.cache.audit import audit
from kvserver.cache.chunk import Chunk, Namespace
from kvserver.cache.eviction import EvictionPolicy
from kvserver.cache.index import split_keys
from kvserver.cache.leases import Owner
from kvserver.cache.misses import LookupOutcome, MissReason
from kvserver.cache.namespace import tails_of
from kvserver.cache.pages import PagePool
from kvserver.cache.protections import Protection
from kvserver.cache.sessions import SessionKey, SessionRecord
from kvserver.cache.space import NO_SHARES, Space
from kvserver.cache.store_plans import StorePlans
from kvserver.protocol import KEY_BYTES, ErrorCode, KVServerError

_MISSES_EXAMINED = 128  # missing chunks of one lookup whose reason is determined
_NAMESPACES_SEARCHED = 64  # for each of these chunks
_BOUNDARIES_TRIED = 8  # of one protection: without full attention the last ones need about the same number of chunks


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


def _unlease(chunks: Iterable[Chunk]) -> None:
    """REQUIRES: no eviction since _lease()."""
    for chunk in chunks:
        chunk.leases -= 1


class Cache:
    """The face of L1. `shares`: the fraction of L1 that is kept for a model or tenant, by its name in --share; at most 1 together."""

    def __init__(self, pool: PagePool, policy: EvictionPolicy, shares: Mapping[str, Decimal] = NO_SHARES) -> None:
        self.space = space = Space(pool, policy, shares)
        self.pool, self.policy, self.index, self.leases = pool, policy, space.index, space.leases
        self.sessions, self.protections = space.sessions, space.protections
        self.pin_chunks, self.unpin_chunks = space.pin_chunks, space.unpin_chunks
        self.clear_namespaces, self.step = space.clear_namespaces, space.step
        self.kept_by_a_restart, self.adopt_chunks = space.kept_by_a_restart, space.adopt_chunks
        plans = StorePlans(space)
        self.plan_store, self.extend_plan = plans.plan_store, plans.extend_plan
        self.publish_part, self.finish_store = plans.publish_part, plans.finish_store
        self.has_objects, self.drop_objects = plans.has_objects, plans.drop_objects
        self.drop_incomplete = plans.drop_incomplete

    # ---- lookup and leases --------------------------------------------------------------------

    def lookup(
        self,
        namespace_id: bytes,
        keys: bytes,
        owner: Owner,
        deadline: float,
        session: SessionKey | None = None,
        *,
        shares: bool = True,
        now: float = 0.0,
    ) -> LookupOutcome:
        """Find the greatest boundary of a hit; `owner` leases what a load up to it needs until `deadline`.

        A second lookup of an owner replaces its first lease. `session`: the request's. A request without one shares what it finds for
        good, unless `shares` is False: who uses it is stated elsewhere. REQUIRES: deadlines of one instance never decrease.
        """
        namespace = self.index.find_namespace(namespace_id)
        leased, hits, full_chunks = _lease(namespace, keys) if namespace is not None else ([], 0, 0)
        user = self.leases.session_of(owner) if session is not None or not shares else None
        if session is not None:
            user = self.sessions.of_lookup(session, now, user)
        if shares and self.sessions.record_bytes:
            self.sessions.use(user, leased)
        self.leases.end(owner)
        if leased or user is not None:
            self.leases.add(owner, leased, deadline, user)
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

    def boundaries(self, namespace_id: bytes, keys: bytes) -> list[int]:
        """All boundaries at which a load of these chunks can end. REQUIRES: a lookup has found them, and nothing was evicted since."""
        namespace = self.index.find_namespace(namespace_id)
        return namespace.groups.boundaries(namespace.chunks.find(keys)) if namespace is not None and keys else []

    def has_tails(self, namespace_id: bytes) -> bool:
        return self.index.find_namespace(tails_of(namespace_id)) is not None

    def lookup_tail(self, namespace_id: bytes, keys: bytes, owner: Owner, deadline: float) -> int:
        """Number of these blocks, from the first on, that can be loaded. `owner` leases them beside what its lookup() found.

        REQUIRES: as lookup().
        """
        namespace = self.index.find_namespace(tails_of(namespace_id))
        blocks, hits, _ = _lease(namespace, keys) if namespace is not None else ([], 0, 0)
        if blocks:
            self.leases.add(owner, blocks, deadline)
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
                reason = self._why_absent(namespace_id, keys, position)
            elif chunk.ready & full != full:
                reason = MissReason.FILLING
            if reason is MissReason.NEVER_STORED:
                found[reason] += total - position
                break
            found[reason] += min(step, total - position)
        return found

    def _why_absent(self, namespace_id: bytes, keys: bytes, position: int) -> MissReason:
        """EvictedKeys loses some keys. One of which nothing else is known counts as the evicted chunk behind it."""
        key = keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
        if self.protections.displaced((namespace_id, key)):
            return MissReason.PINNED_OUT
        if (namespace_id, key) in self.space.evicted_keys:
            return MissReason.EVICTED
        if self._namespace_with(key):
            return MissReason.OTHER_NAMESPACE
        behind = keys[(position + 1) * KEY_BYTES : (position + 2) * KEY_BYTES]
        return MissReason.EVICTED if (namespace_id, behind) in self.space.evicted_keys else MissReason.NEVER_STORED

    def _namespace_with(self, key: bytes) -> bytes:
        """The id of a namespace that has the key; b"" if none of the searched namespaces has it."""
        return self.index.namespace_with(key, _NAMESPACES_SEARCHED)

    def end_lease(self, owner: Owner) -> None:
        """The request ended."""
        self.leases.end(owner)

    def expire_leases(self, now: float) -> None:
        """Leases and protections whose deadline has passed count as ended; step() ends them."""
        self.leases.expire(now)
        self.protections.expire(now)

    def end_leases_of(self, instance_id: str) -> None:
        """All of the instance's leases count as ended; step() ends them."""
        self.leases.end_of_instance(instance_id)

    @property
    def lease_count(self) -> int:
        return self.leases.count

    # ---- protections -----------------------------------------------------------------------------

    def protect(
        self,
        protection: Protection,
        keys: bytes,
        tails: Callable[[int], bytes],
        wanted: Callable[[int], bytes] = lambda _: b"",
    ) -> int:
        """Protect what a hit reads, up to the greatest boundary for which the bound has room, and begin the protection. Returns that boundary.

        `tails`: the keys of the blocks behind a number of chunks, which are protected too if all chunks are. `wanted`: the keys of further
        chunks, which L1 may lack, by the pages of the bound that are left; none is wanted where there is no room before them. A protection
        that names no chunk does not begin.
        REQUIRES: fewer than MOST_PROTECTIONS, and room for all names.
        """
        while self.protections.end_one():  # what those that have ended protected is room
            pass
        boundary, more = self._protect_leading(protection, protection.namespace, keys), b""
        if boundary == self.leading(protection.namespace, keys):
            id, blocks = tails_of(protection.namespace), tails(boundary)
            if left := self.leading(id, blocks) - self._protect_leading(protection, id, blocks):
                protection.note = f"no_room: {left} blocks at its end do not fit into --pin-share"
            if boundary or self.protections.room(protection) > 0:
                more = wanted(self.protections.room(protection))
        self.protections.add(protection, [(protection.namespace, key) for (key,) in split_keys(more)])
        self.protections.arrived(
            [chunk for chunk in self.index.find_chunks(protection.namespace, more) if chunk is not None]
        )
        return boundary

    def protect_session(self, protection: Protection, session: SessionRecord) -> int:
        """Protect the session's own chunks that a hit can read, from the one that it got first on, as many as fit. Returns how many do not.

        protections.add() follows. REQUIRES: room for all names.
        """
        while self.protections.end_one():
            pass
        listed = dict.fromkeys(session.listed)  # which may name a chunk twice while it is made shorter
        own = [each for each in listed if each.session is session and not each.detached]
        own = [each for each in own if each.ready and not ~each.ready & each.namespace.groups.full]
        fits = self.protections.fitting(own)
        self.protections.protect(protection, own[:fits])
        return len(own) - fits

    def _protect_leading(self, protection: Protection, namespace_id: bytes, keys: bytes) -> int:
        namespace = self.index.find_namespace(namespace_id)
        for _ in range(_BOUNDARIES_TRIED if namespace is not None else 0):
            assert namespace is not None
            chunks, boundary, _ = _lease(namespace, keys)
            fits = self.protections.fitting(chunks)
            if fits == len(chunks):
                self.protections.protect(protection, chunks)
            _unlease(chunks)
            if fits == len(chunks):
                return boundary
            keys = keys[: KEY_BYTES * (fits if namespace.groups.full else boundary - 1)]
        return 0

    def leading(self, namespace_id: bytes, keys: bytes) -> int:
        """The greatest boundary of a hit. Nothing is leased or counted."""
        namespace = self.index.find_namespace(namespace_id)
        chunks, boundary, _ = _lease(namespace, keys) if namespace is not None else ([], 0, 0)
        _unlease(chunks)
        return boundary

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
        self.space.pins -= len(chunks)
        self.space.free_or_track(*reversed(chunks))

    def audit(self) -> None:
        """AssertionError names what does not balance. REQUIRES: no deferred work is left. Walks over all chunks."""
        audit(self.space)
