"""vLLM's plugin, by which the connector's name is enough. Real engines find it so in `vllm/test_vllm_outputs.py` and `versions/`."""

from __future__ import annotations

import logging
import subprocess
import sys

from kvserver.adapters import vllm_plugin


def test_a_vllm_without_the_registry_costs_one_warning(monkeypatch, caplog):
    """vLLM calls plugins unguarded, also in engines that do not use the connector."""
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    vllm_plugin.register()
    (record,) = [record for record in caplog.records if record.name == "vllm.kvserver"]
    assert "KVServerConnector" in record.getMessage()


def test_plugin_registers_the_connector_without_importing_it(tmp_path):
    code = """
import sys
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins", name="kvserver")
register = plugin.load()
assert not {"torch", "vllm", "zmq", "msgspec"} & set(sys.modules), "of the plugin alone"
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
assert "kvserver.adapters.vllm" not in sys.modules
assert KVConnectorFactory.get_connector_class_by_name("KVServerConnector").__module__ == "kvserver.adapters.vllm.connector"
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
