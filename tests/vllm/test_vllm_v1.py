"""Model runner V1 without asynchronous scheduling, which vLLM calls deprecated: loads, preemption, a daemon's end.

All other files of this folder run V2. `make test-versions` has older vLLMs with V1.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import TIMEOUTS, Engine, Engines, Prompt
from support.daemon import Daemon
from test_vllm_outputs import zero_l1

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]

pytestmark = pytest.mark.usefixtures("well_afterwards")


@pytest.fixture
def v1(engines: Engines) -> Engine:
    return engines.get("v1", runner="v1", dtype="float32", extra=TIMEOUTS, measures_speed=False)


def test_loads_of_runner_v1_give_equal_tokens(v1: Engine, start_daemon: Start, prompt: Make) -> None:
    daemon = start_daemon()
    text = prompt(800, 700)
    cold = v1.generate([text])[0]
    v1.wait_for_stores()
    v1.forget()
    warm = v1.generate([text])[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (512, cold["tokens"])
    v1.forget()
    assert zero_l1(daemon) > 0
    assert v1.generate([text])[0]["tokens"] != cold["tokens"], "the comparison would notice wrong KV"
    v1.forget()


def test_preempted_requests_of_runner_v1_keep_their_tokens(v1: Engine, start_daemon: Start, prompt: Make) -> None:
    """The 200 blocks hold four prompts of 1,530 tokens and not what they decode."""
    texts = [prompt(810 + n, 1530) for n in range(4)]
    alone = [v1.generate([text], max_tokens=60)[0]["tokens"] for text in texts]  # no daemon: the reference
    v1.forget()
    daemon = start_daemon()
    before = v1.metrics()["vllm:num_preemptions"]
    together = v1.generate(texts, max_tokens=60)
    assert v1.metrics()["vllm:num_preemptions"] > before
    assert [o["tokens"] for o in together] == alone
    v1.wait_for_stores()
    v1.forget()
    assert [v1.generate([text], max_tokens=60)[0]["tokens"] for text in texts] == alone
    totals = daemon.status()["totals"]
    assert totals["loaded_bytes"] > totals["failed_loads"] == totals["errors"] == 0


def test_tokens_of_runner_v1_stay_right_when_the_daemon_is_killed_during_a_load(
    v1: Engine, start_daemon: Start, prompt: Make
) -> None:
    daemon = start_daemon(pauses=True)
    text = prompt(820, 900)
    cold = v1.generate([text])[0]
    v1.wait_for_stores()
    v1.forget()
    with daemon.paused_copies():
        v1.send("generate", prompts=[text], max_tokens=16)
        daemon.wait_for_a_copy()
        daemon.kill()
    assert v1.receive()["outputs"][0]["tokens"] == cold["tokens"]
    assert v1.counters()["worker"]["load_failures"] > 0
