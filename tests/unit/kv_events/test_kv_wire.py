"""What is on the wire: the form of hashes, runs of a chunk's blocks, maps and the arrays of older consumers."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest
from support.kv_chunks import Prompt
from support.kv_feed import describe, named

from kvserver.kv_events import descriptions
from kvserver.kv_events.descriptions import part_of
from kvserver.kv_events.types import Tier
from kvserver.kv_events.wire import Writer, batch, stored_events
from kvserver.protocol import KVGroup

FULL = ((0, KVGroup("full_attention")),)


# As vLLM 0.11 to 0.25 had them: arrays, of which the last fields may be missing.
class OldEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(OldEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(OldEvent):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(OldEvent):
    pass


class OldBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def stored(writer: Writer, *args: Any) -> dict[str, Any]:
    (event,) = writer.stored(*args)
    return msgspec.msgpack.decode(event)


def test_a_map_carries_all_that_is_known_of_a_chunk() -> None:
    chunk = describe("a", "b", parent="p", lora_name="lora", extra_keys=[None, ["lora", ["image", 3]]])
    assert stored(Writer("bytes", arrays=False), chunk, Tier.L1, FULL) == {
        "type": "BlockStored",
        "block_hashes": [named("a"), named("b")],
        "parent_block_hash": named("p"),
        "token_ids": list(range(32)),
        "block_size": 16,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": "lora",
        "extra_keys": [None, ["lora", ["image", 3]]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "locality": "LOCAL",
    }


def test_the_memory_of_a_description_includes_the_id_of_its_session() -> None:
    (description,) = descriptions.describe(Prompt(range(8)).described(b"n" * 32, 0, 1))
    assert description is not None
    for session_id in ("a", "agent" * 50, "\U0001f600" * 256):
        with_session = msgspec.structs.replace(description, session_id=session_id)
        assert with_session.size - description.size >= sys.getsizeof(session_id)


def test_a_map_carries_the_session_that_stored_a_chunk_and_an_array_does_not() -> None:
    (chunk,) = descriptions.describe(
        msgspec.structs.replace(Prompt(range(8)).described(b"n" * 32, 0, 1), session_id="agent-7")
    )
    assert chunk is not None
    assert stored(Writer("bytes", arrays=False), chunk, Tier.L1, FULL)["session_id"] == "agent-7"
    (event,) = Writer("bytes", arrays=True).stored(chunk, Tier.L1, FULL)
    assert b"agent-7" not in event
    assert "session_id" not in stored(Writer("bytes", arrays=False), describe("a"), Tier.L1, FULL)


def test_what_is_unknown_is_left_out() -> None:
    event = stored(Writer("int", arrays=False), describe("a"), Tier.L2, ())
    assert (event["medium"], event["parent_block_hash"], event["lora_name"]) == ("STORAGE", None, None)
    assert not {"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"} & set(
        event
    )


@pytest.mark.parametrize("hash_bytes", [8, 16, 32])
def test_an_integer_is_the_last_8_bytes_of_a_hash(hash_bytes: int) -> None:
    event = stored(Writer("int", arrays=False), describe("a", parent="p", hash_bytes=hash_bytes), Tier.L1, ())
    name = named("a", hash_bytes)
    assert event["block_hashes"] == [int.from_bytes(name, "big") & ((1 << 64) - 1)]
    assert event["parent_block_hash"] == int.from_bytes(named("p", hash_bytes), "big") & ((1 << 64) - 1)
    whole = stored(Writer("bytes", arrays=False), describe("a", hash_bytes=hash_bytes), Tier.L1, ())
    assert whole["block_hashes"] == [name]


@pytest.mark.parametrize(("tier", "medium"), [(Tier.L1, "CPU_PINNED"), (Tier.L2, "DISK")])
def test_sglangs_form_has_signed_integers_and_sglangs_names_of_media(tier: Tier, medium: str) -> None:
    chunks = [describe(name, parent="p", hash_bytes=8) for name in "abcdefgh"]
    writer, seen = Writer("signed", arrays=False), []
    for chunk in chunks:
        event = stored(writer, chunk, tier, ())
        seen += event["block_hashes"]
        assert event["parent_block_hash"] == int.from_bytes(named("p", 8), "big", signed=True)
        (removal,) = writer.removed(chunk.hashes, 8, tier, ())
        assert msgspec.msgpack.decode(removal)["block_hashes"] == event["block_hashes"]
        assert event["medium"] == msgspec.msgpack.decode(removal)["medium"] == medium
    assert seen == [int.from_bytes(named(name, 8), "big", signed=True) for name in "abcdefgh"]
    assert min(seen) < 0 < max(seen)


def test_a_run_inside_a_chunk_has_the_block_before_it_as_its_parent() -> None:
    chunk = describe("a", "b", "c", parent="p", extra_keys=[["x"], ["y"], None])
    event = stored(Writer("bytes", arrays=False), part_of(chunk, 1, 2), Tier.L1, FULL)
    assert (event["block_hashes"], event["parent_block_hash"]) == ([named("b")], named("a"))
    assert (event["token_ids"], event["extra_keys"]) == (list(range(16, 32)), [["y"]])


@pytest.mark.parametrize(
    "raw",
    [
        b"\xc1",
        b"\x93",
        msgspec.msgpack.encode([["one"]]),
        msgspec.msgpack.encode([["a"], "b"]),
        msgspec.msgpack.encode([[{"a": 1}], None]),
        msgspec.msgpack.encode([[[["deep"]]], None]),
        b"\x92\x91" + b"\x91" * 50_000,
        b"\x92\x91\xa2\xff\xff\xc0",
    ],
)
def test_extra_keys_that_are_none_are_left_out(raw: bytes) -> None:
    chunk = msgspec.structs.replace(describe("a", "b"), extra_keys=raw)
    assert [event.extra_keys for event in stored_events(chunk, Tier.L1, (), "int")] == [None]


def test_an_older_struct_reads_the_arrays() -> None:
    writer = Writer("int", arrays=True)
    chunk = describe("a", "b", parent="p", lora_name="lora", extra_keys=[None, ["lora"]])
    events = [
        writer.cleared,
        *writer.stored(chunk, Tier.L1, FULL),
        *writer.removed(chunk.hashes, 32, Tier.L2, FULL),
    ]
    decoded = msgspec.msgpack.decode(batch(1.5, events, 3), type=OldBatch)
    names = [int.from_bytes(named(name)[-8:], "big") for name in "abp"]
    assert decoded == OldBatch(
        1.5,
        [
            AllBlocksCleared(),
            BlockStored(names[:2], names[2], list(range(32)), 16, None, "CPU", "lora"),
            BlockRemoved(names[:2], "STORAGE"),
        ],
        3,
    )


def test_the_fields_of_an_array_are_where_consumers_look_for_them() -> None:
    """As AIBrix and llm-d count them: by position, and from a batch of two or three elements."""
    chunk = describe("a", lora_name="lora", extra_keys=[["k"]])
    (event,) = Writer("bytes", arrays=True).stored(chunk, Tier.L1, ((0, KVGroup("sliding_window", 64)),))
    assert msgspec.msgpack.decode(event) == [
        *("BlockStored", [named("a")], None, list(range(16)), 16, None, "CPU", "lora"),
        *([["k"]], 0, "sliding_window", 64),
    ]
