"""A model with sliding windows: SGLang has a pool of its own for them, and both pools' KV must be loaded.

Mellum without experts is the one that SGLang 0.5.23 computes on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
from conftest import Engines
from sglang_engines import PAGE, Prompt
from support.daemon import Daemon, wait_until

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]
WINDOW = 128


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.mellum(tmp_path_factory.mktemp("mellum"), window=WINDOW)


def cached(length: int) -> int:
    return (length - 1) // PAGE * PAGE


def wait_for_stores(daemon: Daemon, chunks: int) -> None:
    wait_until(lambda: daemon.status()["l1"]["chunks"] >= chunks, 20, f"{chunks} chunks in L1")


def test_engines_with_windows_load_what_another_stored_with_equal_tokens_and_logprobs(
    engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    plain = engines.get("plain", endpoint=None)
    first, second = engines.get("first"), engines.get("second")
    daemon = start_daemon(first, second)
    prompts = [prompt(n, length) for n, length in enumerate((70, 700, 1411))]
    reference = [plain.generate([p])[0] for p in prompts]
    cold = [first.generate([p])[0] for p in prompts]
    own = [first.generate([p])[0] for p in prompts]
    wait_for_stores(daemon, sum(len(p) // PAGE for p in prompts))
    other = [second.generate([p])[0] for p in prompts]
    first.flush()
    flushed = [first.generate([p])[0] for p in prompts]
    assert [o["cached_tokens"] for o in cold] == [0, 0, 0]
    assert [o["tokens"] for o in cold] == [o["tokens"] for o in reference]
    for warm in (own, other, flushed):
        assert [o["cached_tokens"] for o in warm] == [cached(len(p)) for p in prompts]
        assert [o["tokens"] for o in warm] == [o["tokens"] for o in reference]
        assert [o["logprobs"] for o in warm] == [o["logprobs"] for o in own]
    totals = daemon.status()["totals"]
    assert totals["failed_loads"] == totals["errors"] == 0


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
    text = prompt(50, 1000)
    cold = first.generate([text])[0]
    wait_for_stores(daemon, len(text) // PAGE)
    wrong = other.generate([text])[0]
    assert wrong["cached_tokens"] == cached(len(text))
    assert wrong["tokens"] != cold["tokens"]
    first.flush()
    assert first.generate([text])[0]["tokens"] == cold["tokens"], "the daemon's own bytes are right"
