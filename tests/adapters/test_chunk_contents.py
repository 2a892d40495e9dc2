"""What a store states of its chunks is what vLLM's own events state of the same blocks."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from made_up_model import BLOCK, prompt
from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvserver.adapters.vllm.chunks import Chunks
from kvserver.adapters.vllm.contents import Contents
from kvserver.cache import Groups
from kvserver.events import ChunksDescribed
from kvserver.kv_events.descriptions import describe, of_objects
from kvserver.protocol import ChunkContents, ObjectGroup

PER_CHUNK = 4  # blocks
SHA256 = get_hash_fn_by_name("sha256")
TOKENS = prompt(1, 5 * PER_CHUNK * BLOCK + 3)
IMAGES = [
    MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=40))
    for name, offset in (("cat", 5), ("dog", 150))
]


def short_hash(value: Any) -> bytes:
    """Of 16 bytes, as xxhash makes them."""
    return hashlib.sha256(repr(value).encode()).digest()[:16]


def request_of(tokens: list[int] = TOKENS, function: Any = SHA256, hash_block: int = BLOCK, **options: Any) -> Request:
    init_none_hash(function)
    hasher = get_request_block_hasher(hash_block, function)
    return Request("r", list(tokens), SamplingParams(max_tokens=1), None, block_hasher=hasher, **options)


def contents_of(request: Request, first: int, last: int, hash_block: int = BLOCK) -> ChunkContents | None:
    chunks = Chunks([ObjectGroup("full", (0,), BLOCK)], hash_block)
    chunks.resize(PER_CHUNK * BLOCK)
    counters: Counter[str] = Counter()
    contents = Contents(chunks, counters).of(request, first, last)
    assert counters["undescribed_chunks"] == (0 if contents is not None else last - first)
    return contents


def published(request: Request, first: int, last: int, hash_block: int = BLOCK, block: int = BLOCK) -> BlockStored:
    """By vLLM's own block pool, of the same chunks."""
    pool = BlockPool(100, True, hash_block, enable_kv_cache_events=True)
    per_chunk = PER_CHUNK * BLOCK // block
    blocks = pool.get_new_blocks(last * per_chunk)
    pool.cache_full_blocks(request, blocks, first * per_chunk, last * per_chunk, block, 0)
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    return event


def in_the_wires_words(event: BlockStored) -> ChunkContents:
    assert event.extra_keys is not None
    return ChunkContents(
        hash_bytes=len(event.block_hashes[0]),
        hashes=b"".join(event.block_hashes),
        tokens=array("I", event.token_ids).tobytes(),
        parent=event.parent_block_hash or b"",
        lora_name=event.lora_name or "",
        extra_keys=msgspec.msgpack.encode(event.extra_keys) if any(event.extra_keys) else b"",
    )


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


WITH_EXTRA_KEYS = pytest.mark.parametrize(
    "options",
    [
        {},
        {"function": short_hash},
        {"cache_salt": "pepper"},
        {"lora_request": LoRARequest("sql", 1, "/nowhere")},
        {"mm_features": IMAGES},
        {"mm_features": IMAGES, "cache_salt": "pepper", "lora_request": LoRARequest("sql", 1, "/nowhere")},
    ],
    ids=["tokens", "short hashes", "salt", "lora", "images", "all"],
)


@WITH_EXTRA_KEYS
@pytest.mark.parametrize(("first", "last"), [(0, 5), (0, 1), (2, 4)])
def test_contents_are_what_vllm_publishes(options, first, last):
    request = request_of(**options)
    assert contents_of(request, first, last) == in_the_wires_words(published(request, first, last))


@WITH_EXTRA_KEYS
def test_contents_describe_the_blocks_of_every_group_as_vllm_publishes_them(options):
    """Full attention with twice the block of a window, which has all blocks of its chunks here."""
    groups = [ObjectGroup("full", (0,), 2 * BLOCK), ObjectGroup("window", (1,), BLOCK, tokens=PER_CHUNK * BLOCK)]
    request, chunks = request_of(**options), Chunks(groups, BLOCK)
    chunks.resize(PER_CHUNK * BLOCK)
    contents = Contents(chunks, Counter()).of(request, 1, 4)
    keys = chunks.keys(request, range(1, 4))
    described = describe(ChunksDescribed(1, "engine", b"n" * 32, keys, (), BLOCK, contents))
    for objects in Groups(groups, 1, chunks.tokens).objects:
        parts = [of_objects(chunk, objects) for chunk in described]
        event = published(request, 1, 4, block=objects.block_tokens)
        assert b"".join(part.hashes for part in parts) == b"".join(event.block_hashes)
        assert b"".join(part.tokens for part in parts) == array("I", event.token_ids).tobytes()
        assert parts[0].parent == event.parent_block_hash
        found = [msgspec.msgpack.decode(part.extra_keys) if part.extra_keys else [None] * part.blocks for part in parts]
        assert [keys for part in found for keys in part] == msgspec.msgpack.decode(
            msgspec.msgpack.encode(event.extra_keys)
        )


def test_where_hashes_are_finer_than_blocks_a_block_has_its_last_one():
    request = request_of(hash_block=BLOCK // 2)
    found = contents_of(request, 1, 3, BLOCK // 2)
    assert found == in_the_wires_words(published(request, 1, 3, BLOCK // 2))
    assert found.hashes[-32:] == request.block_hashes[2 * 3 * PER_CHUNK - 1]


@pytest.mark.parametrize("numbers", [range(1, 4), [2], [0, 3], range(0, 5, 2)])
def test_a_chunks_key_is_its_last_blocks_hash(numbers):
    """Of neighbours, as stores and loads name them, and of single chunks."""
    request = request_of(function=short_hash)
    chunks = Chunks([ObjectGroup("full", (0,), BLOCK)], BLOCK)
    chunks.resize(PER_CHUNK * BLOCK)
    contents = [contents_of(request, number, number + 1) for number in numbers]
    last = [each.hashes[-each.hash_bytes :].ljust(32, b"\0") for each in contents]
    assert chunks.keys(request, numbers) == b"".join(last)


def test_salts_are_only_with_the_first_block():
    request = request_of(cache_salt="pepper")
    assert msgspec.msgpack.decode(contents_of(request, 0, 1).extra_keys) == [["pepper"], None, None, None]
    assert contents_of(request, 1, 2).extra_keys == b""


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_embeds": torch.zeros(len(TOKENS), 4)},
        {"tokens": [1 << 32, *TOKENS]},
        {"tokens": [-1, *TOKENS]},
        {"cache_salt": "s" * (PER_CHUNK * 1024)},
        {"lora_request": LoRARequest("n" * 513, 1, "/nowhere")},
    ],
    ids=["embeddings", "a token of 33 bits", "a negative token", "a long salt", "a long LoRA name"],
)
def test_contents_that_no_message_can_carry_are_left_out_and_counted(options):
    assert contents_of(request_of(**options), 0, 1) is None
