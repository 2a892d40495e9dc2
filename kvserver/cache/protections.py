"""Protections of chunks: L1 keeps them until a time, or until an operator ends it. Operators call this a pin; `Chunk.pins` counts copies.

A chunk is protected while any protection names it: one lease of the chunk stands for all of them. So nothing else has to know that a lease
is a protection's. Reads do not extend a protection.

A protection may name chunks that L1 lacks. Each is protected once it is READY, if the bound then has room for it.

What is protected is at most `fraction` of each part of L1: of an owner's share for that owner's chunks, and of the rest for all other chunks together.
So no protection keeps a model or a tenant from its share.

What protections cost others is known from an L1 without them. To the policy a use of a protected chunk is like any other use. So it grows
old, and an eviction passes over it once and evicts another chunk instead. `_displaced` has what was passed over or evicted: without
protections it would still be there, the first of it the next to leave. What has left that L1 but is protected in this one is its room.
The next use of such a chunk would bring it back. This is exact if the policy is LRU and chunks are of one size, else an estimate.

Owns: protections, what they protect, their bound, and what they cost others. Refuses to know: prompts, messages, wall clocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from kvserver.cache.chunk import Chunk, ModelUse
from kvserver.cache.eviction import EvictionPolicy
from kvserver.cache.sessions import SessionKey
from kvserver.protocol import KEY_BYTES

MOST_PROTECTIONS = 1024
MOST_OF_REQUESTS = 768  # requests begin none while there are so many: the rest is left to operators
MOST_NAMES = 1 << 17  # of chunks, of all protections together until end_one(): one turn of the loop may look at each
_MOST_DISPLACED = 1 << 16
_EXAMINED_AT_ONCE = 4096  # wanted chunks, by forget_lost()

Name: TypeAlias = tuple[bytes, bytes]  # (namespace id, key)


class ProtectionEnd(Enum):
    EXPIRED = "expired"
    DELETED = "deleted"
    CLEARED = "cleared"
    WEIGHTS = "weights"  # no engine has these weights any more
    REPLACED = "replaced"  # its request was looked up again
    NOT_KEPT = "not_kept"  # a restart of the daemon, or its smaller L1, did not keep the chunks
    NO_ROOM = "no_room"  # the bound had no room for the first chunk that arrived
    LOST_TIER = "lost_tier"  # a tier of L2 does not have the chunks any more, and L1 never got them


@dataclass(slots=True, eq=False)
class Protection:
    """`deadline`: of the cache's clock. `protected`: chunks in L1; `wanted`: what L1 lacks."""

    id: str
    owner: str
    namespace: bytes
    model: ModelUse
    deadline: float
    expires_at: float  # wall clock, for people
    protected: list[Chunk] = field(default_factory=list)
    wanted: set[Name] = field(default_factory=set)
    tokens: int = 0  # of what is protected
    pages: int = 0
    kept: bool = False  # by a restart
    # Of a request, which stores what is wanted: the clock starts anew whenever a chunk arrives, with so many seconds.
    seconds: float = 0.0
    arrived: bool = False  # a chunk did, after the last expire()
    note: str = ""  # what is not protected, and why; "": all of the prompt's chunks are, or will be
    session: SessionKey | None = None  # whose request, or name, it is of; its namespace is that of all LoRAs together
    tenant: ModelUse | None = None  # that will own what its request stores; None: the model does


@dataclass(slots=True)
class _ProtectedChunk:
    protections: list[Protection]
    pages: int  # charged to the bound: of the chunk when its last object became READY
    gone_pages: int = 0  # of them, once L1 without protections would have evicted the chunk


class Protections:
    """`pages`: of L1; `shares`: pages of it by owner."""

    def __init__(self, pages: int, shares: Mapping[ModelUse, int], policy: EvictionPolicy) -> None:
        self.fraction = 0.0  # of L1 that may be protected; the daemon sets it once
        self._pages, self._shares, self._policy = pages, shares, policy
        self._live: dict[str, Protection] = {}
        self._ending: deque[Protection] = deque()  # ended, with chunks that are still leased
        self._protected: dict[Chunk, _ProtectedChunk] = {}
        self._charged: Counter[ModelUse | None] = Counter()  # pages by owner with a share; None: all others
        self._wanted: dict[Name, list[Protection]] = {}
        self._names = 0  # protected and wanted, of those that live and of those that end
        self.passed_over = 0  # chunks
        self._gone_pages = 0  # of the protected chunks
        # Pages by the hash of an evicted chunk's name, or by a protected chunk that was passed over; the oldest first.
        self._displaced: OrderedDict[int | Chunk, int] = OrderedDict()
        self._displaced_pages = 0  # of the evicted ones
        self.ended: Counter[ProtectionEnd] = Counter()
        self.requested: Counter[str] = Counter()  # by outcome

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Protection]:
        return iter(self._live.values())

    def get(self, id: str) -> Protection | None:
        return self._live.get(id)

    # ---- bounds -------------------------------------------------------------------------------

    @property
    def protected_pages(self) -> int:
        return self._charged.total()

    @property
    def bound_pages(self) -> int:
        """Pages that may be protected of all owners together."""
        return sum(map(self._bound_of, [None, *self._shares]))

    def bound_of(self, protection: Protection) -> int:
        """Pages that may be protected of what its request stores: of the owner, or of all owners without a share together if it has none."""
        return self._bound_of(self._part(protection.tenant or protection.model))

    def room(self, protection: Protection) -> int:
        """Pages of bound_of() that are left."""
        return self._room_of(self._part(protection.tenant or protection.model))

    def _part(self, owner: ModelUse) -> ModelUse | None:
        return owner if owner in self._shares else None

    def _room_of(self, part: ModelUse | None) -> int:
        return self._bound_of(part) - self._charged[part]

    def _bound_of(self, part: ModelUse | None) -> int:
        return int(
            self.fraction * (self._shares[part] if part is not None else self._pages - sum(self._shares.values()))
        )

    def fitting(self, chunks: Sequence[Chunk]) -> int:
        """Number of these chunks, from the first one on, that can be protected. Each uses the room of its owner."""
        rooms: dict[ModelUse | None, int] = {}
        for number, chunk in enumerate(chunks):
            part = self._part(chunk.namespace.owner)
            room = rooms.get(part)
            room = (self._room_of(part) if room is None else room) - (
                0 if chunk in self._protected else chunk.page_count
            )
            if room < 0:
                return number
            rooms[part] = room
        return len(chunks)

    @property
    def wanted_chunks(self) -> int:
        return len(self._wanted)

    @property
    def room_for_names(self) -> int:
        return MOST_NAMES - self._names

    # ---- begin --------------------------------------------------------------------------------

    def add(self, protection: Protection, wanted: Iterable[Name]) -> None:
        """Begin the protection, which protects chunks already, unless it names none. REQUIRES: fewer than MOST_PROTECTIONS, and room for all names."""
        for name in wanted:
            if name not in protection.wanted:  # a prompt may name a chunk twice
                protection.wanted.add(name)
                self._wanted.setdefault(name, []).append(protection)
                self._names += 1
        if protection.protected or protection.wanted:
            self._live[protection.id] = protection

    def arrived(self, chunks: Iterable[Chunk]) -> None:
        """Chunks became READY, or have more objects than before."""
        if not self._live:
            return
        for chunk in chunks:
            protected = self._protected.get(chunk)
            if protected is not None:
                more = chunk.page_count - protected.pages
                self._charge(chunk, more)
                protected.pages += more
                for protection in protected.protections if more else ():
                    protection.pages += more
            groups = chunk.namespace.groups
            if chunk.ready and chunk.ready & groups.full == groups.full:
                for protection in self._wanted.pop((chunk.namespace.id, chunk.key), ()):
                    protection.wanted.discard((chunk.namespace.id, chunk.key))
                    self._names -= 1
                    if self.fitting([chunk]):
                        self.protect(protection, [chunk])
                        protection.arrived = True
                    else:
                        protection.note = "no_room: a chunk that arrived later did not fit into --pin-share"
                        self.forget(protection, list(protection.wanted))  # chunks behind a hole are of no use

    def protect(self, protection: Protection, chunks: Iterable[Chunk]) -> None:
        """REQUIRES: they are READY and fit."""
        for chunk in chunks:
            protection.protected.append(chunk)
            protection.tokens += chunk.namespace.groups.chunk_tokens
            protection.pages += chunk.page_count
            self._names += 1
            protected = self._protected.get(chunk)
            if protected is not None:
                protected.protections.append(protection)
                continue
            self._protected[chunk] = _ProtectedChunk([protection], chunk.page_count)
            self._charge(chunk, chunk.page_count)
            chunk.leases += 1

    def _charge(self, chunk: Chunk, pages: int) -> None:
        self._charged[self._part(chunk.namespace.owner)] += pages

    # ---- end ----------------------------------------------------------------------------------

    def end(self, protection: Protection, why: ProtectionEnd) -> None:
        """End it; end_one() frees its chunks for eviction."""
        del self._live[protection.id]
        self.ended[why] += 1
        self.forget(protection, list(protection.wanted))
        self._ending.append(protection)

    def forget(self, protection: Protection, wanted: Iterable[Name]) -> None:
        """The protection does not want these chunks any more."""
        for name in wanted:
            protection.wanted.discard(name)
            self._names -= 1
            protections = self._wanted[name]
            protections.remove(protection)
            if not protections:
                del self._wanted[name]

    def expire(self, now: float) -> None:
        for protection in list(self):
            if protection.arrived and protection.seconds:
                self.set_deadline(protection, now + protection.seconds)
            protection.arrived = False
            if protection.deadline <= now:
                self.end(protection, ProtectionEnd.EXPIRED)

    def set_deadline(self, protection: Protection, deadline: float) -> None:
        protection.expires_at += deadline - protection.deadline
        protection.deadline = deadline

    def end_in(self, meant: Callable[[bytes], bool], why: ProtectionEnd) -> None:
        """End those in the namespaces that are meant."""
        for protection in [each for each in self if meant(each.namespace)]:
            self.end(protection, why)

    def release_all(self) -> None:
        """L1 is left to the next daemon: end_one() frees all chunks, and no protection has ended."""
        self._ending.extend(self._live.values())
        self._live.clear()
        self._wanted.clear()
        self._names = sum([len(each.protected) for each in self._ending])

    def forget_lost(self, still_there: Callable[[bytes, int, bytes], tuple[bytes, ...]]) -> None:
        """Forget wanted chunks that no tier has, and end what names nothing any more. A part of them each time, in turns.

        `still_there`: as Storage.present().
        """
        examined = 0
        for protection in list(self):
            if examined < _EXAMINED_AT_ONCE and protection.wanted and not protection.seconds:
                examined += len(protection.wanted)
                self._live[protection.id] = self._live.pop(protection.id)  # behind the others
                self._forget_lost(protection, still_there)
            if not (protection.protected or protection.wanted):
                self.end(protection, _why_empty(protection))

    def _forget_lost(
        self, protection: Protection, still_there: Callable[[bytes, int, bytes], tuple[bytes, ...]]
    ) -> None:
        found: set[Name] = set()
        for id in {id for id, _ in protection.wanted}:  # a session has LoRAs, too
            (there,) = still_there(id, 1, b"".join([key for of, key in protection.wanted if of == id])) or (b"",)
            found |= {(id, there[at : at + KEY_BYTES]) for at in range(0, len(there), KEY_BYTES)}
        lost = [name for name in protection.wanted if name not in found]
        if lost:
            self.forget(protection, lost)
            protection.note = f"lost: {len(lost)} chunks were neither kept in L1 nor are they in L2"

    def end_one(self) -> int:
        """Free the chunks of one protection that has ended. Returns their number, at least 1; 0 if there is none."""
        if not self._ending:
            return 0
        protection = self._ending.popleft()
        free = [chunk for chunk in protection.protected if self._unprotect(chunk, protection)]
        self._names -= len(protection.protected)
        # The end of a prompt is evicted before its start.
        self._policy.track([chunk for chunk in reversed(free) if not (chunk.detached or self._policy.tracks(chunk))])
        return max(1, len(protection.protected))

    def _unprotect(self, chunk: Chunk, protection: Protection) -> bool:
        """True if no protection names the chunk any more."""
        protected = self._protected[chunk]
        protected.protections.remove(protection)
        if protected.protections:
            return False
        del self._protected[chunk]
        chunk.leases -= 1
        self._charge(chunk, -protected.pages)
        self._return_to_others(chunk, protected)
        self._trim_displaced()
        return True

    # ---- what it costs others -----------------------------------------------------------------

    def pass_over(self, chunk: Chunk) -> None:
        """An eviction that would have taken the chunk takes another one, if only protections keep it."""
        protected = self._protected.get(chunk)
        if protected is not None and chunk.leases == 1 and not chunk.pins and not protected.gone_pages:
            self.passed_over += 1
            self._displaced[chunk] = protected.pages

    def lend(self, chunks: Iterable[Chunk]) -> Sequence[Chunk]:
        """Let chunks that are used, but only leased by protections, be unleased until take_back(): the policy gives them a place as any other."""
        if not self._protected:
            return ()
        lent = [each for each in chunks if each.leases == 1 and not each.pins and each in self._protected]
        for chunk in lent:
            chunk.leases = 0
            self._return_to_others(chunk, self._protected[chunk])
        if lent:
            self._trim_displaced()
        return lent

    def take_back(self, lent: Iterable[Chunk]) -> None:
        for chunk in lent:
            chunk.leases = 1

    def _return_to_others(self, chunk: Chunk, protected: _ProtectedChunk) -> None:
        """L1 without protections has the chunk too. _trim_displaced() follows, once for all chunks of a prompt."""
        self._displaced.pop(chunk, None)
        self._gone_pages -= protected.gone_pages
        protected.gone_pages = 0

    def evicted(self, name: Name, pages: int) -> None:
        """A chunk was evicted: without protections it would still be there, for now."""
        if self._displaced or self._gone_pages:
            self.returned(name)
            self._displaced[hash(name)] = pages
            self._displaced_pages += pages
            self._trim_displaced()

    def returned(self, name: Name) -> None:
        """A store brings the chunk to L1 again, and evicts others for it."""
        if self._displaced:
            self._displaced_pages -= self._displaced.pop(hash(name), 0)

    def displaced(self, name: Name) -> bool:
        """True if the chunk, which was evicted, would be in L1 without protections."""
        return bool(self._displaced) and hash(name) in self._displaced

    def _trim_displaced(self) -> None:
        while self._displaced_pages > self._gone_pages or len(self._displaced) > _MOST_DISPLACED:
            oldest, pages = self._displaced.popitem(last=False)
            if isinstance(oldest, Chunk):
                self._protected[oldest].gone_pages = pages
                self._gone_pages += pages
            else:
                self._displaced_pages -= pages

    # ---- accounting ---------------------------------------------------------------------------

    def audit(self) -> int:
        """AssertionError names what does not balance. Returns the leases of chunks that are not detached. REQUIRES: no deferred work is left."""
        assert not self._ending, "free the chunks of ended protections first"
        named = Counter(chunk for protection in self for chunk in protection.protected)
        assert named == {chunk: len(each.protections) for chunk, each in self._protected.items()}, (
            "protections are counted wrongly"
        )
        assert all(chunk.ready for chunk in named), "a protection protects a chunk without KV"
        assert self._names == sum(len(each.protected) + len(each.wanted) for each in self), "names are counted wrongly"
        assert all(each.pages == sum(chunk.page_count for chunk in each.protected) for each in self), (
            "a protection's pages are counted wrongly"
        )
        charged: Counter[ModelUse | None] = Counter()
        for chunk, protected in self._protected.items():
            charged[self._part(chunk.namespace.owner)] += protected.pages
        assert charged == +self._charged, "protected pages are counted wrongly"
        assert self._gone_pages == sum(each.gone_pages for each in self._protected.values())
        evicted = sum(pages for each, pages in self._displaced.items() if not isinstance(each, Chunk))
        assert self._displaced_pages == evicted <= self._gone_pages, "what protections displaced is counted wrongly"
        wanted = Counter(name for protection in self for name in protection.wanted)
        assert wanted == {name: len(protections) for name, protections in self._wanted.items()}, (
            "a name is wanted wrongly"
        )
        return len(named)


def _why_empty(protection: Protection) -> ProtectionEnd:
    if protection.kept:
        return ProtectionEnd.NOT_KEPT
    return ProtectionEnd.NO_ROOM if protection.note.startswith("no_room") else ProtectionEnd.LOST_TIER
