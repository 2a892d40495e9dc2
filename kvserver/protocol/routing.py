"""What engines and the server tell each other for routers: what chunks hold, which tier holds it, how busy an engine is.

Part of `protocol`, since version 3. Owns: the structs. Refuses to know: what becomes of them.

Hashes here are the engine's own hashes of blocks, whole, in bytes; whether they go out so or as the unsigned integer
of their last 8 bytes is the engine's `hash_form`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvserver.protocol.fields import Label, Message, Name, Positive, Small, Text, Unsigned

HashBytes: TypeAlias = Annotated[int, Meta(ge=8, le=32)]
Hash: TypeAlias = Annotated[bytes, Meta(max_length=32)]
Interval: TypeAlias = Annotated[float, Meta(gt=0, le=86400)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
FrontEnd: TypeAlias = Annotated[int, Meta(ge=0, le=1023)]
HashForm: TypeAlias = Literal["", "bytes", "int"]  # "": the engine publishes no KV events

MOST_EXTRA_KEY_BYTES = 1024  # of a ChunkContents, for each block


class ChunkContents(msgspec.Struct, array_like=True, frozen=True):
    """What is in the chunks of a Store, which follow each other in one prompt, each with the last one's end as its start.

    A chunk's key is the hash of its last block, filled up with zeros.
    """

    hash_bytes: HashBytes
    hashes: bytes  # of all blocks in order: chunk_blocks for each chunk
    tokens: bytes  # u32 little-endian: block_tokens for each block
    parent: Hash = b""  # hash of the block before the first; empty at the start of a prompt
    lora_name: Label = ""
    extra_keys: bytes = b""  # msgpack: a list with an array or nil for each block; empty if all are nil


class KVGroup(msgspec.Struct, array_like=True, frozen=True):
    """A KV cache group as vLLM's events describe it."""

    kind: Label  # kv_cache_spec_kind, such as full_attention
    window: Small | None = None  # tokens of a sliding window


class DescribeScheduler(Message):
    """Notice: what the scheduler half knows of its engine. At the start of a session, and when it changed."""

    instance_id: Name
    incarnation: Name
    model_name: Name
    variant: Label  # of requests without a LoRA; with one it begins so too
    hash_form: HashForm = ""
    hash_algorithm: Label = ""
    hash_start: Hash = b""  # what the chain of hashes begins with
    hash_block_tokens: Positive = 1
    groups: Annotated[tuple[KVGroup, ...], Meta(max_length=64)] = ()
    events_endpoint: Text = ""  # where the engine publishes its own KV events, and its topic
    events_replay_endpoint: Text = ""
    events_topic: Label = ""
    private: Label = ""  # why it shares KV with itself only, as far as the scheduler half knows; empty: it does not


class TakeKVEvents(Message):
    """What became of the blocks in L1 and L2 that this instance can read, to be published by itself.

    The first one says `follow` 0. Events are handed over again until the next request's `cursor` has passed them.
    """

    instance_id: Name
    incarnation: Name
    follow: Unsigned = 0
    cursor: Unsigned = 0


class KVBlocks(msgspec.Struct, array_like=True, frozen=True):
    """Consecutive blocks that are held since now, or no longer. Of those that went only the hashes are told."""

    stored: bool
    medium: Label  # CPU, STORAGE
    hash_bytes: HashBytes
    hashes: bytes
    group: Small = 0
    block_tokens: Small = 0
    parent: Hash = b""
    tokens: bytes = b""
    lora_name: Label = ""
    extra_keys: bytes = b""


class KVEventsTaken(Message):
    """`follow` is another than was asked for where the server begins anew, with all that is held now.

    `whole`: all that was held at that beginning has been told; whatever was told in an earlier follow and not again is gone.
    """

    follow: int
    cursor: int  # after these events
    events: list[KVBlocks]
    whole: bool
    more: bool = False  # ask again at once


class EngineLoad(Message):
    """Notice: how busy an engine is. Totals count from the engine's start.

    Of an engine with several front ends each one tells: totals in parts, the rest as the scheduler said it to this one.
    """

    instance_id: Name
    incarnation: Name
    model_name: Name
    interval_seconds: Interval  # until the next one
    running: Unsigned
    waiting: Unsigned
    deferred: Unsigned = 0  # of those waiting, by what is no lack of room
    kv_cache_usage: Share = 0.0
    preemptions: Unsigned = 0
    prompt_tokens: Unsigned = 0
    generation_tokens: Unsigned = 0
    prefix_queries: Unsigned = 0  # tokens looked up in the engine's own prefix cache
    prefix_hits: Unsigned = 0
    external_queries: Unsigned = 0  # tokens asked of the connector
    external_hits: Unsigned = 0
    finished_requests: Unsigned = 0
    front_end: FrontEnd = 0
    as_of_ns: Unsigned = 0  # CLOCK_MONOTONIC when the scheduler said so
