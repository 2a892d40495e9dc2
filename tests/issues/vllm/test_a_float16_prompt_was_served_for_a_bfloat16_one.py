"""A program's float16 prompt of embeddings was served to another engine's bfloat16 prompt of the same bytes: "cached", and wrong
tokens. vLLM hashes the bytes and computes with the values.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engines import TIMEOUTS, Engine, Engines
from support.daemon import Daemon

LENGTH, HIDDEN, CHUNK = 600, 256, 64


def bits() -> list[list[int]]:
    """Of numbers of ordinary size in either dtype."""
    made = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(7), dtype=torch.float32)
    rows: list[list[int]] = made.to(torch.bfloat16).view(torch.int16).tolist()
    return rows


@pytest.mark.long
def test_engines_share_embeddings_of_the_models_dtype_and_take_no_other_for_them(
    engines: Engines, start_daemon: Callable[..., Daemon]
) -> None:
    options = {"enable_prompt_embeds": True, "extra": TIMEOUTS}
    one, other, third = (engines.get(name, **options) for name in ("one", "other", "third"))
    start_daemon(chunk_tokens=CHUNK)
    rows = bits()

    def asked(engine: Engine, dtype: str) -> tuple[int, list[int]]:
        answer = engine.ask("generate_of_embeddings", bits=rows, dtype=dtype, max_tokens=16)["outputs"][0]
        engine.wait_for_stores()
        return answer["cached_tokens"], answer["tokens"]

    foreign = asked(one, "float16")[1]
    cached, own = asked(other, "bfloat16")
    assert (cached, own != foreign) == (0, True)
    assert asked(third, "bfloat16") == (LENGTH // CHUNK * CHUNK, own)
    assert asked(one, "float16")[1] == foreign
