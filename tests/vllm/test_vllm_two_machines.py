"""Prefill and decode by two real engines, each with a daemon of its own, which stand for two machines that share a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engines import TIMEOUTS, Engine, Engines, Prompt
from support.daemon import Daemon, wait_until
from support.store_process import store_process
from test_vllm_roles import handed_over

Make = Callable[..., Prompt]
CHUNK = 256
COUNT = 8


@pytest.fixture(params=["valkey", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("s3", "mooncake"))])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with store_process(request.param, "handover") as store:
        yield store.url + "&timeout=60s" * (request.param == "s3")


@pytest.fixture
def decodes(url: str, start_daemon: Callable[..., Daemon]) -> Daemon:
    """The decode engine's daemon."""
    return start_daemon(wait=False, l2=url)


@pytest.fixture
def prefills(url: str, decodes: Daemon) -> Iterator[Daemon]:
    """The prefill engine's daemon."""
    daemon = Daemon(endpoint=f"{decodes.endpoint}-prefill", l1_size="256MiB", chunk_tokens=CHUNK, l2=url)
    daemon.start()
    yield daemon
    daemon.close()


def engine_of(engines: Engines, daemon: Daemon, name: str, role: str) -> Engine:
    extra = TIMEOUTS | {"kvserver.fill_timeout_ms": 10_000, "kvserver.weights_digest": "whole"}
    engine = engines.get(
        name, endpoint=daemon.endpoint, dtype="float32", extra=extra, transfer={"kv_role": role}, measures_speed=False
    )
    engine.wait_ready()
    wait_until(lambda: any(row["namespace"] for row in daemon.status()["instances"]), 60, f"{name} is registered")
    wait_until(lambda: engine.counters()["connected"], 60, f"both halves of {name} are connected")
    daemon.wait_for_tiers()
    return engine


def requests_of(daemon: Daemon) -> dict[str, Any]:
    (row,) = daemon.status()["instances"]
    found: dict[str, Any] = row["requests"]
    return found


def test_prompts_that_one_machine_prefills_are_decoded_by_another(
    engines: Engines, prefills: Daemon, decodes: Daemon, prompt: Make
) -> None:
    """The decode engine computes the end behind the last whole chunk, and a token; its answers are those without a cache."""
    prefill = engine_of(engines, prefills, "prefill", "kv_producer")
    decode = engine_of(engines, decodes, "decode", "kv_consumer")
    prompts = [prompt(500 + number, 300 + 240 * number) for number in range(6)]
    answers = []
    for text in prompts:
        first = prefill.ask("serve", requests=[{"prompt": text, "sampling": {"max_tokens": 1}}])["outputs"]
        lookups = requests_of(decodes)["lookups"]
        decode.send("serve", requests=handed_over([text], first, COUNT))
        wait_until(lambda before=lookups: requests_of(decodes)["lookups"] > before, 60, "the prompt is looked up")
        prefill.wait_for_stores()  # an engine of this test sends the last ones with its next step
        (answer,) = decode.receive()["outputs"]
        assert answer["cached_tokens"] >= len(text) // CHUNK * CHUNK - 1
        answers.append(answer["tokens"])
    assert answers == [computed["tokens"] for computed in prefill.generate(prompts, COUNT)]
    counts = requests_of(decodes)
    assert counts["handed_over_tokens"] >= sum(len(text) // CHUNK * CHUNK for text in prompts)
    assert (counts["late_handovers"], counts["lost_handovers"]) == (0, 0)
