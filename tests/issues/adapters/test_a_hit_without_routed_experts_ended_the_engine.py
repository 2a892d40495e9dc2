"""With `enable_return_routed_experts` vLLM 0.31 and 0.32 look for rows of every cached token in a store of the worker's own process,
and ended the engine for tokens that another engine had computed. The like: results of each token that vLLM keeps beside the KV cache.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from made_up_model import prompt
from support.daemon import wait_until
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

from kvserver.protocol import EndRequest

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)


def returning_experts(config: VllmConfig, caches: Any) -> None:
    config.aux_output_config.enable_return_routed_experts = True


@pytest.mark.parametrize("served", [False, True])
def test_where_vllm_does_not_take_such_hits_back_the_engine_runs_without_cache(
    make_daemon, make_halves, monkeypatch, caplog, served
):
    if served:
        monkeypatch.setattr(AuxOutputSchedulerConnector, "cap_external_hit", None, raising=False)
    else:
        monkeypatch.delattr(AuxOutputSchedulerConnector, "cap_external_hit", raising=False)
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    halves = make_halves(make_daemon(), returning_experts)
    lines = [record.getMessage() for record in caplog.records if "runs without cache" in record.getMessage()]
    assert [("enable_return_routed_experts" in line) for line in lines] == ([] if served else [True, True])
    assert (halves[0].scheduler is not None) == served
    for half in halves:
        half.shutdown()


def taken_back(engine: Any) -> None:
    """As vLLM does with the answer where rows of its tokens are not there."""
    asked = engine.scheduler.connector.get_num_new_matched_tokens

    def ask(request: Any, local_tokens: int) -> tuple[int | None, bool]:
        tokens, _ = asked(request, local_tokens)
        return (tokens and 0), False

    engine.scheduler.connector.get_num_new_matched_tokens = ask


def by_vllm_itself(engine: Any) -> None:
    engine.scheduler.aux_output_connector.take_output = lambda request, output: None  # no worker makes such output here


WAYS = {"as vLLM 0.33 does": (lambda config, caches: None, taken_back)}
if hasattr(AuxOutputSchedulerConnector, "cap_external_hit"):
    WAYS["by its own scheduler"] = (returning_experts, by_vllm_itself)


@pytest.mark.parametrize(("adjust", "prepare"), WAYS.values(), ids=WAYS)
def test_a_hit_that_vllm_takes_back_is_counted_and_explained(make_daemon, make_tap, make_engine, adjust, prepare):
    daemon = make_daemon(chunk_tokens=CHUNK)
    tap = make_tap(daemon)
    make_engine(tap.endpoint).generate("cold", TOKENS)
    warm = make_engine(tap.endpoint, adjust=adjust)
    prepare(warm)
    assert warm.generate("warm", TOKENS).external == 0
    counters = warm.connector.scheduler.counters
    assert counters["promised_tokens_l1"] == counters["withdrawn_tokens_l1 not_used"] == 2 * CHUNK
    assert counters["loaded_tokens_l1"] == 0
    wait_until(lambda: len(tap.of(EndRequest)) == 2)
    assert tap.of(EndRequest)[1].not_loaded == "not_used"

    def explained() -> dict[str, Any] | None:
        code, body = daemon.http("/explain?request_id=warm")
        found: dict[str, Any] = json.loads(body)["requests"][0] if code == 200 else {"outcome": "running"}
        return found if found["outcome"] != "running" else None

    found = wait_until(explained)
    assert (found["outcome"], found["not_loaded"]) == ("not_loaded", "not_used")
    assert any("enable_return_routed_experts" in line for line in found["advice"])


def test_a_hit_that_is_used_states_no_reason(make_daemon, make_tap, make_engine):
    tap = make_tap(make_daemon(chunk_tokens=CHUNK))
    for name, tokens in (("cold", 0), ("warm", 2 * CHUNK)):
        assert make_engine(tap.endpoint).generate(name, TOKENS).external == tokens
    wait_until(lambda: len(tap.of(EndRequest)) == 2)
    assert [end.not_loaded for end in tap.of(EndRequest)] == ["", ""]
