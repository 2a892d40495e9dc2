"""A connector beside kvserver's in vLLM's MultiConnector: it promises the first blocks of each prompt synchronously, and its load fails.

It counts as exact, so that only the failure keeps KV from being stored. REQUIRES: it is made before kvserver's.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvserver.adapters.vllm import nesting

PROMISED_TOKENS = 128
nesting.EXACT += ("FailingSibling",)


class Loads(KVConnectorMetadata):
    def __init__(self, block_ids: set[int]) -> None:
        self.block_ids = block_ids


class FailingSibling(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._asked: set[str] = set()
        self._loads: set[int] = set()

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        again = request.request_id in self._asked
        self._asked.add(request.request_id)
        return 0 if again else max(0, PROMISED_TOKENS - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loads.update(blocks.get_block_ids()[0][: num_external_tokens // self._block_tokens])

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._loads = Loads(self._loads), set()
        return loads

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    # ---- worker

    def start_load_kv(self, forward_context: Any, **named: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **named: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._get_connector_metadata().block_ids
