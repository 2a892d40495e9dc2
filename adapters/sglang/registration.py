"""The registration of one rank: where its KV cache lies, and what must agree before it is shared.

Owns: the shared memory of the rank's pool, and the identity. Refuses to know: copies, and SGLang's calls.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import Any

import sglang

from kvserver.adapters.common.link import GPU_MARGIN_SECONDS, WORDS, Link, Registration
from kvserver.adapters.common.log import log
from kvserver.adapters.common.memory import share
from kvserver.adapters.common.notices import EngineNames
from kvserver.adapters.common.worker import PositionSize, Rank
from kvserver.adapters.sglang.identity import SGLangIdentity, arguments_identity, with_model
from kvserver.adapters.sglang.pools import KVPool, read_addresses_again
from kvserver.adapters.sglang.ranks import Ranks
from kvserver.adapters.sglang.settings import SGLangSettings
from kvserver.protocol import BLOCKS, MOST_ENGINE, REQUESTS, HelloReply, RegisterWorker, block_bytes

CHUNK_PAGES = (
    1  # a linker is not told where in the prompt its keys begin, so chunks of several pages could not be aligned
)


class PoolRegistration:
    def __init__(
        self, settings: SGLangSettings, names: EngineNames, ranks: Ranks, pool: KVPool, server_args: Any
    ) -> None:
        """UnsupportedLayout or CannotShare. Moves the pool's memory, if it is of CPUs."""
        device = next(iter(pool.tensors.values())).device
        self.on_gpu = device.type == "cuda"
        self._identity = arguments_identity(server_args, device)
        self._settings, self._names, self._pool, self._server_args = settings, names, pool, server_args
        self._caches = share(pool.tensors, pool.pages, block_dimension=0)
        if not self.on_gpu:
            read_addresses_again(pool.kvcache)
        self._world_size = ranks.size
        self.rank = Rank(ranks.number, [PositionSize(1, block_bytes(self._caches.planes))])

    def link(self) -> Link:
        caches, pool = self._caches, self._pool

        def message(hello: HelloReply, attachment: int) -> RegisterWorker:
            return RegisterWorker(
                **asdict(self._names),
                rank=self.rank.number,
                world_size=self._world_size,
                attachment=attachment,
                memory=caches.memory,
                words=WORDS,
                planes=caches.planes,
                num_blocks=pool.pages,
                block_tokens=pool.page_tokens,
                chunk_blocks=CHUNK_PAGES,
                groups=pool.groups,
                layout=caches.layout,
                counted=self._whole_identity.fields(),
                private=self._whole_identity.private,
                machine_only=self._whole_identity.machine_only,
                unreported=(REQUESTS, BLOCKS),  # no end of a request and no block of the pool reaches a linker
                engine="sglang",
                engine_version=sglang.__version__[:MOST_ENGINE],
            )

        margin = GPU_MARGIN_SECONDS if self.on_gpu else 0.0
        return Link(self._settings.endpoint, f"rank {self.rank.number}", Registration(caches.fds, message, margin))

    @cached_property
    def _whole_identity(self) -> SGLangIdentity:
        """The identity with the weights, read once, in the link's thread: it may take seconds."""
        whole = with_model(self._identity, self._server_args, self._settings)
        if whole.private:
            log.warning("kvserver: this engine shares KV with no other: %s", whole.private)
        return whole
