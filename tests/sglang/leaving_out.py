"""A linker whose loads leave one pool's KV zeroed: `LEAVES_OUT` in the environment names the pool."""

from __future__ import annotations

import os
from typing import Any

from kvserver.adapters.sglang import KVServerLinker


class LeavingOut(KVServerLinker):  # type: ignore[misc, valid-type]
    def load(self, rid: str, transfers: list[Any]) -> bool:
        loaded = bool(super().load(rid, transfers))
        for transfer in transfers:
            if loaded and transfer.name.value == os.environ["LEAVES_OUT"]:
                self._zero(transfer)
        return loaded

    def _zero(self, transfer: Any) -> None:
        pool = self.pools[transfer.name]
        tensors = (
            pool.full_kv_pool.k_buffer + pool.full_kv_pool.v_buffer if transfer.name == "kv" else pool.tensors.values()
        )
        for tensor in tensors:
            tensor[transfer.device_indices] = 0
