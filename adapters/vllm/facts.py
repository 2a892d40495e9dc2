"""The engine as its configuration describes it, for the scheduler half and for routers.

Owns: the reading of vLLM's configuration. Refuses to know: how it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed import kv_events
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from kvserver.adapters.common.addresses import local
from kvserver.adapters.common.notices import EngineNames
from kvserver.adapters.common.settings import PREFIX
from kvserver.adapters.vllm.groups import object_groups
from kvserver.adapters.vllm.names import names_of
from kvserver.adapters.vllm.requests import ALL_TOKENS
from kvserver.adapters.vllm.support import by_prefix, drops_last_block, hash_block_tokens, whole_prompts_only
from kvserver.protocol import DescribeScheduler, Durability, HashForm, KVGroup, ObjectGroup


@dataclass(frozen=True)
class EngineFacts:
    names: EngineNames
    world_size: int
    object_groups: tuple[ObjectGroup, ...]
    all_groups: bool  # False if a KV cache group is in none of them
    replayed_tokens: int  # before the end of a hit, which vLLM computes again for groups in none of them
    hash_block_tokens: int
    groups: tuple[KVGroup, ...]
    block_tokens: tuple[int, ...]  # of each KV cache group
    loads: bool  # False: the engine only stores, and looks nothing up
    inexact_siblings: bool  # another connector may load KV that no engine has computed so
    publishes: bool  # KV events of its own
    admitted_tokens: int  # vLLM places a request that has blocks for so many more tokens; or for all of them
    holds_back_tail: bool  # a draft model rewrites its KV of the last position
    drops_last_block: bool  # of its own hits, since the draft model's KV of the last token depends on the next one
    whole_prompts_only: bool  # the engine cannot prefill after a hit, only decode
    weights_are_transferred: bool
    hash_algorithm: str
    dtype: Any  # of the model: vLLM casts prompt embeddings to it
    weights_version: Callable[[], str]  # as configured at present
    # The engine for routers, by (variant, why it is private, its durability). REQUIRES: called in the scheduler's process after the
    # engine core was built, where vLLM sets the start of hashes.
    describe: Callable[[str, str, Durability], DescribeScheduler]


def engine_facts(
    vllm_config: Any, kv_cache_config: Any, inexact_siblings: bool = False, loads: bool = True
) -> EngineFacts:
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    method = str(vllm_config.speculative_config.method or "") if vllm_config.speculative_config is not None else ""
    events_config = vllm_config.kv_events_config
    publishes = events_config is not None and events_config.enable_kv_cache_events
    names, groups = names_of(vllm_config), tuple(_group(spec) for spec in specs)
    hash_tokens = hash_block_tokens(vllm_config, kv_cache_config)
    endpoint, replay_endpoint, topic = _events_of(vllm_config) if publishes else ("", "", "")

    def describe(variant: str, private: str, durability: Durability) -> DescribeScheduler:
        return DescribeScheduler(
            **asdict(names),
            variant=variant,
            private=private,
            durability=durability,
            hash_form=hash_form(),
            hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
            hash_start=kv_cache_utils.NONE_HASH,
            hash_block_tokens=hash_tokens,
            groups=groups,
            events_endpoint=endpoint,
            events_replay_endpoint=replay_endpoint,
            events_topic=topic,
        )

    return EngineFacts(
        names=names,
        world_size=vllm_config.parallel_config.world_size,
        object_groups=object_groups(vllm_config, kv_cache_config),
        all_groups=len(by_prefix(kv_cache_config)) == len(specs),
        replayed_tokens=max((getattr(spec, "prefix_replay_tokens", 0) for spec in specs), default=0),
        hash_block_tokens=hash_tokens,
        groups=groups,
        block_tokens=tuple(int(spec.block_size) for spec in specs),
        loads=loads,
        inexact_siblings=inexact_siblings,
        publishes=publishes,
        admitted_tokens=_admitted_tokens(vllm_config.scheduler_config),
        holds_back_tail="eagle" in method or "mtp" in method,
        drops_last_block=drops_last_block(vllm_config.speculative_config),
        whole_prompts_only=whole_prompts_only(vllm_config),
        weights_are_transferred=vllm_config.weight_transfer_config is not None,
        hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
        dtype=vllm_config.model_config.dtype,
        weights_version=lambda: str(extra.get(PREFIX + "weights_version", "")),
        describe=describe,
    )


def _admitted_tokens(scheduler: Any) -> int:
    if getattr(scheduler, "scheduler_reserve_full_isl", False):
        return ALL_TOKENS
    return int(scheduler.max_num_batched_tokens)


def hash_form() -> HashForm:
    """The form in which the engine's KV events name blocks, also where they are off."""
    return "int" if isinstance(kv_cache_utils.maybe_convert_block_hash(bytes(32)), int) else "bytes"


def _group(spec: Any) -> KVGroup:
    kind = kv_cache_interface.get_kv_cache_spec_kind(spec)
    return KVGroup(str(kind.value), kv_cache_interface.get_kv_cache_spec_sliding_window(spec))


def _events_of(vllm_config: Any) -> tuple[str, str, str]:
    """Endpoints of the engine's own KV events for processes of this machine: (subscribe, replay, topic).

    vLLM listens only at an address with a wildcard; from another address it connects to a subscriber. With port 0 only vLLM's
    publisher knows the port. In both cases no other process can subscribe.
    """
    config = vllm_config.kv_events_config
    if config.publisher != "zmq":
        return "", "", ""
    rank = vllm_config.parallel_config.data_parallel_index
    offset = kv_events.ZmqEventPublisher.offset_endpoint_port
    endpoint = offset(config.endpoint, rank) or ""
    replay_endpoint = offset(config.replay_endpoint, rank) or ""
    if not ("*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")) or endpoint.endswith(":0"):
        return "", "", ""
    return local(endpoint), "" if replay_endpoint.endswith(":0") else local(replay_endpoint), config.topic
