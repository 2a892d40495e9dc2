"""Finds how much of a prompt each engine has in its own memory, in L1 and in L2: a direct observer of KV events.

L1 and L2 are kept by namespace prefix and object group: all engines with the same prefix find the same chunks there. Chunks that
no engine can read now stay known for the next engine that can. Only the keys of chunks are needed. So chunks without a
description count too, such as those that a tier of L2 found at its start. While the hub resyncs a tier, its chunks are missing
until it names them.

Owns: which owner in the index is which tier and group of which namespace prefix. Refuses to know: hashes from tokens, HTTP.
"""

from __future__ import annotations

import secrets
import threading
from array import array
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kvserver._native import PrefixIndex
from kvserver.cache import epoch_of
from kvserver.config import parse_size
from kvserver.kv_events import (
    DirectEvent,
    KeysCleared,
    KeysRemoved,
    KeysStored,
    ObserverContext,
    ReaderConnected,
    ReaderDisconnected,
    Tier,
)
from kvserver.protocol import KEY_BYTES
from kvserver.protocol.kv_status import EngineEventsStatus, IndexStatus
from kvserver.routing.boundaries import has_boundaries, hit_units, unit_tokens
from kvserver.routing.engine_stream import FOLLOWING
from kvserver.routing.engine_subscription import DescribePages
from kvserver.routing.engines import EngineEvents
from kvserver.telemetry import Family, Kind, Metric, families_of

_KNOWN_BYTES = 8  # the end of a hash
_SHORT = 16  # bytes of a short hash
_PADDING = bytes(KEY_BYTES - _SHORT)


_INDEX: tuple[Metric[IndexStatus], ...] = (
    Metric("kvserver_kv_index_blocks", "Blocks and chunks that POST /kv/match can find.", Kind.GAUGE, lambda of: of.blocks),
    Metric("kvserver_kv_index_bytes", "Memory of the index that answers POST /kv/match.", Kind.GAUGE, lambda of: of.memory_bytes),
    Metric("kvserver_kv_index_refused_blocks", "Blocks that POST /kv/match cannot find because its index had no space or no owner for them.", Kind.COUNTER, lambda of: of.refused_blocks),
)  # fmt: skip
_ENGINES: tuple[Metric[EngineEventsStatus], ...] = (
    Metric("kvserver_engine_events_following", "1 while the daemon reads the KV events that an engine publishes itself, 0 if it cannot.", Kind.GAUGE, lambda of: +(of.state in FOLLOWING)),
    Metric("kvserver_engine_events_gaps", "Gaps in an engine's own KV events that no replay filled: what the engine has in L0 is then unknown.", Kind.COUNTER, lambda of: of.lost_gaps),
)  # fmt: skip


class Match(NamedTuple):
    """Leading blocks in each tier alone, and in all of them together.

    `l1` is what a lookup finds at once, `l1_l2` what it finds after a fill; both have the single blocks behind its chunks.
    """

    l0: int
    l1: int
    l2: int
    l1_l2: int
    best: int


class KVIndex:
    """Index of prefixes. REQUIRES: observe() and close() are not called at once; any thread may call the rest."""

    def __init__(self, most_bytes: int, follow_engines: bool) -> None:
        self._index = PrefixIndex(secrets.randbits(64), most_bytes)
        self._most_bytes = most_bytes
        self._engines = EngineEvents(self._index)
        self._follow_engines = follow_engines
        self._lock = threading.Lock()  # of the two below
        self._known: dict[str, ReaderConnected] = {}  # the engines that described themselves
        # In the index, by namespace prefix, then by tier and object group.
        self._owners: dict[bytes, dict[tuple[Tier, int], int]] = {}
        self._has_tails = False  # single blocks were stored once
        self._dropped_prefixes = 0
        self._ownerless_chunks = 0  # stored while the index had no free owner, or no room for L2

    def read_pages(self, describe: DescribePages) -> None:
        """Hand the pages that engines' own events describe to `describe`. REQUIRES: before the first event."""
        self._engines.describe = describe

    # ---- KV events ----------------------------------------------------------------------

    def observe(self, event: DirectEvent) -> None:
        match event:
            case KeysStored(tier=Tier.L2) if self._index.memory_bytes > self._most_bytes // 4 * 3:
                self._ownerless_chunks += len(event.keys)  # the rest is L0's and L1's
            case KeysStored():
                owner = self._owner(epoch_of(event.namespace), (event.tier, event.group))
                if owner >= 0:
                    self._index.add_blocks(owner, _ends(event.keys), _KNOWN_BYTES)
                else:
                    self._ownerless_chunks += len(event.keys)
            case KeysRemoved():
                namespace_prefix = epoch_of(event.namespace)
                for (tier, group), owner in self._owners.get(namespace_prefix, {}).items():
                    if tier is event.tier and (group >= 0 if event.group is None else group == event.group):
                        self._index.remove_blocks(owner, _ends(event.keys), _KNOWN_BYTES)
                self._forget_if_empty(namespace_prefix)
            case KeysCleared():
                self._clear(event)
            case ReaderConnected():
                self._reader_connected(event)
            case ReaderDisconnected():
                self._reader_disconnected(event.instance_id)

    def _clear(self, event: KeysCleared) -> None:
        for namespace_prefix, owners in list(self._owners.items()):
            if namespace_prefix.startswith(event.namespace_prefix):
                for (tier, _), owner in owners.items():
                    if tier is event.tier:
                        self._index.clear_owner(owner)
                self._forget_if_empty(namespace_prefix)

    def _reader_connected(self, event: ReaderConnected) -> None:
        with self._lock:
            before = self._known.get(event.instance_id)
            self._known[event.instance_id] = event
        if before is not None:
            self._forget_if_empty(before.namespace_prefix)
        if self._follow_engines:
            groups = event.object_groups
            members = tuple(group.members[0] for group in groups) if len(groups) > 1 else ()
            if event.scheduler.events_endpoint and not self._engines.index_owners(event.instance_id):
                self._free_owners(max(1, len(members)))
            self._engines.follow_engine(event.scheduler, members)

    def _reader_disconnected(self, instance_id: str) -> None:
        with self._lock:
            engine = self._known.pop(instance_id, None)
        self._engines.forget_engine(instance_id)
        if engine is not None:
            self._forget_if_empty(engine.namespace_prefix)

    def _owner(self, namespace_prefix: bytes, place: tuple[Tier, int]) -> int:
        """The owner of a group of a namespace prefix in a tier, opened if needed; -1 if the index has no free owner."""
        owner = self._owners.get(namespace_prefix, {}).get(place, -1)
        if owner >= 0:
            return owner
        owner = self._index.add_owner()
        if owner < 0 and self._drop_unread():
            owner = self._index.add_owner()
        if owner >= 0:
            with self._lock:
                self._owners.setdefault(namespace_prefix, {})[place] = owner
                self._has_tails |= place[1] < 0
        return owner

    def _free_owners(self, count: int) -> None:
        """Drop namespace prefixes that no engine can read now until so many owners are free."""
        enough = False
        while not enough:
            owners = [self._index.add_owner() for _ in range(count)]
            enough = min(owners) >= 0
            for owner in owners:
                if owner >= 0:
                    self._index.remove_owner(owner)
            if not enough and not self._drop_unread():
                return

    def _drop_unread(self) -> bool:
        """Drop a namespace prefix that no engine can read now. False if there is none."""
        read = {engine.namespace_prefix for engine in self._known.values()}
        unread = next((namespace_prefix for namespace_prefix in self._owners if namespace_prefix not in read), None)
        if unread is None:
            return False
        self._dropped_prefixes += 1
        self._close(unread)
        return True

    def _forget_if_empty(self, namespace_prefix: bytes) -> None:
        """Forget a namespace prefix without chunks and engines."""
        read = any(engine.namespace_prefix == namespace_prefix for engine in self._known.values())
        if not read and not any(map(self._size_of, self._owners.get(namespace_prefix, {}).values())):
            self._close(namespace_prefix)

    def _close(self, namespace_prefix: bytes) -> None:
        with self._lock:
            owners = self._owners.pop(namespace_prefix, {})
        for owner in owners.values():
            self._index.remove_owner(owner)

    # ---- queries ------------------------------------------------------------------------------

    def known_engines(self, model_name: str = "", instance_ids: Collection[str] = ()) -> list[ReaderConnected]:
        """All engines, restricted to the model and to the instances if given."""
        with self._lock:
            engines = list(self._known.values())
        return [
            engine
            for engine in engines
            if (not model_name or engine.scheduler.model_name == model_name)
            and (not instance_ids or engine.instance_id in instance_ids)
        ]

    def match(
        self, engines: Sequence[ReaderConnected], hashes: bytes | memoryview, hash_bytes: int, tokens: int = 0
    ) -> list[Match]:
        """The match of each engine, for block hashes end to end. ValueError unless they are whole, 8 to 32 bytes each.

        `tokens`: of the prompt, 0 if not known. An engine with a window or a state computes one of them in any case.
        """
        plain = iter(self._plain([of for of in engines if not has_boundaries(of.object_groups)], hashes, hash_bytes))
        found = [
            self._boundaries(engine, hashes, hash_bytes, tokens)
            if has_boundaries(engine.object_groups)
            else next(plain)
            for engine in engines
        ]
        if not self._has_tails:
            return found
        return [self._with_tail(*each, hashes, hash_bytes) for each in zip(engines, found, strict=True)]

    def _plain(self, engines: Sequence[ReaderConnected], hashes: bytes | memoryview, hash_bytes: int) -> list[Match]:
        """Matches of engines whose hit is the prompt's leading blocks."""
        readers = [self._tiers(engine) for engine in engines]
        without_l0 = [(-1, l1, l2, blocks) for _, l1, l2, blocks in readers if l2 >= 0]
        found = self._index.match(hashes, hash_bytes, readers + without_l0)
        l1_l2 = iter([best for *_, best in found[len(readers) :]])
        return [
            Match(l0, l1, l2, next(l1_l2) if reader[2] >= 0 else l1, best)
            for reader, (l0, l1, l2, best) in zip(readers, found, strict=False)
        ]

    def _boundaries(self, engine: ReaderConnected, hashes: bytes | memoryview, hash_bytes: int, tokens: int) -> Match:
        """Boundary that a lookup finds in each tier, and in L1 and L2 together."""
        own_blocks = unit_tokens(engine.object_groups) // engine.block_tokens
        own = [_bits(owner) for owner in self._engines.index_owners(engine.instance_id)]
        l1, l2 = ([_bits(owner) for owner in self._tier_owners(engine, tier)] for tier in Tier)
        both = [first | second for first, second in zip(l1, l2, strict=True)]
        (l0,) = self._hit_blocks(engine, [own], own_blocks, hashes, hash_bytes, tokens)
        tiers = self._hit_blocks(
            engine, [l1, l2, both] if any(l2) else [l1], engine.chunk_blocks, hashes, hash_bytes, tokens
        )
        in_l1, in_l2, in_both = tiers if any(l2) else (*tiers, 0, *tiers)
        return Match(l0, in_l1, in_l2, in_both, max(l0, in_both))

    def _hit_blocks(
        self,
        engine: ReaderConnected,
        tiers: Sequence[Sequence[int]],
        blocks: int,
        hashes: bytes | memoryview,
        hash_bytes: int,
        tokens: int,
    ) -> list[int]:
        """Blocks of the hit in each of these tiers, where hits are multiples of `blocks` blocks. A tier is the owners' bits of each group."""
        if not any(map(any, tiers)):
            return [0] * len(tiers)
        groups, size = engine.object_groups, blocks * engine.block_tokens
        units = array("Q", self._index.owners_of(hashes, hash_bytes, blocks))
        if tokens and any(group.kind != "full" for group in groups):
            del units[(tokens - 1) // size :]
        return [blocks * hit_units(groups, size, units, owners) if any(owners) else 0 for owners in tiers]

    def _with_tail(self, engine: ReaderConnected, match: Match, hashes: bytes | memoryview, hash_bytes: int) -> Match:
        """Match with the single blocks that a lookup finds behind the chunks: of the first missed chunk, unless L2 has that chunk.

        After a fill that ends before the prompt's last chunk none are looked up.
        """
        owners = self._tier_owners(engine, Tier.L1, tails=True)
        if min(owners) < 0:
            return match
        wanted, size = sum(map(_bits, owners)), engine.chunk_blocks
        whole = len(hashes) // hash_bytes // size * size

        def behind(blocks: int) -> int:
            part = memoryview(hashes)[blocks * hash_bytes : (blocks + size) * hash_bytes]
            found = array("Q", self._index.owners_of(part, hash_bytes, 1))
            return blocks + next((at for at, bits in enumerate(found) if bits & wanted != wanted), len(found))

        l1 = behind(match.l1)
        l1_l2 = l1 if match.l1_l2 == match.l1 else behind(whole) if match.l1_l2 == whole else match.l1_l2
        return match._replace(l1=l1, l1_l2=l1_l2, best=max(match.best, l1_l2))

    def _tier_owners(self, engine: ReaderConnected, tier: Tier, tails: bool = False) -> tuple[int, ...]:
        """Owners by object group, or by that of their single blocks; -1: the group has none."""
        with self._lock:
            owners = self._owners.get(engine.namespace_prefix, {})
            groups = range(max(1, len(engine.object_groups)))
            return tuple(owners.get((tier, -1 - group if tails else group), -1) for group in groups)

    def _tiers(self, engine: ReaderConnected) -> tuple[int, int, int, int]:
        """Owners of the first object group in each tier, and the blocks of a chunk."""
        l0 = next(iter(self._engines.index_owners(engine.instance_id)), -1)
        l1, l2 = (self._tier_owners(engine, tier)[0] for tier in Tier)
        return l0, l1, l2, engine.chunk_blocks

    def instance(self, instance_id: str) -> dict[str, Any] | None:
        """The cache of an engine for `GET /instances`; None if the engine did not describe itself."""
        with self._lock:
            engine = self._known.get(instance_id)
        if engine is None:
            return None
        l0, l1, l2, _ = self._tiers(engine)
        return {
            "incarnation": engine.scheduler.incarnation,
            "reach": engine.namespace_prefix.hex(),
            "hash_form": engine.scheduler.hash_form,
            "hash_algorithm": engine.scheduler.hash_algorithm,
            "l0": {"blocks": self._size_of(l0), "kv_events": self._engines.status(instance_id)},
            "l1": {"chunks": self._size_of(l1)},
            "l2": {"chunks": self._size_of(l2)},
        }

    def _size_of(self, owner: int) -> int:
        try:
            return self._index.owned_blocks(owner) if owner >= 0 else 0
        except ValueError:  # closed meanwhile
            return 0

    def status(self) -> IndexStatus:
        return IndexStatus(
            blocks=len(self._index),
            memory_bytes=self._index.memory_bytes,
            most_bytes=self._most_bytes,
            refused_blocks=self._index.refused + self._ownerless_chunks,
            dropped_reaches=self._dropped_prefixes,
            engines={engine.instance_id: self._engines.status(engine.instance_id) for engine in self.known_engines()},
        )

    def families(self) -> list[Family]:
        status = self.status()
        names = {
            engine.instance_id: (engine.instance_id, engine.scheduler.model_name) for engine in self.known_engines()
        }
        engines = [(of, names[name]) for name, of in status.engines.items() if of is not None and name in names]
        return [*families_of(_INDEX, [(status, ())]), *families_of(_ENGINES, engines, ("instance_id", "model_name"))]

    def close(self) -> None:
        self._engines.close()


def _bits(owner: int) -> int:
    return 1 << owner if owner >= 0 else 0


def _ends(keys: Sequence[bytes]) -> bytes:
    """The last _KNOWN_BYTES of each chunk's hash. A key is a hash of 16 or 32 bytes, padded with zeros."""
    return b"".join(
        [key[_SHORT - _KNOWN_BYTES : _SHORT] if key.endswith(_PADDING) else key[-_KNOWN_BYTES:] for key in keys]
    )


def make_index(context: ObserverContext) -> KVIndex:
    settings = context.settings
    return KVIndex(parse_size(settings.kv_index_size), settings.engine_kv_events == "auto")
