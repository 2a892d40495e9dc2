"""A message takes 16,384 keys; a lookup of a longer prompt was refused whole, so the prompt was never found. Its first
16,384 chunks are looked up and loaded now.
"""

from __future__ import annotations

from typing import Any

import pytest
from made_up_model import BLOCK, prompt
from model_folder import write_model

from kvserver.adapters.common.specs import ids_of
from kvserver.protocol import MAX_CHUNKS

BEYOND = 3  # chunks more than one message names
TOKENS = prompt(1, (MAX_CHUNKS + BEYOND) * BLOCK + 5)
LENGTH = len(TOKENS) + 100
SECONDS = 120


@pytest.fixture
def make_long(make_daemon, make_engine, tmp_path):
    """Engines that take TOKENS in one step, on one daemon with room for them."""
    daemon = make_daemon(chunk_tokens=BLOCK, l1_size="512MiB")
    options: dict[str, Any] = {
        "folder": write_model(tmp_path / "long", max_position_embeddings=LENGTH),
        "num_blocks": MAX_CHUNKS + BEYOND + 20,
        "max_tokens_per_step": LENGTH,
        "max_model_len": LENGTH,
        "extra": {f"kvserver.{name}_timeout_ms": 60_000 for name in ("lookup", "store", "load")},
    }
    return lambda: make_engine(daemon, **options)


def test_the_first_chunks_of_a_prompt_beyond_the_bound_are_loaded(make_long):
    assert make_long().generate("cold", TOKENS, count=1, seconds=SECONDS).external == 0
    warm = make_long()
    answer = warm.generate("warm", TOKENS, count=1, seconds=SECONDS)
    assert answer.external == MAX_CHUNKS * BLOCK
    assert [len(ids_of(load)) for load in warm.loads] == [MAX_CHUNKS]


def test_what_the_engine_has_itself_of_such_a_prompt_is_not_loaded(make_long):
    make_long().generate("cold", TOKENS, count=1, seconds=SECONDS)
    warm = make_long()
    warm.generate("begins alike", TOKENS[: 100 * BLOCK], count=1)
    loads = len(warm.loads)
    answer = warm.generate("warm", TOKENS, count=1, seconds=SECONDS)
    assert (answer.local, answer.external) == (100 * BLOCK, (MAX_CHUNKS - 100) * BLOCK)
    assert [len(ids_of(load)) for load in warm.loads[loads:]] == [MAX_CHUNKS - 100]
