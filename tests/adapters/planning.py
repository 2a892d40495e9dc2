"""vLLM's planning of KV caches, in the module and with the functions that the version has."""

from __future__ import annotations

from typing import Any

try:
    from vllm.v1.core import kv_cache_planning as planning  # 0.33 and later
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

get_kv_cache_config_from_groups = planning.get_kv_cache_config_from_groups
get_kv_cache_groups = planning.get_kv_cache_groups


def tp_replicas(groups: Any, ranks: int) -> int:
    """0.31 and later; before, vLLM does not state it."""
    found = getattr(planning, "kv_cache_groups_tp_replicas", None)
    return int(found(groups, ranks)) if found is not None else 1
