"""What observers of KV events are told.

Owns: the typed events, what is in a chunk, the observer's interface. Refuses to know: who makes the events, what is
made of them.

An observer sees, in this order for each chunk and tier, one KVStored and then one KVRemoved, and never a KVStored of
what it was told of and not yet removed. Events are immutable, and shared between observers.
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
    """With the name that vLLM's events have for it (`medium`)."""

    L1 = "CPU"
    L2 = "STORAGE"


class Description(msgspec.Struct, frozen=True, gc=False):
    """What is in a chunk, as the engine that stored it said."""

    hash_bytes: int
    hashes: bytes  # of its blocks, hash_bytes each
    parent: bytes  # of the block before, b"" at the start of a prompt
    tokens: bytes  # u32 little-endian, block_tokens for each block
    block_tokens: int
    lora_name: str = ""
    extra_keys: bytes = b""  # msgpack: a list with an array or nil for each block; b"": all nil

    @property
    def blocks(self) -> int:
        return len(self.hashes) // self.hash_bytes

    @property
    def size(self) -> int:
        """Bytes of memory, about: what it carries, and its objects."""
        return 320 + len(self.hashes) + len(self.parent) + len(self.tokens) + len(self.extra_keys)


class KVChunk(msgspec.Struct, frozen=True, gc=False):
    """One chunk that a tier holds. `description` is None where nobody said what is in it."""

    key: bytes
    description: Description | None = None


class _KVEvent(msgspec.Struct, frozen=True, tag=True):
    number: int  # counts all events of the daemon, from 1
    time_ns: int  # CLOCK_MONOTONIC


class KVStored(_KVEvent, frozen=True):
    """These chunks became READY in the tier. `instance_id` stored them, "" if that is not known."""

    tier: Tier
    namespace: bytes
    chunks: tuple[KVChunk, ...]
    instance_id: str = ""


class KVRemoved(_KVEvent, frozen=True):
    """These chunks are no longer there; each is as it was stored."""

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
    def reach(self) -> bytes:  # the earlier name, for others' observers
        return self.namespace_prefix


class ReaderDisconnected(_KVEvent, frozen=True, tag="ReaderGone"):
    instance_id: str
    model_name: str


ReaderCame, ReaderGone = ReaderConnected, ReaderDisconnected  # the earlier names, for others' observers

KVEvent: TypeAlias = KVStored | KVRemoved | ReaderConnected | ReaderDisconnected
MOST_CHUNKS = 256  # in one KVStored or KVRemoved


class KVEventObserver(Protocol):
    """Is told of everything from the daemon's start on, in a thread of its own.

    Whoever raises, or does not keep up, is cut off: it hears no more, and /status says why. It may have two methods more,
    which run in the same thread: `status() -> dict`, asked once a second for what /status shows of it, and `close()`,
    called once after its last event.
    """

    def observe(self, event: KVEvent) -> None: ...


# All that L1 holds in the namespaces whose id begins so, and the number of the last event that led there.
Snapshot: TypeAlias = Callable[[bytes], tuple[int, list[KVChunk]]]


def _nothing(prefix: bytes) -> tuple[int, list[KVChunk]]:
    return 0, []


@dataclass(frozen=True)
class ObserverContext:
    settings: Settings
    boot_id: str
    boot_micros: int  # wall clock at the daemon's start
    snapshot: Snapshot = _nothing  # from any thread; it copies references, which may take a while


# What an entry point of GROUP names. None: the settings do not ask for this observer.
MakeObserver: TypeAlias = Callable[[ObserverContext], KVEventObserver | None]
