"""A chunk of L1: the objects of all groups under one key, and what keeps them there.

An object has a slot for each rank that stores its group, or one slot if all ranks have the same bytes. `Groups` numbers the
slots.

An object is FILLING until the bytes of its every slot were copied whole, then READY. A chunk is detached if its namespace was
cleared or if it left the index: lookups do not find it, and its pages are freed when its last pin ends. The objects of a chunk
age together and are evicted together.

Owns: a chunk's state and slots, its namespace, and the counts of an owner. Refuses to know: what pages contain, deadlines of
leases, copies. One thread uses it.
"""

from __future__ import annotations

import secrets
import sys
from array import array
from typing import Any

from kvserver._native import KeyTable
from kvserver.cache.groups import Groups
from kvserver.cache.pages import page_count
from kvserver.protocol import Durability


class ModelUse:
    """Use of L1 by one owner of chunks: a tenant with a share, or a model.

    `pages` includes the pages of detached chunks until they are freed. `share_pages` are kept for the owner. A model does not count the
    chunks of tenants.
    """

    __slots__ = ("chunks", "evicted_chunks", "never_loaded_chunks", "pages", "share_pages", "tail_blocks")

    def __init__(self) -> None:
        self.chunks = 0
        self.tail_blocks = 0  # which are not among the chunks
        self.pages = 0
        self.share_pages = 0
        self.evicted_chunks = 0
        self.never_loaded_chunks = 0  # evicted chunks that were READY and never loaded


class Namespace:
    """Chunks that one set of engines may share. Setting `cleared` detaches those of the same owner at once.

    The chunks of a tenant name a part of the namespace, which has the same table and another owner. So no chunk needs more memory for its
    owner, and owners have no effect on what is found. The index has the namespace alone, which knows its parts.
    """

    __slots__ = ("_left", "chunks", "cleared", "count", "durability", "groups", "id", "model", "owner", "parts")

    def __init__(self, id: bytes, groups: Groups, model: ModelUse, owner: ModelUse | None = None) -> None:
        self.id = id
        self.groups = groups
        self.model = model
        self.owner = owner or model  # of the chunks that name it
        self.count = 0  # of these chunks
        self.parts: dict[ModelUse, Namespace] = {}  # by owner; a part has none
        self.chunks: KeyTable[Chunk] = KeyTable(secrets.randbits(64))  # by key
        self.cleared = False
        self.durability = (
            Durability.PROCESS
        )  # who can find it later: unless PROCESS, a restart of the daemon may keep it
        self._left: Namespace | None = None

    @property
    def left(self) -> Namespace:
        """The namespace of the chunks that have left this one: it is cleared, and equal in all else."""
        if self._left is None:
            self._left = Namespace(self.id, self.groups, self.model, self.owner)
            self._left.cleared = True
        return self._left

    def part(self, tenant: ModelUse | None) -> Namespace:
        """The part of the tenant's chunks; of no tenant: the namespace itself. REQUIRES: it is no part."""
        if tenant is None:
            return self
        part = self.parts.get(tenant)
        if part is None:
            part = self.parts[tenant] = Namespace(self.id, self.groups, self.model, tenant)
            part.chunks, part.durability = self.chunks, self.durability
        return part

    def raise_durability(self, durability: Durability) -> None:
        if durability > self.durability:
            for each in (self, *self.parts.values()):
                each.durability = durability


class Chunk:
    """A chunk; an eviction policy adds its own state in a subclass.

    `done` is a bit set of slots; the other slots are being filled. `ready` is a bit set of groups: those whose slots are all
    done. `pins` counts tickets, `leases` counts requests. A chunk with either is not evicted. `session`, its owner, is set by
    `sessions`.
    """

    __slots__ = (
        "_slots",
        "done",
        "key",
        "leases",
        "loaded",
        "namespace",
        "pins",
        "ready",
        "session",
    )

    def __init__(self, namespace: Namespace, key: bytes) -> None:
        self.namespace = namespace
        self.key = key
        # One slot: its bytes. Several slots: for each the u32 offset in these bytes where it ends, then the slots. One
        # object per slot would use more memory than the rest of a chunk.
        self._slots = b""
        self.done = 0
        self.ready = 0
        self.loaded = False  # at least one rank has loaded it whole
        self.leases = 0
        self.pins = 0
        self.session: Any = None  # a SessionRecord

    @property
    def detached(self) -> bool:
        return self.namespace.cleared

    @property
    def empty(self) -> bool:
        """True if the chunk has no slot."""
        return not self.joined_slots

    def has_slot(self, number: int) -> bool:
        """True if the slot is done or being filled."""
        if self.namespace.groups.slot_count == 1 or not self._slots:
            return bool(self._slots)
        begin, end = self._bounds(number)
        return begin < end

    def slot(self, number: int) -> bytes:
        """The slot; b"" if there is none."""
        if self.namespace.groups.slot_count == 1 or not self._slots:
            return self._slots
        begin, end = self._bounds(number)
        return self._slots[begin:end]

    def set_slot(self, number: int, slot: bytes) -> None:
        """Set the slot; b"" removes it."""
        count = self.namespace.groups.slot_count
        if count == 1:
            self._slots = slot
            return
        if not self._slots:
            self._slots = array("I", [4 * count] * count).tobytes()
        begin, end = self._bounds(number)
        ends = array("I", self._slots[: 4 * count])
        grown = len(slot) - (end - begin)
        for later in range(number, count):
            ends[later] += grown
        self._slots = ends.tobytes() + self._slots[4 * count : begin] + slot + self._slots[end:]

    def is_filling(self, group: int) -> bool:
        """A store or a fill copies to one of the group's slots now: its end is the end of every wait for the object."""
        groups = self.namespace.groups
        slots = range(groups.first[group], groups.first[group] + groups.slots[group])
        return any(self.has_slot(number) and not self.done >> number & 1 for number in slots)

    def remove_object(self, group: int) -> bytes:
        """Remove the group's slots and return them joined. REQUIRES: none is filled now."""
        groups = self.namespace.groups
        numbers = range(groups.first[group], groups.first[group] + groups.slots[group])
        slots = b"".join([self.slot(number) for number in numbers])
        for number in numbers:
            self.set_slot(number, b"")
        self.done &= ~groups.masks[group]
        self.ready &= ~(1 << group)
        return slots

    def set_slots(self, slots: bytes, done: int, ready: int) -> None:
        """All slots at once, their ends first. REQUIRES: it has none."""
        self._slots, self.done, self.ready = slots, done, ready

    def remove_slots(self) -> bytes:
        """Remove all slots and return them joined."""
        slots, self._slots = self.joined_slots, b""
        return slots

    def count_pages(self, more: int) -> None:
        """Its slots have so many pages more."""
        self.namespace.owner.pages += more
        if self.session is not None:
            self.session.pages += more

    @property
    def page_count(self) -> int:
        return page_count(self.joined_slots)

    @property
    def joined_slots(self) -> bytes:
        count = self.namespace.groups.slot_count
        return self._slots if count == 1 else self._slots[4 * count :]

    def _bounds(self, number: int) -> tuple[int, int]:
        """(begin, end) of the slot in `_slots`. REQUIRES: several slots, one of which is set."""
        at = 4 * number
        begin = int.from_bytes(self._slots[at - 4 : at], sys.byteorder) if at else 4 * self.namespace.groups.slot_count
        return begin, int.from_bytes(self._slots[at : at + 4], sys.byteorder)
