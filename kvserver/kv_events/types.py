"""KV events that observers receive.

For each described chunk and tier an observer receives KVStored and KVRemoved in turn, KVStored first. Events are immutable, and
shared between observers. Direct observers also receive the keys of all chunks, described or not.

Owns: the typed events, the description of a chunk, the observer's interface. Refuses to know: how events are made or used.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec

from kvserver.config import Settings
from kvserver.protocol import DescribeScheduler, ObjectGroup

GROUP = "kvserver.kv_event_observers"  # the entry point group


class Tier(enum.Enum):
    """Tier of a chunk. The values are the names in vLLM's events (`medium`)."""

    L1 = "CPU"
    L2 = "STORAGE"


Members: TypeAlias = tuple[int, ...]  # KV cache groups, as the engine numbers them; (): all


class Description(msgspec.Struct, frozen=True, gc=False):
    """Contents of an object, as reported by the engine that stored it: the last blocks of a chunk, mostly all of them."""

    hash_bytes: int
    hashes: bytes  # of the blocks, hash_bytes each
    parent: bytes  # the hash of the block before; b"" at the start of a prompt
    tokens: bytes  # u32 little-endian, block_tokens for each block
    block_tokens: int
    lora_name: str = ""
    extra_keys: bytes = b""  # msgpack: a list with an array or nil for each block; b"": all nil
    members: Members = ()  # KV cache groups that have the blocks
    session_id: str = ""  # of the request that stored it first; others may use it

    @property
    def blocks(self) -> int:
        return len(self.hashes) // self.hash_bytes

    @property
    def size(self) -> int:
        """Bytes of memory, approximately: the contents and the Python objects."""
        session = sys.getsizeof(self.session_id) if self.session_id else 0  # each counts it, although they may share it
        return 320 + len(self.hashes) + len(self.parent) + len(self.tokens) + len(self.extra_keys) + session


class CoarseDescription(Description, frozen=True, gc=False, kw_only=True):
    """Description of the first group's object where other groups have smaller blocks: `chunk` describes their objects."""

    chunk: Description

    @property
    def size(self) -> int:
        return super().size + self.chunk.size - len(self.tokens)  # which are the chunk's


class KVChunk(msgspec.Struct, frozen=True, gc=False):
    """A chunk in a tier, or a single block behind a prompt's last chunk.

    Of an engine with several object groups it is the object of one of them (`description.members`). An object that is in both
    tiers is one KVChunk.
    """

    key: bytes
    description: Description
    group: int = 0  # number of the object group; of its single blocks -1 - number


class _KVEvent(msgspec.Struct, frozen=True, tag=True):
    number: int  # counts all events of the daemon, from 1
    time_ns: int  # CLOCK_MONOTONIC


class KVStored(_KVEvent, frozen=True):
    """Chunks became READY in the tier and are described. `instance_id`: the instance that stored or described them; "" if unknown."""

    tier: Tier
    namespace: bytes
    chunks: tuple[KVChunk, ...]
    instance_id: str = ""


class KVRemoved(_KVEvent, frozen=True):
    """Chunks left the tier. Each chunk is the one of its KVStored."""

    tier: Tier
    namespace: bytes
    chunks: tuple[KVChunk, ...]


class ReaderConnected(_KVEvent, frozen=True, tag="ReaderCame"):
    """An instance can from now on read the namespaces whose id begins with `namespace_prefix`, and no others.

    Published again when the prefix or the description of a connected instance changes.
    """

    scheduler: DescribeScheduler
    namespace_prefix: bytes = msgspec.field(name="reach")
    chunk_blocks: int
    block_tokens: int
    object_groups: tuple[ObjectGroup, ...] = ()  # (): one of full attention

    @property
    def instance_id(self) -> str:
        return self.scheduler.instance_id

    @property
    def reach(self) -> bytes:  # the earlier name, for others' observers
        return self.namespace_prefix


class ReaderDisconnected(_KVEvent, frozen=True, tag="ReaderGone"):
    instance_id: str
    model_name: str


ReaderCame, ReaderGone = ReaderConnected, ReaderDisconnected  # the earlier names, for others' observers

KVEvent: TypeAlias = KVStored | KVRemoved | ReaderConnected | ReaderDisconnected
MOST_CHUNKS = 256  # in one event


class KeysStored(msgspec.Struct, frozen=True, gc=False):
    """Chunks' objects of a group became READY in the tier."""

    tier: Tier
    namespace: bytes
    keys: Sequence[bytes]
    group: int = 0  # as of a KVChunk


class KeysRemoved(msgspec.Struct, frozen=True, gc=False):
    """Chunks' objects left the tier. Some may never have been there."""

    tier: Tier
    namespace: bytes
    keys: Sequence[bytes]
    group: int | None = None  # None: of all groups of chunks, but no single blocks


class KeysCleared(msgspec.Struct, frozen=True, gc=False):
    """All chunks of the namespaces whose id begins with `namespace_prefix` left the tier. The prefix has no part of a LoRA."""

    tier: Tier
    namespace_prefix: bytes


DirectEvent: TypeAlias = KVEvent | KeysStored | KeysRemoved | KeysCleared


class KVEventObserver(Protocol):
    """Receives all KV events from the daemon's start on, in a thread of its own.

    An observer that raises, stalls or does not keep up is cut off: it receives no more events, and /status shows the reason. An
    observer may have two more methods, called in the same thread. `status() -> dict` is called once a second, and /status shows
    its result. `close()` is called once, after the last event.
    """

    def observe(self, event: KVEvent) -> None: ...


class DirectObserver(Protocol):
    """Observer of the daemon's own, called by one thread at a time; it may have the same two methods."""

    def observe(self, event: DirectEvent) -> None: ...


# From a namespace prefix to the number of the last event and the described chunks that are in L1 after that event, or in
# both tiers.
Snapshot: TypeAlias = Callable[[bytes], tuple[int, list[KVChunk]]]
SnapshotOfTiers: TypeAlias = Callable[[bytes], tuple[int, list[tuple[Tier, KVChunk]]]]


def _nothing(prefix: bytes) -> tuple[int, list[Any]]:
    return 0, []


@dataclass(frozen=True)
class ObserverContext:
    settings: Settings
    boot_id: str
    boot_micros: int  # wall clock at the daemon's start, in microseconds
    snapshot: Snapshot = _nothing  # both callable from any thread; may take long: they copy references to all chunks
    snapshot_of_tiers: SnapshotOfTiers = _nothing


# The function that an entry point of GROUP names. It returns None if the settings do not enable the observer.
MakeObserver: TypeAlias = Callable[[ObserverContext], KVEventObserver | None]
