"""Sliding windows, with vLLM's hybrid manager off: blocks that a window left behind turn into null blocks.

Those are never stored, and a load begins behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tiny_models
from engines import TIMEOUTS, Engine, Engines, Prompt
from support.daemon import Daemon
from test_vllm_outputs import zero_l1

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]
WINDOW = 256
MODELS = {
    "pure": lambda folder: tiny_models.sliding(folder, window=WINDOW),
    "hybrid": lambda folder: tiny_models.sliding(folder, window=WINDOW, full_every=2),
}


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engines(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    holder = Daemon()
    group = Engines(MODELS[kind](tmp_path_factory.mktemp(kind)), tmp_path_factory.mktemp("windows"), holder.endpoint)
    yield group
    group.close()
    holder.close()


@pytest.fixture
def engine(engines: Engines) -> Engine:
    """It is its own reader, after it forgot. Steps of 256 tokens, so that the window moves on during prefill."""
    return engines.get(
        "window", dtype="float32", extra=TIMEOUTS, max_num_batched_tokens=256, disable_hybrid_kv_cache_manager=True
    )


def blocks_loaded(daemon: Daemon) -> int:
    block_bytes = daemon.status()["instances"][0]["workers"][0]["block_bytes"]
    return int(daemon.status()["totals"]["loaded_bytes"]) // int(block_bytes)


def test_warm_tokens_equal_cold_ones_and_only_what_the_window_sees_is_loaded(
    engine: Engine, kind: str, start_daemon: Start, prompt: Make
) -> None:
    daemon = start_daemon()
    for number, length in enumerate((300, 600, 1100)):
        text = prompt(300 + number, length)
        cold = engine.generate([text])[0]
        engine.settle()
        engine.forget()
        before = blocks_loaded(daemon)
        warm = engine.generate([text])[0]
        whole = length // 256 * 256
        assert (warm["cached_tokens"], warm["tokens"]) == (whole, cold["tokens"])
        # The next token sees WINDOW tokens, itself among them: the blocks of the 255 before it.
        assert blocks_loaded(daemon) - before == (WINDOW if kind == "pure" else whole) // 32
        engine.settle()
        engine.forget()
    assert daemon.status()["totals"]["errors"] == 0
    assert engine.counters()["errors"] == {}
    assert engine.counters()["blocks_in_use"] == 0


def test_tokens_stay_equal_through_a_long_decode_past_the_window(
    engine: Engine, start_daemon: Start, prompt: Make
) -> None:
    """What was decoded is stored too; a prompt of all that is then served from it."""
    daemon = start_daemon()
    text = prompt(310, 520)
    cold = engine.generate([text], max_tokens=600)[0]
    engine.settle()
    engine.forget()
    warm = engine.generate([text], max_tokens=600)[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (512, cold["tokens"])
    engine.settle()
    engine.forget()
    longer = text + cold["tokens"][:560]  # 1080 tokens
    further = engine.generate([longer], max_tokens=40)[0]
    assert (further["cached_tokens"], further["tokens"]) == (1024, cold["tokens"][560:])
    totals = daemon.status()["totals"]
    assert (totals["errors"], totals["failed_stores"], totals["failed_loads"]) == (0, 0, 0), "block 0 is refused"
    engine.settle()
    engine.forget()


def test_a_local_hit_and_a_load_make_up_one_window(engine: Engine, start_daemon: Start, prompt: Make) -> None:
    start_daemon()
    stem, tail = prompt(320, 340), prompt(321, 500)
    cold = engine.generate([stem + tail])[0]
    engine.settle()
    engine.forget()
    engine.generate([stem])
    engine.settle()
    warm = engine.generate([stem + tail])[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (768, cold["tokens"])
    engine.settle()
    engine.forget()


def test_zeroed_bytes_within_the_window_give_other_tokens(engine: Engine, start_daemon: Start, prompt: Make) -> None:
    daemon = start_daemon()
    text = prompt(330, 600)
    cold = engine.generate([text])[0]
    engine.settle()
    engine.forget()
    assert zero_l1(daemon) > 1_000_000
    warm = engine.generate([text])[0]
    assert warm["cached_tokens"] == 512
    assert warm["tokens"] != cold["tokens"], "the comparison would notice wrong KV"
    engine.forget()
