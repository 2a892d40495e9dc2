"""For a model without KV cache groups (encoder-only) `request_finished_all_groups` raised IndexError, which no fence caught.
Every method of vLLM's interface is called here: on connectors that refused their engine, and on ones whose halves fail.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.outputs import KVConnectorOutput

from kvserver.adapters.common.steps import StepPlan, StepReport
from kvserver.adapters.vllm import KVServerConnector
from kvserver.adapters.vllm.connector import StillWritten


class Metric:
    """A Prometheus metric of no registry."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def labels(self, *args: Any) -> Metric:
        return self

    def inc(self, amount: float = 1) -> None:
        pass

    observe = inc


METRICS = dict.fromkeys((prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram), Metric)


class Failing:
    """A half in which everything fails."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError("a fault of ours")


def stand_ins(blocks: tuple[list[int], ...]) -> dict[str, Any]:
    """What vLLM hands over, by the name of the parameter."""
    request = SimpleNamespace(request_id="r", num_tokens=100, block_hashes=[b"x" * 32] * 6, lora_request=None)
    step = SimpleNamespace(
        total_num_scheduled_tokens=1,
        num_scheduled_tokens={},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
        ),
        finished_req_ids=set(),
    )
    pool = SimpleNamespace(metrics_collector=None, free_blocks=lambda blocks: None, blocks=[])
    return {
        "request": request,
        "blocks": SimpleNamespace(get_block_ids=lambda: blocks),
        "block_ids": blocks[0] if blocks else [],
        "num_computed_tokens": 0,
        "num_external_tokens": 16,
        "scheduler_output": step,
        "connector_metadata": StepPlan(),
        "kv_connector_metadata": StepPlan(),
        "connector_output": KVConnectorOutput(kv_connector_worker_meta=StepReport([1], ["r"], [(1, [2])], [1])),
        "finished_req_ids": {"r"},
        "kv_caches": {},
        "copy_operation": lambda *args: None,
        "forward_context": None,
        "kwargs": None,
        "layer_name": "layers.0",
        "kv_layer": None,
        "attn_metadata": None,
        "kv_cache_manager": SimpleNamespace(block_pool=pool),
        "gpu_block_pool": pool,
        "partial_tail_offloads": [],
        "vllm_config": SimpleNamespace(kv_transfer_config=None),
        "kv_transfer_config": SimpleNamespace(kv_connector_extra_config={}),  # of 0.33
        "extra_config": {},
        "metadata": {(1, 0): None},
        "data": {"loads": 1},
        "metric_types": METRICS,
        "labelnames": ["engine"],
        "per_engine_labelvalues": {0: ["0"]},
    }


def calls(connector: KVServerConnector, blocks: tuple[list[int], ...]) -> Iterator[tuple[str, Any]]:
    """Each public method of the interface, with what it returned. vLLM binds a plan before it calls a worker's."""
    given = stand_ins(blocks)
    names = {name for owner in (base.KVConnectorBase_V1, base.SupportsHMA) for name in dir(owner)}
    public = sorted(name for name in names if not name.startswith("_"))
    assert len(public) > 30
    for name in [*public, "shutdown"]:
        if not callable(attribute := getattr(connector, name)):
            yield name, attribute
            continue
        arguments = dict(given)
        if name == "request_finished_all_groups":
            arguments["block_ids"] = blocks
        if name == "set_xfer_handshake_metadata":
            arguments["metadata"] = {0: None}
        connector.bind_connector_metadata(StepPlan(idle=True))
        parameters = inspect.signature(attribute).parameters.values()
        wanted = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        try:
            yield name, attribute(*[arguments[parameter] for parameter in wanted])
        except StillWritten as error:  # which 0.33 takes as: no sleep now
            yield name, error


def without_groups(config, caches):
    caches.kv_cache_groups.clear()


def refused_configuration(config, caches):
    config.parallel_config = copy.copy(config.parallel_config)
    object.__setattr__(config.parallel_config, "prefill_context_parallel_size", 2)


def bad_setting(config, caches):
    config.kv_transfer_config.kv_connector_extra_config["kvserver.load_timeout_ms"] = "soon"


def check(answers: dict[str, Any]) -> None:
    """What vLLM takes as: nothing here, nothing to wait for."""
    assert answers["get_num_new_matched_tokens"] == (0, False)
    assert answers["request_finished"] == answers["request_finished_all_groups"] == (False, None)
    assert isinstance(answers["build_connector_meta"], StepPlan)
    assert answers["get_transfer_results"] == base.KVConnectorTransferResults()
    assert answers["get_finished"] == (None, None)
    assert answers["get_block_ids_with_load_errors"] == set()
    assert not answers["has_pending_push_work"]
    assert not answers["requires_kv_delivery"]
    assert answers["get_finished_count"] is None
    assert answers["get_handshake_metadata"] is None
    assert list(answers["take_events"]) == []


@pytest.mark.parametrize("blocks", [(), ([1, 2],), ([1, 2], [3, 4])], ids=["no group", "one group", "two groups"])
@pytest.mark.parametrize("adjust", [without_groups, refused_configuration, bad_setting])
def test_every_method_works_on_a_connector_that_refused_its_engine(make_daemon, make_halves, adjust, blocks):
    for connector in make_halves(make_daemon(), adjust):
        check(dict(calls(connector, blocks)))
        assert set(connector.errors) <= {"_set_up: ValueError", "_set_up: ValidationError"}


def test_every_method_holds_the_faults_of_its_half(make_daemon, make_halves):
    for connector in make_halves(make_daemon(), lambda config, caches: None):
        connector.shutdown()
        connector.scheduler = connector.worker = Failing()
        answers = dict(calls(connector, ([1, 2],)))
        check(answers)
        assert answers["reset_cache"] is False, "what was not reset must not be taken for reset"
        assert sum(connector.errors.values()) >= 15


def test_metrics_that_cannot_be_made_do_not_end_the_front_end(caplog):
    def taken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("Duplicated timeseries in CollectorRegistry")

    config = SimpleNamespace(kv_transfer_config=None)
    made = KVServerConnector.build_prom_metrics(config, dict.fromkeys(METRICS, taken), ["engine"], {0: ["0"]})
    made.observe({"lookups": 1, "load_seconds": [0.1]})
    assert "Duplicated timeseries" in caplog.text
