"""The names of one engine, as all of its processes know them.

Owns: how vLLM's configuration states them. Refuses to know: who sends them.
"""

from __future__ import annotations

from typing import Any

from kvserver.adapters.common.notices import EngineNames


def names_of(config: Any, engine_index: int | None = None) -> EngineNames:
    """`engine_index`: in the front end, where the id has no data-parallel rank; in the engine's own processes vLLM appends it.

    A process that is one rank of several by itself (offline) has index 0, and its rank in the configuration.
    """
    name, parallel = str(config.kv_transfer_config.engine_id), config.parallel_config
    incarnation = str(config.instance_id) or name  # new at each start of an engine, and the same in all its processes
    if engine_index is not None:
        rank = engine_index or parallel.data_parallel_rank
        name = f"{name}_dp{rank}" if parallel.data_parallel_size > 1 or rank else name
    served = config.model_config.served_model_name
    model = served[0] if isinstance(served, list) else served or config.model_config.model
    return EngineNames(name, incarnation, str(model))
