"""The messages for routers: contents of chunks, tiers of blocks, and engine stats.

Owns: the structs. Refuses to know: their use.

Hashes here are the engine's own block hashes, whole, in bytes. The engine's `hash_form` states whether KV events carry
these bytes or the unsigned integer of their last 8 bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvserver.protocol.fields import Durability, Label, Message, Name, Positive, Small, Text, Unsigned

HashBytes: TypeAlias = Annotated[int, Meta(ge=8, le=32)]
Hash: TypeAlias = Annotated[bytes, Meta(max_length=32)]
Interval: TypeAlias = Annotated[float, Meta(gt=0, le=86400)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
FrontEnd: TypeAlias = Annotated[int, Meta(ge=0, le=1023)]
HashForm: TypeAlias = Literal["", "bytes", "int"]  # "": the engine publishes no KV events

# DescribeScheduler.hash_algorithm of SGLang: SHA-256 over the page before and the page's tokens, u32 little-endian. Its short form is
# the first 8 bytes. Keys of such engines are the hash with its first 8 bytes moved to the end, so that they end in the short form.
SGLANG_HASH = "sglang_sha256"
SGLANG_PAIRS_HASH = "sglang_sha256_pairs"  # each token is hashed with the next one: a draft's KV depends on both
SGLANG_HASHES = (SGLANG_HASH, SGLANG_PAIRS_HASH)
MOST_EXTRA_KEY_BYTES = 1024  # for each block of a ChunkContents


class ChunkContents(msgspec.Struct, array_like=True, frozen=True):
    """The contents of a Store's chunks, which are consecutive chunks of one prompt.

    A chunk's key is the hash of its last block, padded with zeros. Where the blocks of KV cache groups differ in size, the
    blocks here are what every size is a multiple of.
    """

    hash_bytes: HashBytes
    hashes: bytes  # of all blocks in order, as many for each chunk
    tokens: bytes  # u32 little-endian: the token ids of all blocks
    parent: Hash = b""  # hash of the block before the first; empty at the start of a prompt
    lora_name: Label = ""
    extra_keys: bytes = b""  # msgpack: a list with an array or nil for each block; empty if all are nil


class KVGroup(msgspec.Struct, array_like=True, frozen=True):
    """A KV cache group as vLLM's events describe it."""

    kind: Label  # kv_cache_spec_kind, such as full_attention
    window: Small | None = None  # tokens of a sliding window


class DescribeScheduler(Message):
    """Notice: facts that the scheduler half knows of its engine. Sent at the start of a session and after changes."""

    instance_id: Name
    incarnation: Name
    model_name: Name
    variant: Label  # of requests without a LoRA; the variant with a LoRA begins with it
    hash_form: HashForm = ""
    hash_algorithm: Label = ""
    hash_start: Hash = b""  # the value that the chain of hashes begins with
    hash_block_tokens: Positive = 1
    groups: Annotated[tuple[KVGroup, ...], Meta(max_length=64)] = ()
    events_endpoint: Text = ""  # where the engine publishes its own KV events
    events_replay_endpoint: Text = ""
    events_topic: Label = ""
    private: Label = (
        ""  # why the engine shares KV with no other, if the scheduler half knows a reason; empty: it knows none
    )
    durability: Durability = Durability.PROCESS  # of `variant`, as in lookups


class TakeKVEvents(Message):
    """Request the KV events of the blocks in L1 and L2 that this instance can read; the instance publishes them itself.

    The first request has `follow` 0. The server repeats events until the `cursor` of a request is beyond them.
    """

    instance_id: Name
    incarnation: Name
    follow: Unsigned = 0
    cursor: Unsigned = 0


class KVBlocks(msgspec.Struct, array_like=True, frozen=True):
    """Consecutive blocks that were stored or removed. For removed blocks only the hashes are set."""

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
    """Reply to TakeKVEvents. If `follow` differs from the request's, the server starts again with all blocks that are stored now.

    `whole`: all blocks that were stored at that start have been sent. Blocks of an earlier `follow` that were not sent again are
    removed.
    """

    follow: int
    cursor: int  # after these events
    events: list[KVBlocks]
    whole: bool
    more: bool = False  # further events are ready: send the next request at once


class EngineLoad(Message):
    """Notice: the stats of an engine. Totals count from the engine's start.

    Each front end of an engine sends its own notice. Totals are this front end's part. The other fields are the scheduler's
    values as this front end last received them.
    """

    instance_id: Name
    incarnation: Name
    model_name: Name
    interval_seconds: Interval  # until the next notice
    running: Unsigned
    waiting: Unsigned
    deferred: Unsigned = 0  # waiting requests that wait for another reason than lack of space
    kv_cache_usage: Share = 0.0
    preemptions: Unsigned = 0
    prompt_tokens: Unsigned = 0
    generation_tokens: Unsigned = 0
    prefix_queries: Unsigned = 0  # tokens looked up in the engine's own prefix cache
    prefix_hits: Unsigned = 0
    external_queries: Unsigned = 0  # tokens looked up by the connector
    external_hits: Unsigned = 0
    finished_requests: Unsigned = 0
    front_end: FrontEnd = 0
    as_of_ns: Unsigned = 0  # CLOCK_MONOTONIC of the scheduler's values
