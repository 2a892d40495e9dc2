"""The vLLM adapter, which vLLM finds by its plugin or by `kv_connector_module_path`.

- `connector` is vLLM's interface, and keeps exceptions out of the engine.
- `scheduler` is the order of what each call of vLLM's does. Its parts are `loading`, `storing` and `reporting`.
- `registration` is made of `planes` and `memory` in `adapters.common`, and of `identity` here.
- `events` are the blocks of the daemon's tiers as vLLM's KV events.

In `adapters.common`, `worker` begins the copies and watches their state words. `send_queue` sends their messages once the
engine's own work on their blocks is done. `dispatcher` sends the scheduler's messages and passes on the replies. `link` keeps the
connection to the daemon in a thread of its own. `notices` report what the block pool did; `announcer` requests the blocks of the
daemon's tiers.
"""

from kvserver.adapters.common.log import log_below
from kvserver.adapters.vllm.connector import KVServerConnector
from kvserver.adapters.vllm_plugin import register

log_below("vllm.kvserver")  # vLLM shows what is logged below its own logger
register()  # where vLLM loads no plugins: MultiConnector finds the class of received statistics by the name

__all__ = ["KVServerConnector"]
