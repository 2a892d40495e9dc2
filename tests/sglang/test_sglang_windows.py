"""A model with sliding windows: SGLang has a pool of its own for them, and both pools' KV must be loaded.

Mellum without experts is the one that SGLang 0.5.23 computes on CPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
from conftest import Engines
from sglang_engines import PAGE
from test_sglang_outputs import Make, Start, cached, check_loads, wait_for_stores

WINDOW = 128


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.mellum(tmp_path_factory.mktemp("mellum"), window=WINDOW)


def test_engines_with_windows_load_what_another_stored_with_equal_tokens_and_logprobs(
    engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    check_loads(engines, start_daemon, prompt)


@pytest.mark.long
@pytest.mark.parametrize("pool", ["kv", "swa"])
def test_a_load_without_one_pools_kv_gives_other_tokens(
    pool: str, engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    """The negative control: the comparison of the other tests would notice a group that is left out."""
    engines.end("second")
    engines.end("leaving kv out")
    first = engines.get("first")
    linker = ("leaving_out", "LeavingOut")
    other = engines.get(f"leaving {pool} out", linker=linker, environ={"LEAVES_OUT": pool})
    daemon = start_daemon(first, other)
    text = prompt({"kv": 50, "swa": 51}[pool], 1000)  # SGLang's own cache has it not yet
    cold = first.generate([text])[0]
    wait_for_stores(daemon, len(text) // PAGE)
    wrong = other.generate([text])[0]
    assert wrong["cached_tokens"] == cached(len(text))
    assert wrong["tokens"] != cold["tokens"]
    first.flush()
    assert first.generate([text])[0]["tokens"] == cold["tokens"], "the daemon's own bytes are right"
