"""Makes KV events from the loop's events, and knows the contents of every object in L1 and L2 that an engine described.

Each described object is published once as stored and once as removed, in each tier. Of other objects only the keys are handed
over, and nothing is kept: most daemons publish no KV events.

After dropped events of the loop the hub resyncs a tier. From BEGIN on, all keys of the tier count as removed. The hub notes which
objects a SLICE or a store names, and at END removes all others. L2 may have millions of objects, so the hub notes only those that
are described.

Owns: the numbers of KV events, and what a resync has named. Refuses to know: the observers, and what they do; how objects are
described (`described`). A subscriber of the bus: it runs in the bus's thread. Any thread may call snapshots, `describe_pages()`,
`status()` and `families()`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, islice
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
    L2Cleared,
    L2Removed,
    L2Resynced,
    L2Stored,
    ResyncPart,
    Subscriber,
)
from kvserver.kv_events.described import Described, Unannounced
from kvserver.kv_events.descriptions import describe
from kvserver.kv_events.pages import Pages, Place
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
from kvserver.protocol import SGLANG_HASH
from kvserver.protocol.kv_status import KVEventsStatus
from kvserver.telemetry import Family, Kind, Metric, families_of

_COPIED = 4096  # chunks at a time, between which other threads may run

_Make: TypeAlias = Callable[[bytes], KVChunk | Unannounced]  # the described object of a key
_T = TypeVar("_T")
_PUBLISHED: tuple[Metric[Counter[type[KVEvent]]], ...] = (
    Metric("kvserver_kv_events", "KV events that the daemon published to its observers, by type.", Kind.COUNTER, lambda of: {kind.__struct_config__.tag: of[kind] for kind in get_args(KVEvent)}, ("type",)),
)  # fmt: skip


class Hub(Subscriber):
    name = "kv_events"
    handles = frozenset(
        {
            *(ChunksDescribed, ChunksStored, ChunksEvicted, L1Cleared, L1Resynced),
            *(L2Stored, L2Removed, L2Cleared, L2Resynced, InstanceDescribed, InstanceDisconnected),
        }
    )

    def __init__(self, memory_bytes: int, hand_over: Callable[[DirectEvent], None]) -> None:
        """`hand_over` is called in the order of the events' numbers, and must not wait. `memory_bytes`: most for descriptions."""
        self._hand_over = hand_over
        self._lock = threading.Lock()  # of all below; `hand_over` is called under it
        self._number = 0
        self._memory_bytes = memory_bytes
        self._pages = Pages(memory_bytes // 8)
        self._described = Described(memory_bytes, lambda: self._pages.bytes)
        self.reads_pages = False  # engines' own events are read for descriptions; set before the first event
        # Named since BEGIN, by tier, namespace and group; of tiers whose resync runs.
        self._confirmed: dict[Tier, dict[bytes, dict[int, set[bytes]]]] = {}
        self._readers: set[str] = set()
        self._published: Counter[type[KVEvent]] = Counter()
        self._unannounced: Counter[Unannounced] = Counter()
        self._resyncs = 0

    def handle(self, event: Event) -> None:
        match event:
            case ChunksDescribed():
                self._describe(event)
            case ChunksStored():
                place = event.time_ns, event.namespace, event.group, event.keys
                self._count(self._store_l1(*place, event.instance_id))
            case ChunksEvicted():
                number = None if event.group is None else event.group.number
                self._evict(Tier.L1, event.time_ns, event.namespace, number, _split(event.keys))
            case L2Stored():
                self._count(self._store_l2(event.time_ns, event.namespace, event.group, event.keys))
            case L2Removed():
                self._evict(Tier.L2, event.time_ns, event.namespace, event.group, _split(event.keys))
            case L1Cleared() | L2Cleared():
                tier = Tier.L1 if isinstance(event, L1Cleared) else Tier.L2
                self._clear(tier, event.time_ns, event.namespace)
            case L1Resynced() | L2Resynced():
                self._resync(event)
            case InstanceDescribed():
                scheduler = event.description
                self._readers.add(scheduler.instance_id)
                with self._lock:
                    of_sglang = scheduler.hash_algorithm == SGLANG_HASH and len(event.object_groups) <= 1
                    if self.reads_pages and scheduler.events_endpoint and of_sglang:
                        self._pages.follow(scheduler.instance_id)
                    shape = event.chunk_blocks, event.block_tokens, event.object_groups
                    self._publish(ReaderConnected, event.time_ns, scheduler, event.namespace_prefix, *shape)
            case InstanceDisconnected() if event.instance_id in self._readers:
                self._readers.remove(event.instance_id)
                with self._lock:
                    self._pages.forget(event.instance_id)
                    self._publish(ReaderDisconnected, event.time_ns, event.instance_id, event.model_name)

    def _count(self, unannounced: Counter[Unannounced]) -> None:
        with self._lock:
            self._unannounced += unannounced

    # ---- from any thread ----------------------------------------------------------------------

    def snapshot_of_tiers(self, prefix: bytes) -> tuple[int, list[tuple[Tier, KVChunk]]]:
        """The described objects in the namespaces whose id begins with `prefix`, and the number of the last event."""
        found: list[tuple[Tier, KVChunk]] = []
        with self._lock:
            for (tier, namespace), groups in self._described.resident.places.items():
                of_prefix = groups.values() if namespace.startswith(prefix) else ()
                values = chain.from_iterable(chunks.values() for chunks in of_prefix)
                while part := [(tier, chunk) for chunk in islice(values, _COPIED)]:
                    found += part
            return self._number, found

    def snapshot(self, prefix: bytes) -> tuple[int, list[KVChunk]]:
        """The same, of L1 alone."""
        number, found = self.snapshot_of_tiers(prefix)
        return number, [chunk for tier, chunk in found if tier is Tier.L1]

    def encode_l1(self, and_waiting: bool) -> bytes:
        """The descriptions of all chunks in L1, for a later daemon's restore(); `and_waiting`: also restored ones whose chunk is not READY."""
        with self._lock:
            return self._described.encode_l1(and_waiting)

    def restore(self, raw: bytes) -> None:
        """Describe the chunks that a restart keeps, as soon as they are READY again."""
        with self._lock:
            self._described.restore(raw)

    def status(self) -> KVEventsStatus:
        """Read without the lock, as families(): the loop calls this and must not wait for a snapshot."""
        return KVEventsStatus(
            events=self._number,
            described_chunks=self._described.count,
            state_bytes=self._described.bytes + self._pages.bytes,
            unannounced={
                reason.value: self._unannounced[reason] + self._pages.undescribed * (reason is Unannounced.UNDESCRIBED)
                for reason in Unannounced
            },
            recounts=self._resyncs,
        )

    def families(self) -> list[Family]:
        return list(families_of(_PUBLISHED, [(self._published, ())]))

    # ---- stored -------------------------------------------------------------------------------

    def _store_l1(
        self, time_ns: int, namespace: bytes, group: GroupObjects, keys: bytes, instance_id: str
    ) -> Counter[Unannounced]:
        """Returns how many objects are without a description."""
        without: Counter[Unannounced] = Counter()
        for part in _parts(_split(keys)):
            with self._lock:
                fresh = self._confirm_l1(namespace, group.number, part)
                self._hand_over(KeysStored(Tier.L1, namespace, fresh, group.number))
                if instance_id in self._pages:
                    self._expect_pages(namespace, group, part, instance_id)
                found = self._announce(Tier.L1, time_ns, namespace, group, part, instance_id)
                if instance_id in self._pages and found.pop(Unannounced.UNDESCRIBED, 0):
                    described = self._described.objects(Tier.L1, namespace, group.number)
                    self._pages.wait(instance_id, namespace, group, [key for key in part if key not in described])
                without += found
        return without

    def _expect_pages(self, namespace: bytes, group: GroupObjects, keys: Sequence[bytes], instance_id: str) -> None:
        for key in keys:
            if (page := self._pages.page_of(instance_id, key)) is not None:
                self._described.expect(namespace, group.first, key, page)

    def _confirm_l1(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys that were not handed over as stored since BEGIN; all of them if no resync runs."""
        if Tier.L1 not in self._confirmed:
            return keys
        confirmed = self._confirmed[Tier.L1].setdefault(namespace, {}).setdefault(group, set())
        fresh = [key for key in keys if key not in confirmed]
        confirmed.update(fresh)
        return fresh

    def _store_l2(self, time_ns: int, namespace: bytes, group: int, keys: bytes) -> Counter[Unannounced]:
        """Count objects as stored in L2. What is written to L2 is in L1 then, and is described as there."""
        without: Counter[Unannounced] = Counter()

        def make(key: bytes) -> KVChunk | Unannounced:
            return self._described.twin(Tier.L2, namespace, group, key) or Unannounced.UNDESCRIBED

        for part in _parts(_split(keys)):
            with self._lock:
                self._hand_over(KeysStored(Tier.L2, namespace, part, group))
                waiting = self._pages.in_l2(namespace, part, stored=True)
                without += self._add(Tier.L2, time_ns, namespace, group, part, "", make)
                without[Unannounced.UNDESCRIBED] -= waiting
        return without

    def _announce(
        self, tier: Tier, time_ns: int, namespace: bytes, group: GroupObjects, keys: Sequence[bytes], instance_id: str
    ) -> Counter[Unannounced]:
        """Publish those of the objects that can be described. Returns how many cannot."""

        def make(key: bytes) -> KVChunk | Unannounced:
            return self._described.make(tier, namespace, group, key)

        return self._add(tier, time_ns, namespace, group.number, keys, instance_id, make)

    def _add(
        self,
        tier: Tier,
        time_ns: int,
        namespace: bytes,
        group: int,
        keys: Sequence[bytes],
        instance_id: str,
        make: _Make,
    ) -> Counter[Unannounced]:
        described = self._described.objects(tier, namespace, group)
        without: Counter[Unannounced] = Counter()
        stored: list[KVChunk] = []
        for key in keys:
            if key in described:  # a resync names it, or its removal was dropped
                continue
            chunk = make(key)
            if isinstance(chunk, Unannounced):
                without[chunk] += 1
            else:
                self._described.add(tier, namespace, [chunk])
                stored.append(chunk)
        if stored:
            self._publish(KVStored, time_ns, tier, namespace, tuple(stored), instance_id)
        if tier is Tier.L2 and tier in self._confirmed:
            described = self._described.objects(tier, namespace, group)
            confirmed = self._confirmed[tier].setdefault(namespace, {}).setdefault(group, set())
            confirmed.update(key for key in keys if key in described)
        return without

    # ---- removed --------------------------------------------------------------------------------

    def _evict(self, tier: Tier, time_ns: int, namespace: bytes, group: int | None, keys: Sequence[bytes]) -> None:
        """`group` None: of all groups of chunks."""
        for part in _parts(keys):
            with self._lock:
                self._hand_over(KeysRemoved(tier, namespace, part, group))
                if tier is Tier.L1:
                    self._pages.left(namespace, part)
                else:
                    self._pages.in_l2(namespace, part, stored=False)
        with self._lock:
            for number, confirmed in self._confirmed.get(tier, {}).get(namespace, {}).items():
                if number == group or (group is None and number >= 0):
                    confirmed.difference_update(keys)
            described = list(self._described.resident.places.get((tier, namespace), ()))
        for number in [number for number in described if number >= 0] if group is None else [group]:
            self._remove(tier, time_ns, namespace, number, keys)

    def _clear(self, tier: Tier, time_ns: int, prefix: bytes) -> None:
        with self._lock:
            self._hand_over(KeysCleared(tier, prefix))
            self._pages.cleared(tier, prefix)
            if tier in self._confirmed:
                kept = {space: keys for space, keys in self._confirmed[tier].items() if not space.startswith(prefix)}
                self._confirmed[tier] = kept
            described = self._keys(tier, prefix)
        for namespace, group, keys in described:
            self._remove(tier, time_ns, namespace, group, keys)

    def _remove(self, tier: Tier, time_ns: int, namespace: bytes, group: int, keys: Sequence[bytes]) -> None:
        """Publish those of the objects that are described."""
        for part in _parts(keys):
            with self._lock:
                if not (removed := self._described.remove(tier, namespace, group, part)):
                    continue
                self._publish(KVRemoved, time_ns, tier, namespace, tuple(removed))
                if tier is Tier.L1 and (trimmed := self._described.trim(namespace, group, removed)):
                    self._unannounced[Unannounced.MEMORY] += len(trimmed)
                    self._publish(KVRemoved, time_ns, Tier.L2, namespace, tuple(trimmed))

    def _keys(self, tier: Tier, prefix: bytes = b"") -> list[tuple[bytes, int, list[bytes]]]:
        """The tier's namespaces whose id begins with `prefix`, and by groups the keys of their described objects.

        REQUIRES: the lock is held.
        """
        return [
            (space, group, list(chunks))
            for (at, space), groups in self._described.resident.places.items()
            if at is tier and space.startswith(prefix)
            for group, chunks in groups.items()
        ]

    def _resync(self, event: L1Resynced | L2Resynced) -> None:
        tier = Tier.L1 if isinstance(event, L1Resynced) else Tier.L2
        match event.part:
            case ResyncPart.BEGIN:
                with self._lock:
                    self._confirmed[tier] = {}
                    self._hand_over(KeysCleared(tier, b""))
                    self._pages.cleared(tier, b"")
            case ResyncPart.SLICE:
                if isinstance(event, L1Resynced):
                    self._store_l1(event.time_ns, event.namespace, event.group, event.keys, "")
                else:
                    self._store_l2(event.time_ns, event.namespace, event.group, event.keys)
            case ResyncPart.END if tier in self._confirmed:
                with self._lock:
                    confirmed = self._confirmed.pop(tier)
                    described = self._keys(tier)
                for namespace, group, keys in described:
                    named = confirmed.get(namespace, {}).get(group, set())
                    gone = [key for key in keys if key not in named]
                    self._remove(tier, event.time_ns, namespace, group, gone)
                self._resyncs += 1

    # ---- descriptions -------------------------------------------------------------------------

    def _describe(self, event: ChunksDescribed) -> None:
        first = event.ready[0][0].first
        in_l2 = event.in_l2 or (b"",) * len(event.ready)
        held = [
            (tier, group, set(_split(keys)))
            for (group, ready), stored in zip(event.ready, in_l2, strict=True)
            for tier, keys in ((Tier.L1, ready), (Tier.L2, stored))
        ]
        for part in _parts(list(zip(_split(event.keys), describe(event), strict=True))):
            with self._lock:
                described = self._described.objects(Tier.L1, event.namespace, first)
                for key, description in part:
                    if key not in described:
                        self._described.expect(event.namespace, first, key, description)
                for tier, group, keys in held:
                    late = [key for key, _ in part if key in keys]
                    self._announce(tier, event.time_ns, event.namespace, group, late, event.instance_id)

    def describe_pages(self, instance_id: str, pages: Sequence[Description]) -> None:
        """Describe the chunks of these pages, which the engine's own events name. From any thread."""
        with self._lock:
            places: list[Place] = []
            for page in pages:
                free_bytes = self._memory_bytes - self._described.bytes
                if (place := self._pages.chunk_of(instance_id, page, free_bytes)) is not None:
                    self._described.expect(place.namespace, place.group.first, place.key, page)
                    places.append(place)
            for (namespace, group), run in groupby(places, key=lambda place: place[:2]):
                for of_run in _parts(list(run)):
                    for tier in Tier:
                        keys = [place.key for place in of_run if tier is Tier.L1 or place.in_l2]
                        self._unannounced += self._announce(
                            tier, time.monotonic_ns(), namespace, group, keys, instance_id
                        )

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
    """Parts of at most MOST_CHUNKS items, the limit of one event."""
    return (items[at : at + MOST_CHUNKS] for at in range(0, len(items), MOST_CHUNKS))
