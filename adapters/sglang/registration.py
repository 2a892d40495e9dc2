"""The registration of one rank: where its KV cache lies, and what must agree before it is shared.

Owns: the shared memory of the rank's pools, and the identity. Refuses to know: copies, and SGLang's calls.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from kvserver.adapters.sglang.pools import KVPool, object_groups, read_addresses_again
from kvserver.adapters.sglang.ranks import Ranks
from kvserver.adapters.sglang.settings import SGLangSettings
from kvserver.protocol import MOST_ENGINE, UNREPORTED, HelloReply, RegisterWorker, block_bytes, planes_of

CHUNK_PAGES = (
    1  # a linker is not told where in the prompt its keys begin, so chunks of several pages could not be aligned
)


class PoolRegistration:
    def __init__(
        self,
        settings: SGLangSettings,
        names: EngineNames,
        ranks: Ranks,
        pools: Sequence[KVPool],
        page_tokens: int,
        server_args: Any,
    ) -> None:
        """UnsupportedLayout or CannotShare. Moves the pools' memory, if it is of CPUs."""
        tensors = {name: tensor for pool in pools for name, tensor in pool.tensors.items()}
        device = next(iter(tensors.values())).device
        self.on_gpu = device.type == "cuda"
        self._identity = arguments_identity(server_args, device)
        self._settings, self._names, self._server_args = settings, names, server_args
        self._groups = object_groups(pools, page_tokens)
        self._rows = tuple(pool.rows for pool in pools)
        of_groups = [list(pool.tensors) for pool in pools]
        self._caches = share(tensors, self._rows[0], block_dimension=0, groups=of_groups, group_blocks=self._rows)
        if not self.on_gpu:
            for source in (source for pool in pools for source in pool.sources):
                read_addresses_again(source)
        self._page_tokens, self._world_size = page_tokens, ranks.size
        sizes = [block_bytes(planes_of(self._caches.planes, group.members)) for group in self._groups]
        self.rank = Rank(ranks.number, [PositionSize(1, size) for size in sizes])

    def link(self) -> Link:
        caches = self._caches

        def message(hello: HelloReply, attachment: int) -> RegisterWorker:
            return RegisterWorker(
                **asdict(self._names),
                rank=self.rank.number,
                world_size=self._world_size,
                attachment=attachment,
                memory=caches.memory,
                words=WORDS,
                planes=caches.planes,
                num_blocks=max(self._rows),
                group_blocks=self._rows if len(self._rows) > 1 else (),
                block_tokens=self._page_tokens,
                chunk_blocks=CHUNK_PAGES,
                groups=self._groups,
                layout=caches.layout,
                counted=self._whole_identity.fields(),
                private=self._whole_identity.private,
                machine_only=self._whole_identity.machine_only,
                unreported=tuple(sorted(UNREPORTED)),  # none of it reaches a linker
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
