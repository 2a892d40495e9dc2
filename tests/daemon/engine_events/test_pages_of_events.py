"""Pages that SGLang's events describe are handed over with their tokens and parents."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from support.daemon import wait_until
from support.engine_publisher import CLEARED, removed, stored
from support.followed_engine import BLOCKS, connected, wait_for

from kvserver.kv_events import Description
from kvserver.protocol import SGLANG_HASH, SGLANG_PAIRS_HASH


def sglang_page(first: int, **more: Any) -> Any:
    """Two pages of 16 tokens, of which the first follows block 0."""
    names = [int.from_bytes(block[-8:], "big", signed=True) for block in BLOCKS]
    fields = {"parent_block_hash": names[0], "token_ids": list(range(first, first + 32)), "session_id": "s"}
    return stored(names[first : first + 2], **{**fields, **more})


def test_sglangs_pages_are_handed_over_with_tokens_and_parents(index, engine):
    described: list[tuple[str, list[Description]]] = []
    index.read_pages(lambda name, pages: described.append((name, pages)))
    index.observe(connected(engine, hash_algorithm=SGLANG_HASH, hash_block_tokens=16))
    engine.wait_for_subscriber()
    undescribed = [
        sglang_page(3, cache_salt="salt"),
        sglang_page(5, lora_name="tuned"),
        sglang_page(7, medium="CPU_PINNED"),
        sglang_page(9, token_ids=[[1, 2]] * 32),
        sglang_page(11, token_ids=[1 << 32] * 32),
        sglang_page(13, token_ids=[1]),
        sglang_page(15, block_size=0),
        sglang_page(17, block_size=8, token_ids=list(range(16))),
        sglang_page(19, token_ids=[1 << 20] * (1 << 20)),
        {"type": "BlockStored", "block_hashes": "no"},
        removed(BLOCKS[:1]),
        CLEARED,
    ]
    engine.publish(*undescribed)
    engine.publish(sglang_page(150, session_id="x" * 300), *undescribed)
    engine.publish(sglang_page(1))
    wait_until(lambda: len(described) == 2, what=f"{described}")
    assert [name for name, _ in described] == ["engine"] * 2
    first, second = described[1][1]
    tokens = array("I", range(1, 33))
    assert first == Description(8, BLOCKS[1][-8:], BLOCKS[0][-8:], tokens[:16].tobytes(), 16, session_id="s")
    assert second == Description(8, BLOCKS[2][-8:], BLOCKS[1][-8:], tokens[16:].tobytes(), 16, session_id="s")
    assert [page.session_id for page in described[0][1]] == ["", ""]


def test_a_fault_in_what_receives_the_pages_does_not_end_the_subscription(index, engine, caplog):
    described: list[Any] = []

    def fail_twice(name: str, pages: list[Description]) -> None:
        described.append(pages)
        if len(described) < 3:
            raise KeyError(name)

    index.read_pages(fail_twice)
    index.observe(connected(engine, hash_algorithm=SGLANG_HASH, hash_block_tokens=16))
    engine.wait_for_subscriber()
    for first in (0, 1, 2):
        engine.publish(sglang_page(first))
    wait_until(lambda: len(described) == 3, what=f"{described}")
    wait_for(index, 4)
    assert [record.exc_info[0] for record in caplog.records] == [KeyError], "only the first is logged"


@pytest.mark.parametrize("algorithm", ["sha256", SGLANG_PAIRS_HASH])
def test_pages_of_vllm_and_of_pairs_are_not_handed_over(index, engine, algorithm):
    described: list[Any] = []
    index.read_pages(lambda name, pages: described.append(pages))
    index.observe(connected(engine, hash_algorithm=algorithm, hash_block_tokens=16))
    engine.wait_for_subscriber()
    engine.publish(sglang_page(1), stored(BLOCKS[:1]))
    wait_for(index, 3)
    assert described == []
