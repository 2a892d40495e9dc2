"""Pins under pressure by real engines: a prompt that its request or its session's name pins is found after others filled L1 three times.

One whose engine does not trust requests is not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import TIMEOUTS, Engine, Engines, Prompt
from support.daemon import Daemon, wait_until
from support.pins import pins, post

Make = Callable[..., Prompt]
CHUNK = 256
TRUST = {"kvserver.trust_request_pins": True}
PIN = {"kvserver.pin_seconds": 3600}
# How the prompt is pinned: whether its engine trusts requests, what the request wants, and whether its session is pinned by name.
WAYS: dict[str, tuple[bool, dict[str, Any], bool]] = {
    "by its request": (True, PIN, False),
    "by its session's name": (True, {"kvserver.session_id": "agent"}, True),
    "by a request that is not trusted": (False, PIN, False),
}


def serve(engine: Engine, text: Prompt, params: dict[str, Any]) -> dict[str, Any]:
    """Answer one request with these kv_transfer_params; the engine then has nothing of its own."""
    sampling = {"max_tokens": 8, "extra_args": {"kv_transfer_params": params}}
    (output,) = engine.ask("serve", requests=[{"prompt": text, "sampling": sampling}])["outputs"]
    engine.wait_for_stores(120)
    engine.forget()
    return output


def fill_three_times(engine: Engine, daemon: Daemon, prompt: Make) -> None:
    """Other prompts take the room of L1 three times over."""
    l1 = daemon.status()["l1"]
    room, before, seed = l1["size_bytes"] // (l1["used_bytes"] // l1["chunks"]), l1["evictions"], 5000
    while (evicted := daemon.status()["l1"]["evictions"] - before) < 3 * room:
        assert seed < 5400, f"{evicted} of {3 * room} evictions"
        engine.generate([prompt(seed + number, 7 * CHUNK) for number in range(4)], 1)
        engine.wait_for_stores(120)
        engine.forget()
        seed += 4


@pytest.mark.parametrize(
    "way", [each if each == "by its request" else pytest.param(each, marks=pytest.mark.long) for each in WAYS]
)
def test_a_pinned_prompt_hits_after_others_filled_l1_three_times_and_after_a_restart(
    engines: Engines, start_daemon: Callable[..., Daemon], prompt: Make, l1_file: Path, way: str
) -> None:
    trusts, params, by_name = WAYS[way]
    engine = engines.get(f"trusts {trusts}", dtype="float32", extra=TIMEOUTS | (TRUST if trusts else {}))
    daemon = start_daemon(l1_size="8MiB", pin_share=0.5, l1_file=l1_file)
    text = prompt(4000, 3 * CHUNK + 40)
    cold = serve(engine, text, params)
    assert cold["cached_tokens"] == 0
    if by_name:
        found = post(daemon, session_id="agent", ttl_seconds=3600)[1]
        assert (found["outcome"], found["tokens"]) == ("accepted", 3 * CHUNK)
    hits = 3 * CHUNK if trusts else 0
    wait_until(lambda: sum(each["tokens"] for each in pins(daemon)) == hits, 60, "its chunks are stored")
    fill_three_times(engine, daemon, prompt)
    warm = serve(engine, text, {"kvserver.no_store": True})
    assert (warm["tokens"], warm["cached_tokens"]) == (cold["tokens"], hits)
    if not hits:
        assert engine.counters()["scheduler"]["refused_pins"] == 1
        return
    before = pins(daemon)
    assert daemon.terminate() == 0
    (daemon.folder / "log").unlink()
    daemon.start()
    wait_until(lambda: "L1 kept" in daemon.log, 120, "L1 is adopted")
    engines.wait_registered(daemon)
    wait_until(lambda: pins(daemon) == before, 60, "its chunks are adopted")
    fill_three_times(engine, daemon, prompt)
    warm = serve(engine, text, {"kvserver.no_store": True})
    assert (warm["tokens"], warm["cached_tokens"]) == (cold["tokens"], hits)
    assert daemon.http(f"/cache/pins/{before[0]['id']}", "DELETE")[0] == 200
    fill_three_times(engine, daemon, prompt)
    assert serve(engine, text, {"kvserver.no_store": True})["cached_tokens"] == 0
    daemon.audit()
