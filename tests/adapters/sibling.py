"""A connector beside kvserver's in vLLM's MultiConnector: it loads synchronously, in vain or something else than was computed.

A test sets `Sibling.tokens`, what it promises of the next prompt, and `Sibling.fails`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from kvserver.adapters.vllm import KVServerConnector


class Loads(KVConnectorMetadata):
    def __init__(self, block_ids: Iterable[int] = ()) -> None:
        self.block_ids = set(block_ids)


class Sibling(KVConnectorBase_V1, SupportsHMA):
    tokens: ClassVar[int] = 0
    fails: ClassVar[bool] = True
    params: ClassVar[dict[str, Any] | None] = None  # that it answers requests with

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._loads: set[int] = set()

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens, Sibling.tokens = Sibling.tokens, 0
        return max(0, tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loads.update(blocks.get_block_ids()[0][: num_external_tokens // 16])

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._loads = Loads(self._loads), set()
        return loads

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, Sibling.params

    # ---- worker

    def start_load_kv(self, forward_context: Any, **named: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **named: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._get_connector_metadata().block_ids if Sibling.fails else set()


def beside_sibling(config: Any, caches: Any) -> None:
    """Adjust a configuration: MultiConnector with kvserver's connector and the sibling. Failed loads are computed."""
    own = {
        "kv_connector": "KVServerConnector",
        "kv_connector_module_path": KVServerConnector.__module__.rsplit(".", 1)[0],
        "kv_role": "kv_both",
        "kv_connector_extra_config": config.kv_transfer_config.kv_connector_extra_config,
    }
    other = {"kv_connector": "Sibling", "kv_connector_module_path": "sibling", "kv_role": "kv_both"}
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [own, other]},
        kv_load_failure_policy="recompute",
    )
