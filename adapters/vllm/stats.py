"""Reports of the halves, as vLLM carries them from its processes to its front end and its log.

Refuses to know: what is reported, and how reports add up (`common.stats`).
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvserver.adapters.common.stats import added, summary

# vLLM's names for hits from CPU memory and from storage, where it counts hits by their source.
HOST, DISK = (getattr(getattr(base, "CacheHitSource", None), name, None) for name in ("HOST", "DISK"))


class KVServerStats(KVConnectorStats):  # type: ignore[misc]
    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVServerStats:
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data
