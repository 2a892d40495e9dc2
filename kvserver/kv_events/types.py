"""The KV events that observers receive.

Owns: the typed events, the description of a chunk, the observer's interface. Refuses to know: how events are made or used.

For each chunk and tier an observer receives KVStored and KVRemoved in turn, KVStored first. Events are immutable, and
shared between observers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from kvserver.config import Settings
from kvserver.protocol import DescribeScheduler

GROUP = "kvserver.kv_event_observers"  # the entry point group


class Tier(enum.Enum):
    """The values are the names in vLLM's events (`medium`)."""

    L1 = "CPU"
    L2 = "STORAGE"


class Description(msgspec.Struct, frozen=True, gc=False):
    """What is in a chunk, as reported by the engine that stored it."""

    hash_bytes: int
    hashes: bytes  # of the chunk's blocks, hash_bytes each
    parent: bytes  # the hash of the block before; b"" at the start of a prompt
    tokens: bytes  # u32 little-endian, block_tokens for each block
    block_tokens: int
    lora_name: str = ""
    extra_keys: bytes = b""  # msgpack: a list with an array or nil for each block; b"": all nil

    @property
    def blocks(self) -> int:
        return len(self.hashes) // self.hash_bytes

    @property
    def size(self) -> int:
        """Bytes of memory, approximately: the contents and the Python objects."""
        return 320 + len(self.hashes) + len(self.parent) + len(self.tokens) + len(self.extra_keys)


class KVChunk(msgspec.Struct, frozen=True, gc=False):
    """One chunk in a tier. `description` is None if no engine described the chunk."""

    key: bytes
    description: Description | None = None


class _KVEvent(msgspec.Struct, frozen=True, tag=True):
    number: int  # counts all events of the daemon, from 1
    time_ns: int  # CLOCK_MONOTONIC


class KVStored(_KVEvent, frozen=True):
    """These chunks became READY in the tier. `instance_id`: the instance that stored them; "" if unknown."""

    tier: Tier
    namespace: bytes
    chunks: tuple[KVChunk, ...]
    instance_id: str = ""


class KVRemoved(_KVEvent, frozen=True):
    """These chunks left the tier. Each chunk is the one of its KVStored."""

    tier: Tier
    namespace: bytes
    chunks: tuple[KVChunk, ...]


class ReaderConnected(_KVEvent, frozen=True, tag="ReaderCame"):
    """From now on the instance can read the namespaces whose id begins with `namespace_prefix`, and no others.

    Published again when the prefix or the description of a connected instance changes.
    """

    scheduler: DescribeScheduler
    namespace_prefix: bytes = msgspec.field(name="reach")
    chunk_blocks: int
    block_tokens: int

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
MOST_CHUNKS = 256  # in one KVStored or KVRemoved


class KVEventObserver(Protocol):
    """Receives all KV events since the daemon's start, in a thread of its own.

    An observer that raises, stalls or does not keep up is cut off: it receives no more events, and /status shows the
    reason. An observer may have two more methods, called in the same thread: `status() -> dict`, once a second, whose
    result /status shows, and `close()`, once, after the last event.
    """

    def observe(self, event: KVEvent) -> None: ...


# From a namespace prefix to the number of the last event and all chunks that are in L1 after that event.
Snapshot: TypeAlias = Callable[[bytes], tuple[int, list[KVChunk]]]


def _nothing(prefix: bytes) -> tuple[int, list[KVChunk]]:
    return 0, []


@dataclass(frozen=True)
class ObserverContext:
    settings: Settings
    boot_id: str
    boot_micros: int  # wall clock at the daemon's start, in microseconds
    snapshot: Snapshot = _nothing  # callable from any thread; may take long: it copies references to all chunks


# The function that an entry point of GROUP names. It returns None if the settings do not enable the observer.
MakeObserver: TypeAlias = Callable[[ObserverContext], KVEventObserver | None]
