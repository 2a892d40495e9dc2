"""The names of one engine, as all of its processes know them.

Owns: how vLLM's configuration states them. Refuses to know: who sends them.
"""

from __future__ import annotations

from typing import Any


def instance_id(config: Any, engine_index: int) -> str:
    """The id that the engine's own processes use: with data parallelism vLLM appends the rank in them, and only in them.

    A process that is one rank of several by itself (offline) has index 0, and its rank in the configuration.
    """
    name, parallel = str(config.kv_transfer_config.engine_id), config.parallel_config
    rank = engine_index or parallel.data_parallel_rank
    return f"{name}_dp{rank}" if parallel.data_parallel_size > 1 or rank else name


def incarnation(config: Any) -> str:
    """The configuration's own id is new at each start of an engine, and the same in all its processes."""
    return str(config.instance_id) or str(config.kv_transfer_config.engine_id)


def served_name(model: Any) -> str:
    """The name by which users request the model of this ModelConfig."""
    served = model.served_model_name
    return str(served[0] if isinstance(served, list) else served or model.model)
