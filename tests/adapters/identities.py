"""Identities of engines, and what keeps two from sharing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import MultiModalConfig, VllmConfig

from kvserver.adapters.vllm.identity import Identity

CONNECTOR = {"kv_connector": "KVServerConnector", "kv_connector_module_path": "kvserver.adapters.vllm"}
Identify = Callable[..., Identity]


def different(one: Identity, other: Identity) -> set[str]:
    """Names of the fields that keep them from sharing."""
    names = {*one.counted, *other.counted}
    return {name for name in names if one.counted.get(name) != other.counted.get(name)}


def multimodal(**options: Any) -> Callable[[VllmConfig], None]:
    return lambda config: setattr(config.model_config, "multimodal_config", MultiModalConfig(**options))
