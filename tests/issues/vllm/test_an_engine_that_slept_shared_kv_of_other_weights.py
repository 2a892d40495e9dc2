"""Trainers let an engine sleep, wake it, and load other weights in place without a reset: what it stores then is its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import TIMEOUTS, Engines, Prompt
from support.daemon import Daemon


@pytest.mark.long
@pytest.mark.parametrize("on_sleep", ["private", "keep"])
def test_kv_after_sleep_is_found_by_no_other_engine(
    engines: Engines, start_daemon: Callable[..., Daemon], prompt: Callable[..., Prompt], on_sleep: str
) -> None:
    """On CPUs sleep frees nothing and notifies no connector, so `keep` takes it for a reset."""
    engine = engines.get(f"trained {on_sleep}", extra=TIMEOUTS | {"kvserver.on_sleep": on_sleep})
    other = engines.get("other", extra=TIMEOUTS)
    other.forget()
    start_daemon()
    text = prompt(1, 700)
    cold = engine.generate([text])[0]
    engine.ask("sleep", level=1)
    engine.ask("wake_up")
    assert engine.ask("negate_norms")["changed"] == [4]
    new = engine.generate([text])[0]
    engine.wait_for_stores()
    assert (new["cached_tokens"], new["tokens"] == cold["tokens"]) == (0, False)
    later = prompt(2, 700)
    engine.generate([later])
    engine.wait_for_stores()
    assert other.generate([later])[0]["cached_tokens"] == 0
    assert other.generate([text])[0]["tokens"] == cold["tokens"]
