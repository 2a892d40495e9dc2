"""The floor of any external cache in vLLM: a connector that has every whole block of each prompt and copies nothing.

It answers vLLM at once, lets vLLM load asynchronously, and reports each load's end in the step that was given the load. What vLLM then
computes is garbage. `bench/engine.py --ends` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    requests: set[str] = field(default_factory=set)


class FloorConnector(KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._loads = Loads()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        whole = request.num_tokens // self._block_tokens * self._block_tokens
        tokens = max(0, min(whole, request.num_tokens - 1) - num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loads.requests.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._loads = self._loads, Loads()
        return loads

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._get_connector_metadata().requests or None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return
