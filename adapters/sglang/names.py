"""The names of one engine, as its ranks know them.

Owns: how SGLang's arguments and ranks state them. Refuses to know: who sends them.
"""

from __future__ import annotations

import uuid
from typing import Any

from kvserver.adapters.common.notices import EngineNames
from kvserver.adapters.sglang.ranks import Ranks
from kvserver.adapters.sglang.settings import SGLangSettings


def names_of(server_args: Any, settings: SGLangSettings, ranks: Ranks, data_parallel_rank: int | None) -> EngineNames:
    """`data_parallel_rank`: None where there is one replica. Each has schedulers, and so a name, of its own."""
    incarnation = ranks.of_first(uuid.uuid4().hex)
    name = settings.engine_id or f"sglang-{incarnation[:12]}"
    if data_parallel_rank is not None:
        name = f"{name}_dp{data_parallel_rank}"
    return EngineNames(name, incarnation, str(server_args.served_model_name or server_args.model_path))
