"""The vLLM adapter; `kv_connector_module_path` of `--kv-transfer-config` names this package.

The walk: `connector` is vLLM's interface and keeps exceptions out of the engine; `scheduler` decides
what to look up, load and store; `worker` begins the copies and watches their state words; `send_queue` sends
them once the engine's own work on their blocks is done; `link` keeps the connection to the daemon in a
thread of its own; `planes`, `memory` and `identity` say what is registered.
"""

from kvserver.adapters.vllm.connector import KVServerConnector
from kvserver.adapters.vllm.nesting import register

register()

__all__ = ["KVServerConnector"]
