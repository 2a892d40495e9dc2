"""A linker cannot put a request off: what only storage has is computed once more, and found by later requests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from conftest import Engines
from sglang_engines import PAGE
from support.daemon import wait_until
from test_sglang_outputs import Make, Start, cached, wait_for_stores

pytestmark = pytest.mark.long


def test_a_prompt_that_only_storage_has_is_found_by_a_later_request(
    engines: Engines, start_daemon: Start, prompt: Make, tmp_path: Path
) -> None:
    engine = engines.get("first")
    tier = f"file://{tmp_path}/l2?size=256MiB"
    daemon = start_daemon(engine, l2=tier)
    text, pages = prompt(1, 700), 700 // PAGE
    cold = engine.generate([text])[0]
    wait_for_stores(daemon, pages)
    wait_until(lambda: daemon.tier()["objects"] >= pages, 20, "spilled")
    daemon.terminate()
    daemon = start_daemon(engine, l2=tier)
    assert daemon.status()["l1"]["chunks"] == 0

    def found() -> bool:
        engine.flush()
        warm = engine.generate([text])[0]
        assert warm["tokens"] == cold["tokens"]
        time.sleep(0.5)
        return bool(warm["cached_tokens"] == cached(700))

    wait_until(found, 60, "a hit")
    assert daemon.status()["totals"]["hit_tokens"] >= cached(700)
