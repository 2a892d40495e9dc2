"""Outputs never change: a request of SGLang's that is served from the daemon equals one that is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from conftest import Engines
from sglang_engines import PAGE, Prompt
from support.daemon import Daemon, wait_until
from support.zeroed_l1 import zero_l1

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return bool(left["tokens"] == right["tokens"] and left["logprobs"] == right["logprobs"])


def cached(length: int) -> int:
    """Tokens of a prompt that may come from a cache: whole pages, and one token is computed."""
    return (length - 1) // PAGE * PAGE


def wait_for_stores(daemon: Daemon, chunks: int) -> None:
    wait_until(lambda: daemon.status()["l1"]["chunks"] >= chunks, 20, f"{chunks} chunks in L1")


class Loads(NamedTuple):
    daemon: Daemon
    prompts: list[Prompt]
    reference: list[dict[str, Any]]  # of an engine without linker
    cold: list[dict[str, Any]]


def check_loads(engines: Engines, start_daemon: Start, prompt: Make) -> Loads:
    """Compare tokens and logprobs of loaded prompts with an engine without linker, and the first engine's own cache; it flushes in between."""
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
    for warm in (own, other, flushed):
        assert [o["cached_tokens"] for o in warm] == [cached(len(p)) for p in prompts]
        assert all(same(left, right) for left, right in zip(warm, own, strict=True))
    for outputs in (cold, own):
        assert [o["tokens"] for o in outputs] == [o["tokens"] for o in reference]
    totals = daemon.status()["totals"]
    assert totals["failed_loads"] == totals["errors"] == 0
    return Loads(daemon, prompts, reference, cold)


def test_a_second_engine_loads_what_the_first_stored_with_equal_tokens_and_logprobs(
    engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    daemon, prompts, reference, cold = check_loads(engines, start_daemon, prompt)
    assert all(same(left, right) for left, right in zip(cold, reference, strict=True))
    status = daemon.status()
    assert [(one["engine"], one["engine_version"]) for one in status["instances"]] == [("sglang", "0.5.23")] * 2
    log = engines.get("first").log.read_text()
    assert "is tested with real engines of SGLang 0.5.23 on CPUs; this is 0.5.23\n" in log
    assert status["totals"]["hit_tokens"] >= 2 * sum(cached(len(p)) for p in prompts)


def test_prompt_of_one_salt_is_not_found_under_another(engines: Engines, start_daemon: Start, prompt: Make) -> None:
    first, second = engines.get("first"), engines.get("second")
    daemon = start_daemon(first, second)
    text = prompt(60, 700)
    cold = first.generate([text], salt="one")[0]
    wait_for_stores(daemon, len(text) // PAGE)
    assert [second.generate([text], salt=salt)[0]["cached_tokens"] for salt in ("two", None)] == [0, 0]
    warm = second.generate([text], salt="one")[0]
    assert warm["cached_tokens"] == cached(len(text))
    assert warm["tokens"] == cold["tokens"]


def test_zeroed_bytes_give_other_tokens(engines: Engines, start_daemon: Start, prompt: Make) -> None:
    """The negative control: the comparison of the other tests would notice wrong KV."""
    first, second = engines.get("first"), engines.get("second")
    daemon = start_daemon(first, second)
    text = prompt(50, 1000)
    cold = first.generate([text])[0]
    wait_for_stores(daemon, len(text) // PAGE)
    assert zero_l1(daemon) > 1_000_000
    warm = second.generate([text])[0]
    assert warm["cached_tokens"] == cached(len(text))
    assert warm["tokens"] != cold["tokens"]
    second.flush()
