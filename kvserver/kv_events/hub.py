"""Makes KV events from the loop's events, and knows the contents of every READY chunk.

Owns: the READY chunks with their descriptions, the numbers of KV events, the memory of descriptions. Refuses to know:
the observers, and what they do. A subscriber of the bus: it runs in the bus's thread; `snapshot()`, `status()` and
`families()` may be called from any thread.

Each READY chunk is published once as stored and once as removed. After dropped events of the loop the hub resyncs: at
BEGIN all READY chunks become stale, a SLICE makes the chunks that it names READY again, and at END the chunks that are
still stale are removed.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeAlias

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
)
from kvserver.kv_events.descriptions import describe
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
from kvserver.protocol import KEY_BYTES
from kvserver.telemetry import Family, Kind

_MOST_EXPECTED = 16_384  # descriptions of chunks that are not READY yet, and may never be
_COPIED = 4096  # chunks at a time, between which other threads may run

_Name: TypeAlias = tuple[bytes, bytes]  # namespace, key
_Table: TypeAlias = dict[bytes, dict[bytes, KVChunk]]  # by namespace and key


class Unannounced(enum.Enum):
    """Why a chunk that became READY has no description."""

    UNDESCRIBED = "undescribed"  # no engine described it
    MEMORY = "memory"
    MISMATCHED = "mismatched"  # the description does not fit the chunk


class Hub:
    name = "kv_events"

    def __init__(self, memory_bytes: int, hand_over: Callable[[KVEvent], None]) -> None:
        """`hand_over` is called in the order of the events' numbers, and must not wait. `memory_bytes`: most for descriptions."""
        self._hand_over = hand_over
        self._limit = memory_bytes
        self._lock = threading.Lock()  # of all below; `hand_over` is called under it
        self._number = 0
        self._ready: _Table = {}
        self._stale: _Table = {}  # READY too; empty except during a resync
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
                self._describe(event)
            case ChunksStored():
                self._store(event.time_ns, event.namespace, event.keys, event.instance_id)
            case ChunksEvicted():
                self._evict(event)
            case L1Cleared():
                for table in (self._ready, self._stale):
                    self._drop(event.time_ns, table, event.namespace)
            case L1Resynced():
                self._resync(event)
            case InstanceDescribed():
                scheduler = event.description
                self._readers.add(scheduler.instance_id)
                with self._lock:
                    self._publish(
                        ReaderConnected,
                        event.time_ns,
                        scheduler,
                        event.namespace_prefix,
                        event.chunk_blocks,
                        event.block_tokens,
                    )
            case InstanceDisconnected() if event.instance_id in self._readers:
                self._readers.remove(event.instance_id)
                with self._lock:
                    self._publish(ReaderDisconnected, event.time_ns, event.instance_id, event.model_name)
            case _:
                return

    def close(self) -> None:
        pass

    # ---- from any thread ----------------------------------------------------------------------

    def snapshot(self, prefix: bytes) -> tuple[int, list[KVChunk]]:
        """All that L1 holds in the namespaces whose id begins with `prefix`, and the number of the last event."""
        found: list[KVChunk] = []
        with self._lock:
            for table in (self._ready, self._stale):
                for namespace, chunks in table.items():
                    values = iter(chunks.values() if namespace.startswith(prefix) else ())
                    while part := list(islice(values, _COPIED)):
                        found += part
            return self._number, found

    def status(self) -> dict[str, Any]:
        """Read without the lock, as families(): the loop calls this and must not wait for a snapshot."""
        return {
            "events": self._number,
            "chunks": self._chunks,
            "described_chunks": self._described,
            "state_bytes": self._bytes,
            "unannounced": {reason.value: self._unannounced[reason] for reason in Unannounced},
            "recounts": self._resyncs,
        }

    def families(self) -> list[Family]:
        published = Family(
            "kvserver_kv_events",
            "KV events that the daemon published to its observers, by type.",
            Kind.COUNTER,
            ("type",),
        )
        for kind in (KVStored, KVRemoved, ReaderConnected, ReaderDisconnected):
            published.add(self._published[kind], str(kind.__struct_config__.tag))
        missing = Family(
            "kvserver_kv_events_unannounced_chunks",
            "Chunks that became READY and could not be published as KV events, by reason.",
            Kind.COUNTER,
            ("reason",),
        )
        for reason in Unannounced:
            missing.add(self._unannounced[reason], reason.value)
        described = Family(
            "kvserver_kv_events_described_chunks", "Chunks of L1 that are READY and whose tokens are known.", Kind.GAUGE
        )
        state = Family("kvserver_kv_events_state_bytes", "Memory that the descriptions of chunks use.", Kind.GAUGE)
        return [published, missing, described.add(self._described), state.add(self._bytes)]

    # ---- stored -------------------------------------------------------------------------------

    def _store(self, time_ns: int, namespace: bytes, keys: bytes, instance_id: str) -> None:
        for part in _parts(keys):
            with self._lock:
                ready = self._ready.setdefault(namespace, {})
                stale = self._stale.get(namespace, {})
                stored = []
                for key in part:
                    if key in ready:  # named by a resync before, or its removal was dropped: publish it once
                        continue
                    if (chunk := stale.pop(key, None)) is None:
                        chunk = self._new_chunk(namespace, key)
                        stored.append(chunk)
                    ready[key] = chunk
                if stored:
                    self._publish(KVStored, time_ns, Tier.L1, namespace, tuple(stored), instance_id)

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

    def _evict(self, event: ChunksEvicted) -> None:
        for part in _parts(event.keys):
            with self._lock:
                removed: list[KVChunk] = []
                for table in (self._ready, self._stale):
                    chunks = table.get(event.namespace)
                    if chunks is not None:
                        removed += [chunk for key in part if (chunk := chunks.pop(key, None)) is not None]
                        if not chunks:
                            del table[event.namespace]
                self._publish_removed(event.time_ns, event.namespace, removed)

    def _drop(self, time_ns: int, table: _Table, base: bytes) -> None:
        """Remove all chunks in the table's namespaces whose id begins with `base`."""
        for namespace in [namespace for namespace in table if namespace.startswith(base)]:
            chunks = table[namespace]
            while chunks:
                with self._lock:
                    removed = [chunks.popitem()[1] for _ in range(min(len(chunks), MOST_CHUNKS))]
                    self._publish_removed(time_ns, namespace, removed)
            with self._lock:
                del table[namespace]

    def _publish_removed(self, time_ns: int, namespace: bytes, removed: Sequence[KVChunk]) -> None:
        if not removed:
            return
        self._chunks -= len(removed)
        for chunk in removed:
            if chunk.description is not None:
                self._described -= 1
                self._bytes -= chunk.description.size
        self._publish(KVRemoved, time_ns, Tier.L1, namespace, tuple(removed))

    def _resync(self, event: L1Resynced) -> None:
        match event.part:
            case ResyncPart.BEGIN:
                with self._lock:
                    for namespace, chunks in self._ready.items():
                        self._stale.setdefault(namespace, chunks).update(chunks)  # of an earlier one that did not end
                    self._ready = {}
            case ResyncPart.SLICE:
                self._store(event.time_ns, event.namespace, event.keys, "")
            case ResyncPart.END:
                self._drop(event.time_ns, self._stale, b"")
                self._resyncs += 1

    # ---- descriptions -------------------------------------------------------------------------

    def _describe(self, event: ChunksDescribed) -> None:
        pairs = list(zip((key for part in _parts(event.keys) for key in part), describe(event), strict=True))
        for at in range(0, len(pairs), MOST_CHUNKS):
            with self._lock:
                late: list[tuple[KVChunk, KVChunk]] = []  # already READY: without and with its description
                for key, description in pairs[at : at + MOST_CHUNKS]:
                    chunks = self._table_with(event.namespace, key)
                    if chunks is None:
                        self._expect((event.namespace, key), description)
                    elif chunks[key].description is None and description is not None and self._has_room(description):
                        self._bytes += description.size
                        late.append((chunks[key], KVChunk(key, description)))
                        chunks[key] = late[-1][1]
                if late:
                    self._described += len(late)
                    before_all, now_all = zip(*late, strict=True)
                    self._publish(KVRemoved, event.time_ns, Tier.L1, event.namespace, before_all)
                    self._publish(KVStored, event.time_ns, Tier.L1, event.namespace, now_all, event.instance_id)

    def _table_with(self, namespace: bytes, key: bytes) -> dict[bytes, KVChunk] | None:
        for table in (self._ready, self._stale):
            if (chunks := table.get(namespace)) is not None and key in chunks:
                return chunks
        return None

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


def _parts(keys: bytes) -> list[list[bytes]]:
    """The keys in lists of at most MOST_CHUNKS, the limit of one event."""
    found = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
    return [found[at : at + MOST_CHUNKS] for at in range(0, len(found), MOST_CHUNKS)]
