"""Makes KV events from the loop's events, and knows the contents of every READY object that an engine described.

Owns: these objects and their descriptions, the numbers of KV events, the memory of descriptions. Refuses to know: the
observers, and what they do. A subscriber of the bus: it runs in the bus's thread; `snapshot()`, `status()` and
`families()` may be called from any thread.

Each described READY object is published once as stored and once as removed. Of others only the keys are handed over,
and nothing is kept: most daemons publish no KV events. After dropped events of the loop the hub resyncs: from BEGIN on,
where all keys count as removed, it notes which objects a SLICE or a store names, and at END it removes all others.

Engines describe chunks, with the stores of their first object group. The objects of other groups are described by the part of
a chunk that they hold, in a Description of their own: 0.4 KB and 4 bytes a token. Where the first group's blocks are larger than
another's, the chunk's own description is kept beside that of the first group's object.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias, TypeVar, get_args

from kvserver.cache import GroupObjects, split_keys
from kvserver.events import (
    ChunksDescribed,
    ChunksEvicted,
    ChunksStored,
    Event,
    InstanceDescribed,
    InstanceDisconnected,
    L1Cleared,
    L1Resynced,
    ResyncPart,
    Subscriber,
)
from kvserver.kv_events.descriptions import describe, of_objects
from kvserver.kv_events.resident import Members, ResidentChunks
from kvserver.kv_events.types import (
    MOST_CHUNKS,
    Description,
    DirectEvent,
    KeysCleared,
    KeysRemoved,
    KeysStored,
    KVChunk,
    KVEvent,
    KVRemoved,
    KVStored,
    ReaderConnected,
    ReaderDisconnected,
    Tier,
)
from kvserver.protocol.kv_status import KVEventsStatus
from kvserver.telemetry import Family, Kind, Metric, families_of

_MOST_EXPECTED = 16_384  # descriptions of chunks that are not READY yet, and may never be
_COPIED = 4096  # chunks at a time, between which other threads may run

_Name: TypeAlias = tuple[bytes, bytes]  # namespace, key
_T = TypeVar("_T")
_PUBLISHED: tuple[Metric[Counter[type[KVEvent]]], ...] = (
    Metric("kvserver_kv_events", "KV events that the daemon published to its observers, by type.", Kind.COUNTER, lambda of: {kind.__struct_config__.tag: of[kind] for kind in get_args(KVEvent)}, ("type",)),
)  # fmt: skip


class Unannounced(enum.Enum):
    """Why an object that became READY has no description."""

    UNDESCRIBED = "undescribed"  # no engine described its chunk
    MEMORY = "memory"
    MISMATCHED = "mismatched"  # the description does not fit the chunk


class Hub(Subscriber):
    name = "kv_events"

    def __init__(self, memory_bytes: int, hand_over: Callable[[DirectEvent], None]) -> None:
        """`hand_over` is called in the order of the events' numbers, and must not wait. `memory_bytes`: most for descriptions."""
        self._hand_over = hand_over
        self._limit = memory_bytes
        self._lock = threading.Lock()  # of all below; `hand_over` is called under it
        self._number = 0
        self._resident = ResidentChunks()
        self._confirmed: dict[bytes, dict[Members, set[bytes]]] | None = None  # of L1 since BEGIN; None: no resync runs
        self._expected: OrderedDict[_Name, Description] = OrderedDict()  # of chunks that are not READY yet
        self._expected_bytes = 0
        self._refused: OrderedDict[_Name, Unannounced] = OrderedDict()  # why such a description is not kept
        self._bytes = 0  # of all descriptions
        self._described = 0
        self._readers: set[str] = set()
        self._published: Counter[type[KVEvent]] = Counter()
        self._unannounced: Counter[Unannounced] = Counter()
        self._resyncs = 0

    def handle(self, event: Event) -> None:
        match event:
            case ChunksDescribed():
                self._describe(Tier.L1, event)
            case ChunksStored():
                place = event.namespace, event.group
                self._unannounced += self._store(Tier.L1, event.time_ns, *place, event.keys, event.instance_id)
            case ChunksEvicted():
                self._evict(Tier.L1, event.time_ns, event.namespace, event.group, _split(event.keys))
            case L1Cleared():
                self._clear(Tier.L1, event.time_ns, event.namespace)
            case L1Resynced():
                self._resync(event)
            case InstanceDescribed():
                scheduler = event.description
                self._readers.add(scheduler.instance_id)
                with self._lock:
                    shape = event.chunk_blocks, event.block_tokens, event.object_groups
                    self._publish(ReaderConnected, event.time_ns, scheduler, event.namespace_prefix, *shape)
            case InstanceDisconnected() if event.instance_id in self._readers:
                self._readers.remove(event.instance_id)
                with self._lock:
                    self._publish(ReaderDisconnected, event.time_ns, event.instance_id, event.model_name)

    # ---- from any thread ----------------------------------------------------------------------

    def snapshot(self, prefix: bytes) -> tuple[int, list[KVChunk]]:
        """The described chunks of L1 in the namespaces whose id begins with `prefix`, and the number of the last event."""
        found: list[KVChunk] = []
        with self._lock:
            for (tier, namespace), groups in self._resident.places.items():
                of_prefix = groups.values() if tier is Tier.L1 and namespace.startswith(prefix) else ()
                values = chain.from_iterable(chunks.values() for chunks in of_prefix)
                while part := list(islice(values, _COPIED)):
                    found += part
            return self._number, found

    def status(self) -> KVEventsStatus:
        """Read without the lock, as families(): the loop calls this and must not wait for a snapshot."""
        return KVEventsStatus(
            events=self._number,
            described_chunks=self._described,
            state_bytes=self._bytes,
            unannounced={reason.value: self._unannounced[reason] for reason in Unannounced},
            recounts=self._resyncs,
        )

    def families(self) -> list[Family]:
        return list(families_of(_PUBLISHED, [(self._published, ())]))

    # ---- stored -------------------------------------------------------------------------------

    def _store(
        self, tier: Tier, time_ns: int, namespace: bytes, group: GroupObjects, keys: bytes, instance_id: str
    ) -> Counter[Unannounced]:
        """Returns how many objects are without a description."""
        without: Counter[Unannounced] = Counter()
        for part in _parts(_split(keys)):
            with self._lock:
                self._hand_over(KeysStored(tier, namespace, self._confirm(namespace, group, part), group.number))
                without += self._announce(tier, time_ns, namespace, group, part, instance_id)
        return without

    def _confirm(self, namespace: bytes, group: GroupObjects, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys that were not handed over as stored since BEGIN; all of them if no resync runs."""
        if self._confirmed is None:
            return keys
        confirmed = self._confirmed.setdefault(namespace, {}).setdefault(group.members, set())
        fresh = [key for key in keys if key not in confirmed]
        confirmed.update(fresh)
        return fresh

    def _announce(
        self, tier: Tier, time_ns: int, namespace: bytes, group: GroupObjects, keys: Sequence[bytes], instance_id: str
    ) -> Counter[Unannounced]:
        """Publish those of the READY objects that can be described. Returns how many cannot."""
        resident = self._resident.places.get((tier, namespace), {})
        described = resident.get(group.members, {})
        without: Counter[Unannounced] = Counter()
        stored: list[KVChunk] = []
        for key in keys:
            if key in described:  # a resync names it, or its removal was dropped
                continue
            description = self._description(namespace, key, group, resident.values())
            if isinstance(description, Unannounced):
                without[description] += 1
            else:
                self._bytes += description.size
                stored.append(KVChunk(key, description))
        if stored:
            self._described += len(stored)
            self._resident.add(tier, namespace, stored)
            self._publish(KVStored, time_ns, tier, namespace, tuple(stored), instance_id)
        return without

    def _description(
        self, namespace: bytes, key: bytes, group: GroupObjects, resident: Iterable[Mapping[bytes, KVChunk]]
    ) -> Description | Unannounced:
        """Of an object, from the chunk's description that waits or from that of another object of the chunk."""
        name = namespace, key
        if group.number == 0:  # the description of the chunk waits for it
            why, chunk = self._refused.pop(name, Unannounced.UNDESCRIBED), self._expected.pop(name, None)
            if chunk is not None:
                self._expected_bytes -= chunk.size
                self._bytes -= chunk.size
        else:
            why, chunk = self._refused.get(name, Unannounced.UNDESCRIBED), self._expected.get(name)
        others = [of[key].description for of in resident if key in of]
        for source in (chunk, *others):
            if source is not None and (found := of_objects(source, group)) is not None:
                return found if self._has_room(found) else Unannounced.MEMORY
        return why

    # ---- removed --------------------------------------------------------------------------------

    def _evict(
        self, tier: Tier, time_ns: int, namespace: bytes, group: GroupObjects | None, keys: Sequence[bytes]
    ) -> None:
        """`group` None: of all groups."""
        for part in _parts(keys):
            with self._lock:
                self._hand_over(KeysRemoved(tier, namespace, part, None if group is None else group.number))
        if self._confirmed is not None:
            for members, confirmed in self._confirmed.get(namespace, {}).items():
                if group is None or members == group.members:
                    confirmed.difference_update(keys)
        for members in self._groups(tier, namespace) if group is None else [group.members]:
            self._remove(tier, time_ns, namespace, members, keys)

    def _clear(self, tier: Tier, time_ns: int, prefix: bytes) -> None:
        with self._lock:
            self._hand_over(KeysCleared(tier, prefix))
        if self._confirmed is not None:
            self._confirmed = {space: keys for space, keys in self._confirmed.items() if not space.startswith(prefix)}
        for namespace, members, keys in self._keys(tier, prefix):
            self._remove(tier, time_ns, namespace, members, keys)

    def _remove(self, tier: Tier, time_ns: int, namespace: bytes, members: Members, keys: Sequence[bytes]) -> None:
        """Publish those of the objects that are described."""
        for part in _parts(keys):
            with self._lock:
                if removed := self._resident.remove(tier, namespace, members, part):
                    self._described -= len(removed)
                    self._bytes -= sum(chunk.description.size for chunk in removed)
                    self._publish(KVRemoved, time_ns, tier, namespace, tuple(removed))

    def _groups(self, tier: Tier, namespace: bytes) -> list[Members]:
        return list(self._resident.places.get((tier, namespace), ()))

    def _keys(self, tier: Tier, prefix: bytes = b"") -> list[tuple[bytes, Members, list[bytes]]]:
        """The tier's namespaces whose id begins with `prefix`, and by groups the keys of their described objects."""
        return [
            (space, members, list(chunks))
            for (at, space), groups in self._resident.places.items()
            if at is tier and space.startswith(prefix)
            for members, chunks in groups.items()
        ]

    def _resync(self, event: L1Resynced) -> None:
        match event.part:
            case ResyncPart.BEGIN:
                self._confirmed = {}
                with self._lock:
                    self._hand_over(KeysCleared(Tier.L1, b""))
            case ResyncPart.SLICE:
                self._store(Tier.L1, event.time_ns, event.namespace, event.group, event.keys, "")
            case ResyncPart.END if self._confirmed is not None:
                for namespace, members, keys in self._keys(Tier.L1):
                    confirmed = self._confirmed.get(namespace, {}).get(members, set())
                    gone = [key for key in keys if key not in confirmed]
                    self._remove(Tier.L1, event.time_ns, namespace, members, gone)
                self._confirmed = None
                self._resyncs += 1

    # ---- descriptions -------------------------------------------------------------------------

    def _describe(self, tier: Tier, event: ChunksDescribed) -> None:
        first, ready = event.ready[0][0].members, [(group, set(_split(keys))) for group, keys in event.ready]
        for part in _parts(list(zip(_split(event.keys), describe(event), strict=True))):
            with self._lock:
                described = self._resident.places.get((tier, event.namespace), {}).get(first, {})
                for key, description in part:
                    if key not in described:
                        self._expect((event.namespace, key), description)
                for group, keys in ready:
                    late = [key for key, _ in part if key in keys]
                    self._announce(tier, event.time_ns, event.namespace, group, late, event.instance_id)

    def _has_room(self, description: Description) -> bool:
        return self._bytes + description.size <= self._limit

    def _expect(self, name: _Name, description: Description | None) -> None:
        """Keep the description until the chunk is READY. The oldest such descriptions are dropped when there are too many."""
        if name in self._expected:
            return
        if description is None or not self._has_room(description):
            self._refuse(name, Unannounced.MISMATCHED if description is None else Unannounced.MEMORY)
            return
        self._refused.pop(name, None)
        self._expected[name] = description
        self._expected_bytes += description.size
        self._bytes += description.size
        while len(self._expected) > _MOST_EXPECTED or self._expected_bytes > self._limit // 4:
            oldest, forgotten = self._expected.popitem(last=False)
            self._expected_bytes -= forgotten.size
            self._bytes -= forgotten.size
            self._refuse(oldest, Unannounced.MEMORY)

    def _refuse(self, name: _Name, why: Unannounced) -> None:
        self._refused[name] = why
        if len(self._refused) > _MOST_EXPECTED:
            self._refused.popitem(last=False)

    # ---- publishing ---------------------------------------------------------------------------

    def _publish(self, kind: Callable[..., KVEvent], time_ns: int, *fields: Any) -> None:
        """REQUIRES: the lock is held."""
        self._number += 1
        event = kind(self._number, time_ns, *fields)
        self._published[type(event)] += 1
        self._hand_over(event)


def _split(keys: bytes) -> list[bytes]:
    return [key for (key,) in split_keys(keys)]


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """At most MOST_CHUNKS at a time, the limit of one event."""
    return (items[at : at + MOST_CHUNKS] for at in range(0, len(items), MOST_CHUNKS))
