"""Outputs never change: a request that is served from the daemon equals one that is computed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engines import BY_NAME, TIMEOUTS, Engine, Engines, Prompt
from support.daemon import Daemon, wait_until
from support.zeroed_l1 import zero_l1

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return bool(left["tokens"] == right["tokens"] and left["logprobs"] == right["logprobs"])


def differs_when_zeroed(daemon: Daemon, writer: Engine, reader: Engine, text: Prompt, hit: int) -> bool:
    """True if other tokens come of KV that was zeroed in L1, for `hit` tokens: else the tests that compare would not see wrong KV."""
    cold = writer.generate([text])[0]
    writer.wait_for_stores()
    reader.forget()
    assert zero_l1(daemon) > 500_000
    warm = reader.generate([text])[0]
    reader.forget()
    assert warm["cached_tokens"] == hit
    return bool(warm["tokens"] != cold["tokens"])


def test_a_fresh_engine_gets_hits_and_equal_tokens_and_logprobs_in_bf16(
    engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    """The control is the first engine warm from its own cache to the same length, so equal to the bit. One finds the connector by its name.

    Prompts end within 32 tokens after a chunk: the engine's own hit then has the daemon's length.
    """
    writer = engines.get("bf16 writer", extra=TIMEOUTS, transfer=BY_NAME)
    reader = engines.get("bf16 reader", extra=TIMEOUTS)
    daemon = start_daemon()
    prompts = [prompt(n, 256 * n + 10 + n) for n in (1, 2, 4)]
    cold = [writer.generate([p])[0] for p in prompts]
    control = [writer.generate([p])[0] for p in prompts]
    writer.wait_for_stores()
    before = reader.metrics()
    warm = [reader.generate([p])[0] for p in prompts]
    after = reader.metrics()
    assert [o["cached_tokens"] for o in cold] == [0, 0, 0]
    assert [o["cached_tokens"] for o in control] == [256, 512, 1024]
    assert [o["cached_tokens"] for o in warm] == [256, 512, 1024]
    assert all(same(w, c) for w, c in zip(warm, control, strict=True))
    name = "vllm:external_prefix_cache_hits"
    assert after[name] - before[name] == 256 + 512 + 1024
    totals = daemon.status()["totals"]
    assert totals["hit_tokens"] >= 256 + 512 + 1024
    assert totals["errors"] == 0


def test_zeroed_bytes_give_other_tokens(first: Engine, second: Engine, start_daemon: Start, prompt: Make) -> None:
    """The negative control: the comparison of the other tests would notice wrong KV."""
    assert differs_when_zeroed(start_daemon(), first, second, prompt(50, 1000), 768)


def test_chunked_prefill_stores_and_loads_alike(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    """One engine prefills in steps of 256 tokens, the other at once; each reads what the other stored."""
    start_daemon()
    texts = [prompt(60 + n, 900 + 37 * n) for n in range(4)]
    stored_by_second = [second.generate([t])[0] for t in texts[:2]]
    stored_by_first = [first.generate([t])[0] for t in texts[2:]]
    first.wait_for_stores()
    second.wait_for_stores()
    warm = [first.generate([t])[0] for t in texts[:2]] + [second.generate([t])[0] for t in texts[2:]]
    assert all(o["cached_tokens"] == 768 for o in warm)
    assert [o["tokens"] for o in warm] == [o["tokens"] for o in stored_by_second + stored_by_first]


def test_a_local_hit_that_ends_mid_chunk_is_completed_from_the_daemon(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    daemon = start_daemon()
    shared, long = prompt(70, 330), prompt(71, 500)
    whole = shared + long
    cold = first.generate([whole])[0]  # stores three chunks
    first.wait_for_stores()
    second.forget()
    daemon.http("/cache/clear", "POST")
    second.generate([shared])  # 320 tokens in its own cache, one chunk in the daemon
    second.wait_for_stores()
    first.forget()
    assert first.generate([whole])[0]["tokens"] == cold["tokens"]  # stores the other two again
    first.wait_for_stores()
    loaded_before = daemon.status()["totals"]["loaded_bytes"]
    warm = second.generate([whole])[0]
    assert warm["cached_tokens"] == 768
    assert warm["tokens"] == cold["tokens"]
    # Engines of other dtypes may be registered too; those that loaded are of this one's.
    loaders = [i for i in daemon.status()["instances"] if i["requests"]["loaded_bytes"]]
    block_bytes = loaders[0]["workers"][0]["block_bytes"]
    # 320 of 768 tokens were local, in the middle of the second chunk: 14 blocks of 32 tokens were loaded.
    assert daemon.status()["totals"]["loaded_bytes"] - loaded_before == 14 * block_bytes
    # The blocks that the two requests shared were left alone.
    assert (
        second.generate([shared + prompt(72, 20)])[0]["tokens"]
        == first.generate([shared + prompt(72, 20)])[0]["tokens"]
    )


def test_a_prompt_of_whole_chunks_computes_its_last_token(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    start_daemon()
    text = prompt(80, 512)
    cold = first.generate([text])[0]
    first.wait_for_stores()
    second.forget()
    warm = second.generate([text])[0]
    assert warm["cached_tokens"] == 511
    assert warm["tokens"] == cold["tokens"]


def test_forced_preemption_keeps_tokens(first: Engine, second: Engine, start_daemon: Start, prompt: Make) -> None:
    """The 200 blocks hold four prompts of 1,530 tokens and not what they decode: requests are preempted and resumed, from the daemon
    where it can."""
    texts = [prompt(90 + n, 1530) for n in range(4)]
    alone = [first.generate([t], max_tokens=60)[0] for t in texts]  # no daemon: the reference
    first.forget()
    daemon = start_daemon()
    before = first.metrics()["vllm:num_preemptions"]
    together = first.generate(texts, max_tokens=60)
    assert first.metrics()["vllm:num_preemptions"] > before
    assert [o["tokens"] for o in together] == [o["tokens"] for o in alone]
    first.wait_for_stores()
    second.forget()
    warm = second.generate(texts, max_tokens=60)
    assert [o["tokens"] for o in warm] == [o["tokens"] for o in alone]
    assert daemon.status()["totals"]["loaded_bytes"] > 0
    assert first.counters()["errors"] == {}
    assert first.counters()["blocks_in_use"] == 0


def test_many_requests_with_shared_prefixes_at_once_give_equal_tokens(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    daemon = start_daemon()
    stems = [prompt(100 + n, 300 * (n + 1)) for n in range(3)]
    texts = [stems[n % 3] + prompt(110 + n, 40 + 13 * n) for n in range(12)]
    alone = [first.generate([t], max_tokens=8)[0]["tokens"] for t in texts]
    first.wait_for_stores()
    second.forget()
    first.forget()
    assert [o["tokens"] for o in second.generate(texts, max_tokens=8)] == alone
    assert [o["tokens"] for o in first.generate(texts, max_tokens=8)] == alone
    assert daemon.status()["totals"]["failed_loads"] == 0
    assert daemon.status()["totals"]["errors"] == 0


def test_prompts_that_end_anywhere_in_a_chunk_and_the_turns_behind_them_give_equal_tokens(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    """Chunks of 256 tokens, blocks of 32. Each turn's prompt begins with the last turn's prompt and answer."""
    daemon = start_daemon(tails="on")
    ends = (40, 256 + 31, 256 + 33, 512 - 1, 512 + 100, 768 - 32, 768)
    prompts = [prompt(300 + n, length) for n, length in enumerate(ends)]

    def stored(text: Prompt, max_tokens: int) -> dict[str, Any]:
        """A store whose blocks the next request may need would be given up."""
        answer = first.generate([text], max_tokens=max_tokens)[0]
        first.wait_for_stores()
        return answer

    for _ in range(2):
        cold = [stored(text, 40) for text in prompts]
        second.forget()
        warm = [second.generate([text], max_tokens=40)[0] for text in prompts]
        for text, had, got in zip(prompts, cold, warm, strict=True):
            assert got["tokens"] == had["tokens"], len(text)
            assert got["cached_tokens"] == min(len(text) // 32 * 32, len(text) - 1)
        first.forget()
        turns = [
            [*text, *answer["tokens"], *prompt(400 + n, 45)]
            for n, (text, answer) in enumerate(zip(prompts, cold, strict=True))
        ]
        again = [stored(turn, 8) for turn in turns]
        for text, got in zip(prompts, again, strict=True):
            assert got["cached_tokens"] == (len(text) + 39) // 32 * 32, "the last answer's end, inside a chunk"
        second.forget()
        mine = [second.generate([turn], max_tokens=8)[0] for turn in turns]
        assert [m["tokens"] for m in mine] == [a["tokens"] for a in again]
        prompts = turns
    assert daemon.status()["totals"]["errors"] == 0
    second.wait_for_stores()


TEXTS, LENGTH, HIT = 3, 900, 768  # prompts, and tokens of each
# How many tiers are behind L1. A chunk has 1 MiB.
TIERS: dict[str, tuple[int, dict[str, object]]] = {
    "none": (0, {}),
    "l1": (0, {}),
    "l2": (1, {"l1_size": "5MiB"}),
    "l1 and l2": (1, {}),
    "several l2": (2, {}),
}


@pytest.mark.parametrize("which", TIERS)
def test_every_choice_of_tiers_gives_equal_tokens(
    engines: Engines, first: Engine, second: Engine, start_daemon: Start, prompt: Make, tmp_path: Path, which: str
) -> None:
    """And vLLM's own metrics have the hits, by where they come from. Of several tiers the first has lost all."""
    tiers, flags = TIERS[which]
    folders = [tmp_path / f"l2-{number}" for number in range(tiers)]
    daemon = None
    if which != "none":
        urls = " ".join(f"file://{folder}?size=64MiB" for folder in folders)
        daemon = start_daemon(env={"KVSERVER_L2": urls}, **flags)
    texts = [prompt(700 + 10 * list(TIERS).index(which) + number, LENGTH) for number in range(TEXTS)]
    for engine in (first, second):
        engine.forget()
    cold = []
    for text in texts:
        cold.append(first.ask("generate", prompts=[text], max_tokens=16))
        if daemon is not None:
            first.wait_for_stores()
            wait_until(lambda: all_written(daemon, 3 * len(cold)), 20, "all is written")
    if daemon is not None and which in ("l1 and l2", "several l2"):
        daemon.terminate()
        for folder in folders[:-1]:
            shutil.rmtree(folder)
        daemon.start()
        daemon.wait_for_tiers()
        engines.wait_registered(daemon)
    before = second.metrics()
    warm = [second.ask("generate", prompts=[text], max_tokens=16) for text in texts]
    after = second.metrics()
    second.wait_for_stores()
    seconds = [sum(answer["seconds"] for answer in answers) for answers in (cold, warm)]
    print(f"{which}: {TEXTS} prompts of {LENGTH} tokens took {seconds[0]:.2f} s, then {seconds[1]:.2f} s")
    assert [a["outputs"][0]["tokens"] for a in warm] == [a["outputs"][0]["tokens"] for a in cold]
    cached = [answer["outputs"][0]["cached_tokens"] for answer in warm]
    assert cached == [HIT if which != "none" else 0] * TEXTS, explained(second, daemon)

    def grew(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    hits = grew("vllm:external_prefix_cache_hits")
    assert hits == grew("vllm:kvserver_promised_tokens") == (TEXTS * HIT if which != "none" else 0)
    assert grew("vllm:kvserver_withdrawn_tokens") == 0
    from_l1, from_l2 = (grew(f"vllm:kvserver_loaded_tokens {tier}") for tier in ("l1", "l2"))
    assert [grew(f"vllm:prompt_tokens_cached_by_source {name}") for name in ("host", "disk")] == [from_l1, from_l2]
    assert from_l1 + from_l2 == hits
    if which == "l2":
        assert from_l2 >= HIT, "L1 has no space for what of the first prompt"
    else:
        assert (from_l1 > 0, from_l2 > 0) == (which == "l1", bool(folders))


def explained(engine: Engine, daemon: Daemon | None) -> str:
    """Why it had no hits, as far as engine and daemon report."""
    facts = [engine.counters(), engine.tail(20)]
    if daemon is not None:
        status = daemon.status()
        facts += [status[part] for part in ("loop_lag_seconds", "loop_turns", "totals", "instances")] + [
            daemon.log[-4000:]
        ]
    return "\n".join(map(str, facts))


def all_written(daemon: Daemon, objects: int) -> bool:
    return all(tier["objects"] == objects and not tier["queue_objects"] for tier in daemon.status()["l2"])


# The last one: afterwards the first engine shares with no other.
def test_other_weights_at_the_same_path_are_another_namespace(
    first: Engine, engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    """After an in-place change the old KV is not found, by this engine or by one that starts from the new files."""
    daemon = start_daemon()
    text = prompt(120, 600)
    first.generate([text])
    first.wait_for_stores()
    assert first.ask("reset_prefix_cache", reset_connector=True)["ok"]
    again = first.generate([text])[0]
    assert again["cached_tokens"] == 0, "KV of the old weights was served after reset_cache"
    first.wait_for_stores()
    assert daemon.status()["l1"]["chunks"] == 4, "the new epoch stores apart from the old one"
    first.forget()
    assert first.generate([text])[0]["cached_tokens"] == 512, "its own epoch is found"
    # A named version may be shared again: here, with itself under the same name.
    first.ask("set_weights_version", version="step-100")
    assert first.ask("reset_prefix_cache", reset_connector=True)["ok"]
    assert first.generate([text])[0]["cached_tokens"] == 0
    first.wait_for_stores()
    first.ask("set_weights_version", version="")
    assert first.ask("reset_prefix_cache", reset_connector=True)["ok"]
    first.ask("set_weights_version", version="step-100")
    assert first.ask("reset_prefix_cache", reset_connector=True)["ok"]
    assert first.generate([text])[0]["cached_tokens"] == 512
    # Other files at the same path: a fresh engine must not see anything of the first one.
    old = {p: p.stat().st_mtime_ns for p in engines.model.iterdir()}
    tiny_models.llama(engines.model, seed=1)
    try:
        fresh = engines.start("other weights", dtype="float32")
        try:
            assert fresh.generate([text])[0]["cached_tokens"] == 0
            namespaces = [i["namespace"] for i in daemon.status()["instances"]]
            assert 1 in [namespaces.count(n) for n in namespaces], "the fresh engine shares a namespace"
        finally:
            fresh.kill()
    finally:
        tiny_models.llama(engines.model, seed=0)
        for path, mtime in old.items():
            os.utime(path, ns=(mtime, mtime))
