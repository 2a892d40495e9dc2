"""vLLM's plugin: the connector's name in vLLM's registry, so that `"kv_connector": "KVServerConnector"` is enough.

vLLM calls `register` in each of its processes, in every engine of an environment that kvserver is installed into: nothing is
imported before the connector is used, and nothing is raised.
"""

from __future__ import annotations

import contextlib
import logging

NAME = "KVServerConnector"

log = logging.getLogger("vllm.kvserver")


def register() -> None:
    """A connector that has the name already keeps it."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        with contextlib.suppress(ValueError):
            KVConnectorFactory.register_connector(NAME, "kvserver.adapters.vllm", NAME)
    except Exception as error:
        log.warning("kvserver: vLLM does not know %s by its name alone: %r", NAME, error)
