"""The vLLM adapter, which vLLM finds by its plugin or by `kv_connector_module_path`.

The walk: `connector` is vLLM's interface and keeps exceptions out of the engine; `scheduler` decides what to look up,
load and store. In `adapters.common`, `worker` begins the copies and watches their state words, `dispatcher` sends the
scheduler's messages and passes on the replies, `send_queue` sends the copies' messages once the engine's own work on
their blocks is done, and `link` keeps the connection to the daemon in a thread of its own. A `registration` is made of
`planes` and `memory` there and of `identity` here; `notices` there report what the block pool did, and `announcer`
requests the daemon's tiers, which are published as `events`.
"""

from kvserver.adapters.common.log import log_below
from kvserver.adapters.vllm.connector import KVServerConnector
from kvserver.adapters.vllm_plugin import register

log_below("vllm.kvserver")  # vLLM shows what is logged below its own logger
register()  # where vLLM loads no plugins: MultiConnector finds the class of received statistics by the name

__all__ = ["KVServerConnector"]
