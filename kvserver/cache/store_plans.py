"""Stores and fills: from keys to slots, and from the end of a copy to READY objects.

Owns: what becomes of a plan. Refuses to know: which chunks an allocation evicts (`space`), who copies. The rules are `cache`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from kvserver.cache.chunk import Chunk
from kvserver.cache.groups import Groups
from kvserver.cache.index import split_keys
from kvserver.cache.pages import page_count
from kvserver.cache.sessions import SessionKey, SessionRecord
from kvserver.cache.space import Space
from kvserver.cache.store_plan import StorePlan
from kvserver.protocol import KEY_BYTES, Durability, ErrorCode, KVServerError

_FIRST_SLOT = range(1)


class StorePlans:
    """Plans of stores and fills. REQUIRES: one thread uses it."""

    def __init__(self, space: Space) -> None:
        self._space = space

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
        durability: Durability = Durability.PROCESS,
        session: SessionKey | None = None,
        tenant: str = "",
        shares: bool = True,
    ) -> StorePlan:
        """Allocate slots for the objects of `group` of which none of these slots is there yet, and pin their chunks.

        - `after`: of a tail, (namespace id, key) of the chunk before it.
        - `slots`: the numbers of one rank's slot in each chunk, or of all ranks' slots.
        - `places`: the places of the keys among those that all ranks store together, if not from 0 on.
        - `tenant`: of the request, which new chunks belong to if it has a share.
        - `session`: of the request, which new chunks are of. Without one they are shared for good, and those of a full group that
          are found. `shares` is False of a fill, whose lookup stated the session.

        Objects that are resident or that another store fills are skipped (duplicate stores merge). `no_space` counts the first
        object that cannot fit, and all objects after it. An object cannot fit if no further chunk may be evicted, or if L1 is too
        small for all ranks' bytes of it and of the objects before it. KVServerError(TOO_LARGE) if L1 is too small for one slot. A
        plan that is not `complete` after `steps` steps is continued by extend_plan(). Pair with finish_store().
        """
        pages = self._space.pool.pages_for(slot_bytes)
        if pages > self._space.pool.pages:
            raise KVServerError(
                ErrorCode.TOO_LARGE,
                f"a chunk of {slot_bytes} bytes needs {pages} pages of {self._space.pool.page_bytes} bytes, L1 has "
                f"{self._space.pool.pages}; raise --l1-size",
            )
        count = len(keys) // KEY_BYTES
        places, room = places or range(count), max(1, self._space.pool.pages // (pages * groups.slots[group]))
        fitting = len(range(places.start, min(places.stop, room), places.step))
        plan = StorePlan(
            group, slots, groups, namespace_id, model_name, keys[: fitting * KEY_BYTES], pages,
            complete=False, after=after, durability=durability, tenant=tenant,
        )  # fmt: skip
        plan.no_space = count - fitting
        self._space.other_tenants += tenant != "" and tenant not in self._space.index.tenants
        plan.session, plan.shares = session, shares and bool(groups.full >> group & 1)
        plan.found = [chunk for chunk in self._space.index.find_chunks(namespace_id, plan.keys) if chunk is not None]
        self._space.pin_chunks(plan.found)
        if (users := self._users(plan)) is not None:
            self._space.sessions.use(users[0], plan.found)
        self.extend_plan(plan, steps)
        return plan

    def extend_plan(self, plan: StorePlan, steps: int) -> None:
        """Continue planning for at most `steps` steps; `plan.steps` is the steps that remain. REQUIRES: not complete.

        Each call may add to `evicted`. The index may change in any way between two calls.
        """
        plan.steps = steps
        namespace = self._space.index.find_or_make_namespace(plan.namespace_id, plan.groups, plan.model_name)
        # An engine may become private while a store of its shared namespace is on the way: what is there keeps its durability.
        namespace.raise_durability(plan.durability)
        part = namespace.part(self._space.index.tenants.get(plan.tenant))
        first, users = len(plan.prefix), self._users(plan)
        for position, (key,) in enumerate(split_keys(plan.keys[first * KEY_BYTES :]), first):
            if plan.steps <= 0:
                return
            chunk = namespace.chunks.get(key)
            if chunk is not None and users is not None:  # it was added after planning began, then `found` lacks it
                self._space.sessions.use(users[0], (chunk,))
            if chunk is not None and any(map(chunk.has_slot, plan.slots)):
                plan.steps -= 1
                plan.prefix.append(chunk)
                plan.skipped += 1
                continue
            if chunk is not None:
                chunk.pins += 1  # it may have been added after planning began, then `found` does not pin it
            else:
                self._space.protections.returned((namespace.id, key))
            slots = self._space.allocate_slots(plan, part.owner)
            if slots is None:
                if chunk is not None:
                    chunk.pins -= 1
                    self._space.free_or_track(chunk)
                if not plan.full:
                    return
                plan.no_space += len(plan.keys) // KEY_BYTES - position
                break
            is_new = chunk is None
            if chunk is None:
                chunk = self._space.index.add_chunk(namespace, key, part)
                chunk.pins += 1
            if is_new:
                if users is not None and users[0] is not None:
                    self._space.sessions.add(users[0], (chunk,))
                plan.returning = plan.returning and (namespace.id, key) in self._space.evicted_keys
                if plan.returning:
                    self._space.policy.use([chunk])
            for number, slot in zip(plan.slots, slots, strict=True):
                chunk.set_slot(number, slot)
            chunk.count_pages(plan.pages * len(plan.slots))
            self._space.pins += 1
            plan.steps -= 1
            plan.prefix.append(chunk)
            plan.chunks.append(chunk)
            plan.positions.append(position)
        self._complete_plan(plan)

    def publish_part(self, plan: StorePlan, count: int) -> list[Chunk]:
        """Publish those of the plan's first `count` objects that are whole: their slots of the plan were copied, and other ranks' before.

        They stay pinned until finish_store(), which publishes the others. Returns their chunks. REQUIRES: complete.
        """
        first, bits, mask = len(plan.ready), plan.bits, plan.groups.masks[plan.group]
        for chunk in plan.chunks[plan.looked : count]:
            if not chunk.detached and (chunk.done | bits) & mask == mask:
                self._mark_copied(plan, chunk)
        plan.looked = max(plan.looked, count)
        self._space.protections.arrived(plan.ready[first:])
        return plan.ready[first:]

    def finish_store(self, plan: StorePlan, copied: bool, failed: Collection[int] = ()) -> int:
        """Publish the plan's objects if `copied` (every byte of the plan's slots was copied), else free their slots.

        `failed`: the places in `plan.chunks` whose object was not copied although others were. Returns the number of objects
        that became READY; `plan.ready` has their chunks. REQUIRES: complete, or not copied.
        """
        if not plan.complete:
            self._complete_plan(plan)
        first, bits = len(plan.ready), plan.bits
        for place, chunk in enumerate(plan.chunks):
            chunk.pins -= 1
            self._space.pins -= 1
            if chunk.done & bits:
                continue  # published before; where it was cleared since then, others may still read it
            if copied and not chunk.detached and place not in failed:
                self._mark_copied(plan, chunk)
            else:
                for number in plan.slots:
                    self._space.pool.free_pages(chunk.slot(number))
                    chunk.set_slot(number, b"")
                chunk.count_pages(-plan.pages * len(plan.slots))
                if not chunk.detached and chunk.empty:
                    self._space.index.detach_chunk(chunk)
        self._space.protections.arrived(plan.ready[first:])
        self._space.free_or_track(*reversed(plan.prefix), before=self._chunk_before(plan))
        return len(plan.ready)

    def _mark_copied(self, plan: StorePlan, chunk: Chunk) -> None:
        """The plan's slots of the chunk have their bytes. READY once all ranks' slots have."""
        mask = plan.groups.masks[plan.group]
        chunk.done |= plan.bits
        if chunk.done & mask == mask:
            chunk.ready |= 1 << plan.group
            plan.ready.append(chunk)

    def has_objects(self, namespace_id: bytes, group: int, keys: bytes) -> bool:
        """True if the group's objects of all keys are READY."""
        namespace = self._space.index.find_namespace(namespace_id)
        found = namespace.chunks.find(keys) if namespace is not None else [None]
        return all(chunk is not None and chunk.ready >> group & 1 for chunk in found)

    def drop_objects(self, namespace_id: bytes, group: int, keys: bytes) -> bytes:
        """Free objects that no kept boundary needs any more, but none of a chunk that is leased or pinned.

        Returns the keys of those that were freed.
        """
        dropped = []
        for chunk in self._space.index.find_chunks(namespace_id, keys):
            if chunk is None or not chunk.ready >> group & 1 or chunk.leases or chunk.pins:
                continue
            self._drop_object(chunk, group)
            dropped.append(chunk.key)
        return b"".join(dropped)

    def drop_incomplete(self, namespace_id: bytes, group: int, keys: bytes) -> None:
        """Free the slots of objects that lack a rank's bytes, if nothing fills them: such objects can be stored anew whole."""
        for chunk in self._space.index.find_chunks(namespace_id, keys):
            if chunk is not None and not chunk.ready >> group & 1 and not chunk.is_filling(group):
                self._drop_object(chunk, group)

    def _drop_object(self, chunk: Chunk, group: int) -> None:
        """REQUIRES: nothing reads or fills it."""
        slots = chunk.remove_object(group)
        self._space.pool.free_pages(slots)
        chunk.count_pages(-page_count(slots))
        if chunk.empty:
            self._space.index.detach_chunk(chunk)
            self._space.free_or_track(chunk)

    def _users(self, plan: StorePlan) -> tuple[SessionRecord | None] | None:
        """The session that uses what the store finds, or no session. None if that is known already, or if no chunk has an owner."""
        sessions = self._space.sessions
        if plan.session is not None:
            return (sessions.of_store(plan.session),)
        return (None,) if plan.shares and sessions.record_bytes else None

    def _complete_plan(self, plan: StorePlan) -> None:
        """Unpin all chunks but those that the plan fills."""
        plan.complete = True
        for chunk in plan.found:
            chunk.pins -= 1
        self._space.pins -= len(plan.found)
        self._space.free_or_track(*reversed(plan.found), *reversed(plan.prefix), before=self._chunk_before(plan))

    def _chunk_before(self, plan: StorePlan) -> Chunk | None:
        """The chunk that the plan's blocks follow, which is useful without them."""
        namespace = self._space.index.find_namespace(plan.after[0]) if plan.after is not None else None
        return namespace.chunks.get(plan.after[1]) if namespace is not None and plan.after is not None else None
