"""Registration of one worker with the daemon: the place of its KV cache, and what must agree before it is shared.

Owns: the rank's tensors, and the identity as of the first registration, for files may be replaced later. Refuses to know: copies,
and when the engine sleeps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import vllm

from kvserver.adapters.common.exporter import MakeExporter
from kvserver.adapters.common.link import GPU_MARGIN_SECONDS, WORDS, Link, Registration
from kvserver.adapters.common.memory import share
from kvserver.adapters.common.worker import PositionSize, Rank
from kvserver.adapters.vllm.backends import attention_backends, begin_scales, check_invariance
from kvserver.adapters.vllm.groups import object_groups
from kvserver.adapters.vllm.identity import Identity, config_identity, with_weights
from kvserver.adapters.vllm.names import names_of
from kvserver.adapters.vllm.settings import AdapterSettings
from kvserver.adapters.vllm.support import ALLOCATES_IN_CONTEXT, blocks_come_first, by_prefix
from kvserver.protocol import (
    MOST_ENGINE,
    HelloReply,
    RegisterWorker,
    block_bytes,
    chunk_tokens_for,
    has_tails,
    planes_of,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.kvserver")


class RankRegistration:
    def __init__(
        self,
        settings: AdapterSettings,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: dict[str, torch.Tensor],
        has_computed: Callable[[], bool],
    ) -> None:
        self.on_gpu = any(tensor.is_cuda for tensor in kv_caches.values())
        self._settings = settings
        self._config = vllm_config
        self._caches_config = kv_cache_config
        self._kv_caches = kv_caches
        self._has_computed = has_computed
        self._identity = config_identity(vllm_config, kv_cache_config)

    def link(self, make_exporter: MakeExporter | None) -> tuple[Link, Rank]:
        """A link that registers the KV cache as it lies in memory now. UnsupportedLayout or CannotShare."""
        config, parallel = self._caches_config, self._config.parallel_config
        backends = attention_backends(self._config, list(self._kv_caches))
        check_invariance(backends)
        begin_scales(self._config)
        cached = by_prefix(config)
        left_out = {
            name
            for number, group in enumerate(config.kv_cache_groups)
            if number not in cached
            for name in group.layer_names
        }
        groups = [
            [] if left_out.issuperset(group.layer_names) else group.layer_names for group in config.kv_cache_groups
        ]
        block_dimension = 0 if blocks_come_first() else None
        caches = share(
            {name: tensor for name, tensor in self._kv_caches.items() if name not in left_out},
            config.num_blocks,
            block_dimension,
            groups,
            make_exporter,
            may_move=not ALLOCATES_IN_CONTEXT,
        )
        grouped = object_groups(self._config, config)
        positions = [PositionSize(len(g.members), block_bytes(planes_of(caches.planes, g.members))) for g in grouped]
        rank = Rank(parallel.rank, [*positions, *positions])  # of chunks, and of single blocks

        def message(hello: HelloReply, attachment: int) -> RegisterWorker:
            chunk_tokens = chunk_tokens_for(hello.chunk_tokens, grouped)
            return RegisterWorker(
                **asdict(names_of(self._config)),
                rank=rank.number,
                world_size=parallel.world_size,
                attachment=attachment,
                memory=caches.memory,
                words=WORDS,
                planes=caches.planes,
                num_blocks=config.num_blocks,
                block_tokens=grouped[0].block_tokens,
                chunk_blocks=chunk_tokens // grouped[0].block_tokens,
                groups=grouped,
                layout=f"{caches.layout} {backends}",
                counted=self._whole_identity.fields(),
                private=self._whole_identity.private,
                machine_only=self._whole_identity.machine_only,
                has_computed=self._has_computed(),
                tails=hello.tails and has_tails(grouped, chunk_tokens),
                engine="vllm",
                engine_version=vllm.__version__[:MOST_ENGINE],
                kv_role=self._config.kv_transfer_config.kv_role or "",
            )

        margin = GPU_MARGIN_SECONDS if self.on_gpu else 0.0
        registration = Registration(caches.fds, message, margin)
        return Link(self._settings.endpoint, f"worker {rank.number}", registration), rank

    @cached_property
    def _whole_identity(self) -> Identity:
        """Identity with the weights: read once, in the link's thread, since it may take seconds."""
        settings = self._settings
        whole = with_weights(self._identity, self._config, settings.model_version, settings.weights_digest == "whole")
        if whole.private:
            log.warning("kvserver: this engine shares KV with no other: %s", whole.private)
        return whole
