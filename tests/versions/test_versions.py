"""What every version of vLLM that README names must show, with real engines: `run.py` puts each in turn first on PYTHONPATH."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from engines import BY_NAME, TIMEOUTS, Engine, Engines, Prompt
from support.daemon import Daemon
from test_vllm_outputs import differs_when_zeroed, same

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]

pytestmark = pytest.mark.usefixtures("well_afterwards")


@pytest.fixture
def second(engines: Engines) -> Engine:
    """With chunked prefill in small steps; it finds the connector by its name."""
    return engines.get("second", dtype="float32", extra=TIMEOUTS, transfer=BY_NAME, max_num_batched_tokens=256)


def test_the_engine_is_of_the_version_under_test(first: Engine) -> None:
    assert first.ask("version")["version"] == os.environ["KVSERVER_TEST_VLLM"]


def test_a_second_engine_hits_and_its_outputs_equal_those_of_the_first(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    """The control is the first one warm from its own cache to the same length, so equal to the bit."""
    daemon = start_daemon()
    texts = [prompt(n, 256 * n + 10 + n) for n in (1, 2, 4)]
    cold = [first.generate([text])[0] for text in texts]
    control = [first.generate([text])[0] for text in texts]
    first.wait_for_stores()
    warm = [second.generate([text])[0] for text in texts]
    assert [o["cached_tokens"] for o in (*cold, *warm)] == [0, 0, 0, 256, 512, 1024]
    assert all(same(w, c) for w, c in zip(warm, control, strict=True))
    assert [o["tokens"] for o in warm] == [o["tokens"] for o in cold]
    totals = daemon.status()["totals"]
    assert (totals["errors"], totals["failed_stores"], totals["failed_loads"]) == (0, 0, 0)


def test_zeroed_bytes_give_other_tokens(first: Engine, second: Engine, start_daemon: Start, prompt: Make) -> None:
    """The negative control: the comparison of the other tests would notice wrong KV."""
    assert differs_when_zeroed(start_daemon(), first, second, prompt(50, 1000), 768)


def test_a_daemon_that_was_killed_is_replaced_without_a_restart_of_vllm(
    first: Engine, second: Engine, engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    daemon = start_daemon()
    text = prompt(60, 700)
    cold = first.generate([text])[0]
    first.wait_for_stores()
    daemon.kill()
    first.forget()
    alone = first.generate([text])[0]
    assert (alone["cached_tokens"], alone["tokens"]) == (0, cold["tokens"])
    first.forget()
    daemon.start()
    engines.wait_registered(daemon)
    assert first.generate([text])[0]["tokens"] == cold["tokens"]  # stores again
    first.wait_for_stores()
    warm = second.generate([text])[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (512, cold["tokens"])


def test_preempted_requests_keep_their_tokens(first: Engine, second: Engine, start_daemon: Start, prompt: Make) -> None:
    """The 200 blocks hold four prompts of 1,530 tokens and not what they decode. Another engine reads what was stored meanwhile."""
    texts = [prompt(90 + n, 1530) for n in range(4)]
    alone = [first.generate([text], max_tokens=60)[0] for text in texts]  # no daemon: the reference
    first.forget()
    daemon = start_daemon()
    before = first.metrics()["vllm:num_preemptions"]
    together = first.generate(texts, max_tokens=60)
    assert first.metrics()["vllm:num_preemptions"] > before
    assert [o["tokens"] for o in together] == [o["tokens"] for o in alone]
    first.wait_for_stores()
    second.forget()
    assert [o["tokens"] for o in second.generate(texts, max_tokens=60)] == [o["tokens"] for o in alone]
    totals = daemon.status()["totals"]
    assert totals["loaded_bytes"] > totals["failed_loads"] == totals["errors"] == 0
