"""Deliberate faults in a copy of the code, by the room of the code that each changes: one module a room, of a large room some.

Owns: which modules there are. Refuses to know: how a mutant is run (`mutants.py`).
"""

from __future__ import annotations

from support.mutation import Mutant

from mutants_of import (
    adapters_common,
    adapters_common_worker,
    adapters_vllm,
    adapters_vllm_scheduler,
    bench,
    cache,
    cache_space,
    cli,
    config,
    engines,
    events,
    kv_events,
    l2,
    protocol,
    replay,
    routing,
    server,
    telemetry,
    tiering,
    top,
    web,
)

ROOMS: dict[str, tuple[Mutant, ...]] = {
    "kvserver": top.MUTANTS,
    "kvserver/protocol": protocol.MUTANTS,
    "kvserver/config": config.MUTANTS,
    "kvserver/cache": cache.MUTANTS + cache_space.MUTANTS,
    "kvserver/l2": l2.MUTANTS,
    "kvserver/replay": replay.MUTANTS,
    "kvserver/telemetry": telemetry.MUTANTS,
    "kvserver/events": events.MUTANTS,
    "kvserver/kv_events": kv_events.MUTANTS,
    "kvserver/routing": routing.MUTANTS,
    "kvserver/engines": engines.MUTANTS,
    "kvserver/tiering": tiering.MUTANTS,
    "kvserver/server": server.MUTANTS,
    "kvserver/web": web.MUTANTS,
    "kvserver/bench": bench.MUTANTS,
    "kvserver/cli": cli.MUTANTS,
    "adapters/common": adapters_common.MUTANTS + adapters_common_worker.MUTANTS,
    "adapters/vllm": adapters_vllm.MUTANTS + adapters_vllm_scheduler.MUTANTS,
}


def room_of(file: str) -> str:
    """The key in ROOMS for mutants of this file."""
    return "/".join(file.split("/")[:-1][:2])
