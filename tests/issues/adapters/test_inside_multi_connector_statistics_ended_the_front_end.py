"""Inside vLLM's MultiConnector the front end raised on our first statistics ("not registered"), which ends its output
handler; and a failed load failed its request, since the policy was set in MultiConnector's copy of the configuration.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from made_up_model import prompt
from modelless import Engine
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvserver.adapters import vllm_plugin
from kvserver.adapters.vllm import nesting
from kvserver.adapters.vllm.stat_logger import KVServerStatLogger

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)
OURS = {"kv_connector": "KVServerConnector", "kv_connector_module_path": "kvserver.adapters.vllm"}
# Each of them in a process that knows vLLM's command line only.
FRONT_ENDS = """
import json, sys
from types import SimpleNamespace
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
transfer, payloads = KVTransferConfig(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
logged, shown = KVConnectorLogging(transfer), KVConnectorProm(SimpleNamespace(kv_transfer_config=transfer), ["engine"], {0: ["0"]})
for payload in payloads:
    logged.observe(payload)
    shown.observe(payload)
logged.log(print)
from prometheus_client import REGISTRY
print("stored", REGISTRY.get_sample_value("vllm:kvserver_store_bytes_total", {"engine": "0"}))
"""


def multi(extra: dict[str, Any], **outer: Any) -> dict[str, Any]:
    """A kv_transfer_config with our connector inside."""
    mine = {**OURS, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [mine]},
        **outer,
    }


def nested(**outer: Any):
    def adjust(config, caches):
        extra = config.kv_transfer_config.kv_connector_extra_config
        config.kv_transfer_config = KVTransferConfig(**multi(extra, **outer))

    return adjust


def payloads(engine: Engine) -> list[dict[str, Any]]:
    """The connectors' statistics of each step, as they reach the front end."""
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(SchedulerStats)
    decoded = [decoder.decode(encoder.encode(stats)).kv_connector_stats for stats in engine.stats]
    return [payload for payload in decoded if payload is not None]


def test_front_end_of_multi_connector_accepts_our_statistics(make_daemon, make_engine, tmp_path):
    daemon = make_daemon()
    engine = make_engine(daemon, adjust=nested())
    engine.generate("cold", TOKENS)
    assert make_engine(daemon, adjust=nested()).generate("warm", TOKENS).external == 3 * CHUNK
    stored = daemon.status()["totals"]["stored_bytes"]
    arguments = [json.dumps(multi({"kvserver.endpoint": daemon.endpoint})), json.dumps(payloads(engine))]
    ended = subprocess.run(
        [sys.executable, "-c", FRONT_ENDS, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert f"stored {float(stored)}" in ended.stdout
    assert "KVServerConnector" in ended.stdout, "vLLM's log names whose statistics they are"


def test_a_connector_of_our_name_that_is_registered_already_is_left_alone():
    """The import registers ours; a second time, or after another package, it neither raises nor replaces."""
    before = KVConnectorFactory.get_connector_class_by_name("KVServerConnector")
    vllm_plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVServerConnector") is before


def test_a_failed_load_is_computed_inside_multi_connector_too(make_daemon, make_engine):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon, adjust=nested(kv_load_failure_policy="fail"))
    engine.before_step = lambda plan: daemon.kill() if plan.loads and daemon.running() else None
    assert engine.generate("warm", TOKENS).finish_reason == "length"
    assert engine.received == ["warm"]


def test_load_failure_policy_fail_holds_inside_multi_connector(make_daemon, make_engine):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon, adjust=nested(), extra={"kvserver.load_failure_policy": "fail"})
    engine.before_step = lambda plan: daemon.kill() if plan.loads and daemon.running() else None
    answer = engine.add("warm", TOKENS)
    engine.run()
    assert answer.finish_reason == "error"


def test_where_the_policy_cannot_be_reached_the_engine_runs_without_cache(
    make_daemon, make_engine, monkeypatch, caplog
):
    """A wrapper unlike vLLM's: it copies the configuration, and nothing leads back from the copy."""
    monkeypatch.setattr(nesting, "WRAPPERS", ())
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon, adjust=nested(kv_load_failure_policy="fail"))
    assert engine.generate("warm", TOKENS).external == 0
    assert "kv_load_failure_policy" in caplog.text


def test_the_engine_stats_are_sent_from_inside_multi_connector():
    transfer = KVTransferConfig(**multi({"kvserver.endpoint": "ipc:///nowhere/kv.sock"}))
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        instance_id="incarnation",
        parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, _api_process_rank=0),
        model_config=SimpleNamespace(served_model_name="m", model="m"),
    )
    logger = KVServerStatLogger(config)
    assert logger.stats is not None
    assert logger.stats.instance_id == transfer.engine_id
