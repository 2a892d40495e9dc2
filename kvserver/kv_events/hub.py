"""Makes KV events from the loop's events, and knows the contents of every READY chunk.

Owns: the READY chunks with their descriptions, the numbers of KV events, the memory of descriptions. Refuses to know:
the observers, and what they do. A subscriber of the bus: it runs in the bus's thread; `snapshot()`, `status()` and
`families()` may be called from any thread.

Each READY chunk is published once as stored and once as removed. After dropped events of the loop the hub resyncs: from
BEGIN on it notes which chunks a SLICE or a store names, and at END it removes all others.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias, TypeVar, get_args

from kvserver.cache import split_keys
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
from kvserver.kv_events.descriptions import describe
from kvserver.kv_events.resident import ResidentChunks
from kvserver.kv_events.types import (
    MOST_CHUNKS,
    Description,
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
    """Why a chunk that became READY has no description."""

    UNDESCRIBED = "undescribed"  # no engine described it
    MEMORY = "memory"
    MISMATCHED = "mismatched"  # the description does not fit the chunk


class Hub(Subscriber):
    name = "kv_events"

    def __init__(self, memory_bytes: int, hand_over: Callable[[KVEvent], None]) -> None:
        """`hand_over` is called in the order of the events' numbers, and must not wait. `memory_bytes`: most for descriptions."""
        self._hand_over = hand_over
        self._limit = memory_bytes
        self._lock = threading.Lock()  # of all below; `hand_over` is called under it
        self._number = 0
        self._resident = ResidentChunks()
        self._confirmed: dict[bytes, set[bytes]] | None = None  # of L1 since BEGIN; None: no resync runs
        self._expected: OrderedDict[_Name, Description] = OrderedDict()  # of chunks that are not READY yet
        self._expected_bytes = 0
        self._refused: OrderedDict[_Name, Unannounced] = OrderedDict()  # why such a description is not kept
        self._bytes = 0  # of all descriptions
        self._described = 0
        self._chunks = 0
        self._readers: set[str] = set()
        self._published: Counter[type[KVEvent]] = Counter()
        self._unannounced: Counter[Unannounced] = Counter()
        self._resyncs = 0

    def handle(self, event: Event) -> None:
        match event:
            case ChunksDescribed():
                self._describe(Tier.L1, event)
            case ChunksStored():
                self._store(Tier.L1, event.time_ns, event.namespace, event.keys, event.instance_id)
            case ChunksEvicted():
                self._remove(Tier.L1, event.time_ns, event.namespace, _split(event.keys))
            case L1Cleared():
                for namespace, keys in self._keys(Tier.L1, event.namespace):
                    self._remove(Tier.L1, event.time_ns, namespace, keys)
            case L1Resynced():
                self._resync(event)
            case InstanceDescribed():
                scheduler = event.description
                self._readers.add(scheduler.instance_id)
                with self._lock:
                    shape = event.chunk_blocks, event.block_tokens
                    self._publish(ReaderConnected, event.time_ns, scheduler, event.namespace_prefix, *shape)
            case InstanceDisconnected() if event.instance_id in self._readers:
                self._readers.remove(event.instance_id)
                with self._lock:
                    self._publish(ReaderDisconnected, event.time_ns, event.instance_id, event.model_name)

    # ---- from any thread ----------------------------------------------------------------------

    def snapshot(self, prefix: bytes) -> tuple[int, list[KVChunk]]:
        """All chunks of L1 in the namespaces whose id begins with `prefix`, and the number of the last event."""
        found: list[KVChunk] = []
        with self._lock:
            for (tier, namespace), chunks in self._resident.places.items():
                values = iter(chunks.values() if tier is Tier.L1 and namespace.startswith(prefix) else ())
                while part := list(islice(values, _COPIED)):
                    found += part
            return self._number, found

    def status(self) -> KVEventsStatus:
        """Read without the lock, as families(): the loop calls this and must not wait for a snapshot."""
        return KVEventsStatus(
            events=self._number,
            chunks=self._chunks,
            described_chunks=self._described,
            state_bytes=self._bytes,
            unannounced={reason.value: self._unannounced[reason] for reason in Unannounced},
            recounts=self._resyncs,
        )

    def families(self) -> list[Family]:
        return list(families_of(_PUBLISHED, [(self._published, ())]))

    # ---- stored -------------------------------------------------------------------------------

    def _store(self, tier: Tier, time_ns: int, namespace: bytes, keys: bytes, instance_id: str) -> None:
        for part in _parts(_split(keys)):
            if self._confirmed is not None and tier is Tier.L1:
                self._confirmed.setdefault(namespace, set()).update(part)
            with self._lock:
                known = self._resident.places.get((tier, namespace), {})
                # A resync named it before, or its removal was dropped: publish it once.
                if stored := [self._new_chunk(namespace, key) for key in part if key not in known]:
                    self._resident.add(tier, namespace, stored)
                    self._publish(KVStored, time_ns, tier, namespace, tuple(stored), instance_id)

    def _new_chunk(self, namespace: bytes, key: bytes) -> KVChunk:
        self._chunks += 1
        why = self._refused.pop((namespace, key), Unannounced.UNDESCRIBED)
        description = self._expected.pop((namespace, key), None)
        if description is None:
            self._unannounced[why] += 1
        else:
            self._expected_bytes -= description.size
            self._described += 1
        return KVChunk(key, description)

    # ---- removed --------------------------------------------------------------------------------

    def _remove(self, tier: Tier, time_ns: int, namespace: bytes, keys: Sequence[bytes]) -> None:
        for part in _parts(keys):
            with self._lock:
                if removed := self._resident.remove(tier, namespace, part):
                    self._chunks -= len(removed)
                    for chunk in removed:
                        if chunk.description is not None:
                            self._described -= 1
                            self._bytes -= chunk.description.size
                    self._publish(KVRemoved, time_ns, tier, namespace, tuple(removed))

    def _keys(self, tier: Tier, prefix: bytes = b"") -> list[tuple[bytes, list[bytes]]]:
        """The tier's namespaces whose id begins with `prefix`, and their keys."""
        places = self._resident.places.items()
        return [(space, list(chunks)) for (at, space), chunks in places if at is tier and space.startswith(prefix)]

    def _resync(self, event: L1Resynced) -> None:
        match event.part:
            case ResyncPart.BEGIN:
                self._confirmed = {}
            case ResyncPart.SLICE:
                self._store(Tier.L1, event.time_ns, event.namespace, event.keys, "")
            case ResyncPart.END if self._confirmed is not None:
                for namespace, keys in self._keys(Tier.L1):
                    confirmed = self._confirmed.get(namespace, set())
                    self._remove(Tier.L1, event.time_ns, namespace, [key for key in keys if key not in confirmed])
                self._confirmed = None
                self._resyncs += 1

    # ---- descriptions -------------------------------------------------------------------------

    def _describe(self, tier: Tier, event: ChunksDescribed) -> None:
        for part in _parts(list(zip(_split(event.keys), describe(event), strict=True))):
            with self._lock:
                late: list[tuple[KVChunk, KVChunk]] = []  # already READY: without and with its description
                chunks = self._resident.places.get((tier, event.namespace), {})
                for key, description in part:
                    chunk = chunks.get(key)
                    if chunk is None:
                        self._expect((event.namespace, key), description)
                    elif chunk.description is None and description is not None and self._has_room(description):
                        self._bytes += description.size
                        chunks[key] = KVChunk(key, description)
                        late.append((chunk, chunks[key]))
                if late:
                    self._described += len(late)
                    before_all, now_all = zip(*late, strict=True)
                    self._publish(KVRemoved, event.time_ns, tier, event.namespace, before_all)
                    self._publish(KVStored, event.time_ns, tier, event.namespace, now_all, event.instance_id)

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
