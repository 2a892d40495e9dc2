"""What a long prompt costs on the wire: a chunk's key, and little else."""

from __future__ import annotations

import random
import time
import uuid

from support.worker import packed

from kvserver.protocol import (
    KEY_BYTES,
    REQUEST_ID_BYTES,
    EndRequest,
    Lookup,
    Owned,
    Released,
    ReportBlockAllocations,
    ReportedBlocks,
    Request,
    Store,
    encode,
)

CHUNKS, CHUNK_BLOCKS, STORES = 512, 16, 64  # 128k tokens in steps of 2k; blocks of 16 tokens, chunks of 256
KEYS = random.Random(1).randbytes(CHUNKS * KEY_BYTES)
MODEL = "meta-llama/Llama-3.1-405B-Instruct"


def prefill(blocks: list[int], after: bytes | None = None) -> list[Request]:
    """Every message for one prompt but the block-pool reports, with names of realistic length. `after` is in each Store."""
    instance_id, incarnation, variant = uuid.uuid4().hex, uuid.uuid4().hex, uuid.uuid4().hex[:30]
    request_id = f"cmpl-{uuid.uuid4().hex}-0"
    step_chunks = CHUNKS // STORES
    step_blocks = step_chunks * CHUNK_BLOCKS
    messages: list[Request] = [Lookup(instance_id, incarnation, request_id, CHUNK_BLOCKS, KEYS, variant)]
    for step in range(STORES):
        messages.append(
            Store(
                boot_id=uuid.uuid4().hex[:16],
                registration=3,
                chunk_blocks=CHUNK_BLOCKS,
                keys=KEYS[step * step_chunks * KEY_BYTES : (step + 1) * step_chunks * KEY_BYTES],
                block_ids=packed(blocks[step * step_blocks : (step + 1) * step_blocks]),
                word=4000 - step,
                sequence=100_000 + step,
                deadline_ns=time.monotonic_ns() + 10**10,
                variant=variant,
                after=after,
            )
        )
    messages.append(EndRequest(instance_id, incarnation, MODEL, 100_000, request_id))
    return messages


def wire_bytes(messages: list[Request]) -> int:
    return sum(REQUEST_ID_BYTES + len(encode(message)) for message in messages)


def test_a_prefill_of_128k_tokens_sends_at_most_40000_bytes() -> None:
    first = 20_000  # no step's ids are small
    blocks = list(range(first, first + CHUNKS * CHUNK_BLOCKS))
    assert wire_bytes(prefill(blocks)) <= 40_000
    assert wire_bytes(prefill(blocks[::-1])) <= 40_000
    assert wire_bytes(prefill(blocks, KEYS[:KEY_BYTES])) <= 42_100, "of a daemon with L2"


def test_fully_shuffled_blocks_cost_about_two_bytes_an_id() -> None:
    blocks = list(range(1, 1 + CHUNKS * CHUNK_BLOCKS))
    random.Random(1).shuffle(blocks)
    assert wire_bytes(prefill(blocks)) <= 56_000


def test_2048_reported_events_use_at_most_24_kilobytes() -> None:
    """Of eight requests, blocks from all over a pool of 100,000, each with its content."""
    blocks = random.Random(2).sample(range(1, 100_000), 2048)
    records: list[Owned | Released] = [
        Owned(f"cmpl-{uuid.uuid4().hex}-0", 0, 0, packed(blocks[at : at + 256]), 256, random.randbytes(256 * 8))
        for at in range(0, 2048, 256)
    ]
    payload = ReportedBlocks(time_ns=time.monotonic_ns(), block_tokens=16, records=records)
    report = ReportBlockAllocations(uuid.uuid4().hex, uuid.uuid4().hex, MODEL, 100_000, payload)
    assert wire_bytes([report]) <= 24_000
