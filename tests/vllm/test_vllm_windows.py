"""Sliding windows: blocks that a window left behind turn into null blocks, which are never stored or loaded.

With vLLM's hybrid manager off there is one KV cache group. With it on, full attention and windows are groups of
their own, whose planes lie in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tiny_models
from engines import TIMEOUTS, Engine, Engines, Prompt, engine_group
from support.daemon import Daemon, wait_until
from test_vllm_outputs import differs_when_zeroed

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]
WINDOW = 256
MODELS = {
    "pure": lambda folder: tiny_models.sliding(folder, window=WINDOW),
    "hybrid": lambda folder: tiny_models.sliding(folder, window=WINDOW, full_every=2),
    "groups": lambda folder: tiny_models.sliding(folder, window=WINDOW, full_every=2),
}
# The next token sees WINDOW tokens, itself among them: the blocks of the 255 before it.
LOADED_TOKENS = {
    "pure": lambda whole: WINDOW,
    "hybrid": lambda whole: whole,
    "groups": lambda whole: (whole + WINDOW) // 2,  # each group is half of a block's bytes
}


@pytest.fixture(
    scope="module",
    params=["groups", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("pure", "hybrid"))],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engines(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engine_group(MODELS[kind](tmp_path_factory.mktemp(kind)), tmp_path_factory.mktemp("windows")) as group:
        yield group


@pytest.fixture
def engine(engines: Engines, kind: str) -> Engine:
    """It is its own reader, after it forgot. Steps of 256 tokens, so that the window moves on during prefill."""
    return engines.get(
        "window",
        dtype="float32",
        extra=TIMEOUTS,
        max_num_batched_tokens=256,
        disable_hybrid_kv_cache_manager=kind != "groups",
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
        engine.wait_for_stores()
        engine.forget()
        before = blocks_loaded(daemon)
        warm = engine.generate([text])[0]
        whole = length // 256 * 256
        assert (warm["cached_tokens"], warm["tokens"]) == (whole, cold["tokens"])
        assert blocks_loaded(daemon) - before == LOADED_TOKENS[kind](whole) // 32
        engine.wait_for_stores()
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
    cold = engine.generate([text], max_tokens=270)[0]
    engine.wait_for_stores()
    engine.forget()
    warm = engine.generate([text], max_tokens=270)[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (512, cold["tokens"])
    engine.wait_for_stores()
    engine.forget()
    longer = text + cold["tokens"][:250]  # 770 tokens
    further = engine.generate([longer], max_tokens=20)[0]
    assert (further["cached_tokens"], further["tokens"]) == (768, cold["tokens"][250:])
    totals = daemon.status()["totals"]
    assert (totals["errors"], totals["failed_stores"], totals["failed_loads"]) == (0, 0, 0), "block 0 is refused"
    engine.wait_for_stores()
    engine.forget()


def test_a_local_hit_and_a_load_make_up_one_window(engine: Engine, start_daemon: Start, prompt: Make) -> None:
    start_daemon()
    stem, tail = prompt(320, 340), prompt(321, 500)
    cold = engine.generate([stem + tail])[0]
    engine.wait_for_stores()
    engine.forget()
    engine.generate([stem])
    engine.wait_for_stores()
    warm = engine.generate([stem + tail])[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (768, cold["tokens"])
    engine.wait_for_stores()
    engine.forget()


def test_zeroed_bytes_within_the_window_give_other_tokens(engine: Engine, start_daemon: Start, prompt: Make) -> None:
    assert differs_when_zeroed(start_daemon(), engine, engine, prompt(330, 600), 512)


def test_a_load_that_ends_with_its_daemon_costs_only_the_hit(engine: Engine, start_daemon: Start, prompt: Make) -> None:
    """With several groups vLLM takes no single blocks as failed, only the whole request."""
    daemon = start_daemon(pauses=True)
    text = prompt(340, 600)
    cold = engine.generate([text])[0]
    engine.wait_for_stores()
    engine.forget()
    with daemon.paused_copies():
        engine.send("generate", prompts=[text], max_tokens=16)
        daemon.wait_for_a_copy()
        daemon.kill()
    assert engine.receive()["outputs"][0]["tokens"] == cold["tokens"]
    engine.wait_for_stores()
    counters = engine.counters()
    assert counters["worker"]["load_failures"] == 1
    assert (counters["errors"], counters["blocks_in_use"]) == ({}, 0)
    engine.forget()


def test_a_load_of_a_stopped_daemon_keeps_its_blocks_from_others(
    engine: Engine, start_daemon: Start, prompt: Make
) -> None:
    text, others = prompt(350, 600), [prompt(351 + n, 500) for n in range(4)]
    alone = [engine.generate([other])[0]["tokens"] for other in others]
    engine.forget()
    daemon = start_daemon(pauses=True)
    cold = engine.generate([text])[0]
    engine.wait_for_stores()
    engine.forget()
    with daemon.paused_copies():
        engine.send("generate", prompts=[text], max_tokens=16)
        daemon.wait_for_a_copy()
        daemon.freeze()
    assert engine.receive()["outputs"][0]["tokens"] == cold["tokens"]
    assert engine.counters()["blocks_in_use"] > 0, "the server may still write these"
    assert [engine.generate([other])[0]["tokens"] for other in others] == alone
    daemon.thaw()
    assert [engine.generate([other])[0]["tokens"] for other in others] == alone
    wait_until(lambda: engine.owns_no_block_after(others[0]), 30, "its blocks are free")
    engine.forget()
