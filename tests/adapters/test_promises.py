"""Tokens promised to vLLM, by tier: each is loaded or withdrawn, and the daemon and vLLM count the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up_model import BLOCK, prompt
from modelless import Engine
from support.daemon import Daemon, wait_until
from tap import Tap
from test_sources import SomeFail

from kvserver.adapters.common import failed_loads
from kvserver.adapters.common.stats import TIERS, WITHDRAWN_REASONS
from kvserver.adapters.vllm.promises import Promises
from kvserver.protocol import EndRequest, Error, Retrieve

CHUNK = 64
RUN = 120  # requests
MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]
MakeTap = Callable[[Daemon], Tap]


def half_of(engine: Engine) -> Any:
    assert engine.connector.scheduler is not None
    return engine.connector.scheduler


def counted(engine: Engine, what: str) -> dict[str, int]:
    """By tier, or by tier and reason: what is not 0."""
    prefix = f"{what}_tokens_"
    return {name.removeprefix(prefix): n for name, n in half_of(engine).counters.items() if name.startswith(prefix)}


def by_tier(engine: Engine, what: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for label, tokens in counted(engine, what).items():
        found[label.split()[0]] += tokens
    return {tier: found[tier] for tier in TIERS}


def assert_balanced(engine: Engine) -> None:
    promised, loaded, withdrawn = (by_tier(engine, what) for what in ("promised", "loaded", "withdrawn"))
    assert promised == {tier: loaded[tier] + withdrawn[tier] for tier in TIERS}


def placed(engine: Engine) -> int:
    """Promised tokens that vLLM used, as it counts them itself."""
    stats = [each.connector_prefix_cache_stats for each in engine.stats if each.connector_prefix_cache_stats]
    return sum(each.hits + each.preempted_hits for each in stats)


def restart(daemon: Daemon) -> None:
    """L1 is empty then, L2 is not."""
    wait_until(lambda: (tier := daemon.tier())["objects"] > 0 and not tier["queue_objects"])
    daemon.terminate()
    daemon.start()
    daemon.wait_for_tiers()


def prompt_tokens(daemon: Daemon, engine: Engine) -> dict[str, int]:
    """Of the engine's prompts, by source, as the daemon counts them."""
    rows = {row["instance_id"]: row["requests"] for row in daemon.status()["instances"]}
    found: dict[str, int] = rows[engine.config.kv_transfer_config.engine_id]["prompt_tokens"]
    return found


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {"asynchronous": True}),
        (2, {"asynchronous": False, "max_tokens_per_step": 96}),
        (3, {"asynchronous": True, "world_size": 2, "drafts": 2}),
    ],
)
def test_every_promised_token_of_a_random_run_is_loaded_or_withdrawn(
    make_daemon: MakeDaemon,
    make_tap: MakeTap,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    seed: int,
    options: dict[str, Any],
) -> None:
    """With preemptions, failed loads, aborts at any time, resets, and an L1 that holds a part of what L2 has."""
    monkeypatch.setattr(failed_loads, "SECONDS", 0.0)  # so that many loads are tried
    daemon = make_daemon(chunk_tokens=CHUNK, l1_size="256KiB", l2=f"file://{tmp_path}/l2?size=64MiB")
    tap = make_tap(daemon)
    tap.instead = SomeFail(seed)
    engine = make_engine(tap.endpoint, num_blocks=70, extra={"kvserver.on_prefix_reset": "keep"}, **options)
    source = random.Random(seed)
    families = [prompt(seed * 100 + i, 6 * CHUNK) for i in range(12)]

    def enough() -> bool:
        loaded = by_tier(engine, "loaded")
        return len(engine.answers) >= RUN and min(loaded.values()) > 0 and len(counted(engine, "withdrawn")) > 1

    while not enough():
        assert len(engine.answers) < 20 * RUN, (counted(engine, "loaded"), counted(engine, "withdrawn"))
        live = [name for name, answer in engine.answers.items() if answer.finish_reason is None]
        if len(live) < 8 and source.random() < 0.5:
            tokens = source.choice(families)[: source.randrange(20, 6 * CHUNK)]
            engine.add(f"r{len(engine.answers)}", tokens, count=source.choice([1, 3, 40, 120]))
        elif live and source.random() < 0.05:
            engine.abort(source.choice(live))
        elif source.random() < 0.01:
            engine.scheduler.reset_prefix_cache()
        engine.step()
    engine.run(60, until=lambda: not engine.busy)

    assert_balanced(engine)
    withdrawn = counted(engine, "withdrawn")
    unused = sum(tokens for why, tokens in withdrawn.items() if why.endswith((" not_placed", " not_used")))
    promised = sum(by_tier(engine, "promised").values())
    print(
        f"seed {seed}: promised {counted(engine, 'promised')}, loaded {counted(engine, 'loaded')}, withdrawn {withdrawn}"
    )
    assert promised - unused == placed(engine)
    assert {why.split()[1] for why in withdrawn} <= set(WITHDRAWN_REASONS)

    wait_until(lambda: len(tap.of(EndRequest)) >= len(engine.answers))
    ends = tap.of(EndRequest)
    assert all(end.l2_tokens is not None and end.l2_tokens <= end.loaded_tokens for end in ends)
    l2, loaded = sum(end.l2_tokens or 0 for end in ends), sum(end.loaded_tokens for end in ends)
    assert l2 <= by_tier(engine, "loaded")["l2"]
    wait_until(lambda: daemon.status()["instances"][0]["requests"]["ended_requests"] == len(ends))
    sources = daemon.status()["instances"][0]["requests"]["prompt_tokens"]
    assert (sources["l1"], sources["l2"]) == (loaded - l2, l2), "the daemon counts what the engine states"


def test_a_hit_of_both_tiers_is_split(make_daemon: MakeDaemon, make_engine: MakeEngine, tmp_path: Path) -> None:
    """By the connector, by vLLM and by the daemon; also where vLLM has the first blocks itself."""
    daemon = make_daemon(chunk_tokens=CHUNK, l2=f"file://{tmp_path}/l2?size=64MiB")
    tokens = prompt(1, 4 * CHUNK + 20)
    first = make_engine(daemon)
    first.generate("cold", tokens)
    first.close()
    restart(daemon)
    short = make_engine(daemon)
    short.generate("short", tokens[: CHUNK + 20])
    assert (counted(short, "promised"), counted(short, "loaded")) == ({"l2": CHUNK}, {"l2": CHUNK})
    short.close()
    both = make_engine(daemon)
    both.generate("own", tokens[: 2 * BLOCK + 1])
    both.generate("both", tokens)
    assert (both.answers["both"].local, both.answers["both"].external) == (2 * BLOCK, 4 * CHUNK - 2 * BLOCK)
    expected = {"l1": CHUNK - 2 * BLOCK, "l2": 3 * CHUNK}
    assert counted(both, "promised") == counted(both, "loaded") == expected
    hits = [each.connector_prefix_cache_stats.hits_by_source for each in both.stats]
    named = [{source.value: tokens for source, tokens in found.items()} for found in hits if found]
    assert named == [{"host": CHUNK - 2 * BLOCK, "disk": 3 * CHUNK}]
    wait_until(lambda: prompt_tokens(daemon, both) == {"l0": 2 * BLOCK, "computed": 33 + 20, **expected})


@pytest.fixture
def stored(make_daemon: MakeDaemon, make_tap: MakeTap, make_engine: MakeEngine) -> tuple[Tap, list[int]]:
    """A daemon that has a prompt of two chunks and a little more."""
    tap, tokens = make_tap(make_daemon(chunk_tokens=CHUNK)), prompt(3, 2 * CHUNK + 20)
    first = make_engine(tap.endpoint)
    first.generate("cold", tokens)
    first.close()
    return tap, tokens


def test_a_load_that_fails_withdraws_its_tokens(stored: tuple[Tap, list[int]], make_engine: MakeEngine) -> None:
    """Once, though both ranks of another engine would report it."""
    tap, tokens = stored
    tap.instead = lambda message: Error(code="internal", message="no") if isinstance(message, Retrieve) else None
    engine = make_engine(tap.endpoint)
    engine.generate("fails", tokens)
    assert (counted(engine, "promised"), counted(engine, "loaded")) == ({"l1": 2 * CHUNK}, {})
    assert counted(engine, "withdrawn") == {"l1 load_failed": 2 * CHUNK}


def test_a_request_that_ends_before_it_is_placed_withdraws_its_tokens(
    stored: tuple[Tap, list[int]], make_engine: MakeEngine
) -> None:
    """However often vLLM asked."""
    tap, tokens = stored
    engine = make_engine(tap.endpoint, num_blocks=12)
    engine.add("runs", prompt(4, 3 * BLOCK), count=8 * BLOCK)
    engine.step()
    engine.add("waits", tokens)
    engine.run(until=lambda: half_of(engine).counters["lookup_hits"] > 0)
    for _ in range(5):
        engine.step()
    assert engine.status_of("waits") == "WAITING"
    engine.abort("waits")
    engine.run()
    assert counted(engine, "promised") == {"l1": 2 * CHUNK}
    assert counted(engine, "withdrawn") == {"l1 not_placed": 2 * CHUNK}


def test_a_request_that_ends_during_its_load_withdraws_its_tokens(
    make_daemon: MakeDaemon, make_engine: MakeEngine
) -> None:
    daemon, tokens = make_daemon(chunk_tokens=CHUNK, pauses=True), prompt(3, 2 * CHUNK + 20)
    make_engine(daemon).generate("cold", tokens)
    engine = make_engine(daemon)
    with daemon.paused_copies():
        engine.begin_load("ends", tokens)
        engine.abort("ends")
        engine.step()
    engine.run()
    assert counted(engine, "withdrawn") == {"l1 request_ended": 2 * CHUNK}
    assert_balanced(engine)


# ---- what vLLM may do with a promise ---------------------------------------------------------------


def promised(l1: int, l2: int) -> tuple[Promises, Counter[str]]:
    counters: Counter[str] = Counter()
    promises = Promises(counters)
    promises.answered("r", l1 + l2, l2)
    return promises, counters


def test_promised_tokens_that_vllm_uses_in_part_are_withdrawn_for_the_rest() -> None:
    promises, counters = promised(100, 60)
    assert promises.placed("r", 130) == 30
    assert promises.being_loaded("r") == (100, 30)
    promises.placed("r", 0)
    assert counters == {
        "promised_tokens_l1": 100, "promised_tokens_l2": 60, "withdrawn_tokens_l2 not_used": 30,
        "loaded_tokens_l1": 100, "loaded_tokens_l2": 30,
    }  # fmt: skip


def test_promised_tokens_that_vllm_does_not_use_are_withdrawn() -> None:
    """Another connector has more."""
    promises, counters = promised(100, 0)
    assert promises.placed("r", 0) == 0
    promises.ended("r")
    assert counters == {"promised_tokens_l1": 100, "withdrawn_tokens_l1 not_used": 100}


def test_last_answer_decides_the_promised_tokens() -> None:
    promises, counters = promised(100, 0)
    promises.answered("r", 160, 60)
    promises.placed("r", 160)
    assert counters == {"promised_tokens_l1": 100, "promised_tokens_l2": 60}
    promises.answered("other", 10, 0)
    promises.answered("other", 0, 0)
    promises.ended("other")
    assert counters.total() == 160


def test_promised_tokens_of_l2_never_exceed_all_promised_tokens() -> None:
    """The engine has the rest itself, or computes it."""
    promises, counters = promised(0, 60)
    promises.answered("r", 40, 60)
    promises.placed("r", 40)
    assert counters == {"promised_tokens_l2": 40}
