"""What one rank registers with the daemon: where its KV cache lies, and what must agree before it is shared.

Owns: the shared memory of the rank's pool, and the identity. Refuses to know: copies, and SGLang's calls.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import cached_property
from typing import Any

import sglang

from kvserver.adapters.common.link import GPU_MARGIN_SECONDS, WORDS, Link, Registration
from kvserver.adapters.common.memory import share
from kvserver.adapters.common.notices import EngineNames
from kvserver.adapters.common.worker import PositionSize, Rank
from kvserver.adapters.sglang.pools import KVPool, read_addresses_again
from kvserver.adapters.sglang.settings import SGLangSettings
from kvserver.protocol import Counted, HelloReply, RegisterWorker, block_bytes

log = logging.getLogger("kvserver")

CHUNK_PAGES = (
    1  # a linker is not told where in the prompt its keys begin, so chunks of several pages could not be aligned
)


class PoolRegistration:
    def __init__(self, settings: SGLangSettings, names: EngineNames, pool: KVPool, server_args: Any) -> None:
        """UnsupportedLayout or CannotShare. Moves the pool's memory, if it is of CPUs."""
        self.on_gpu = any(tensor.is_cuda for tensor in pool.tensors.values())
        self._settings, self._names, self._pool, self._server_args = settings, names, pool, server_args
        self._caches = share(pool.tensors, pool.pages, block_dimension=0)
        if not self.on_gpu:
            read_addresses_again(pool.kvcache)
        self.rank = Rank(0, [PositionSize(1, block_bytes(self._caches.planes))])

    def link(self) -> Link:
        caches, pool = self._caches, self._pool

        def message(hello: HelloReply, attachment: int) -> RegisterWorker:
            return RegisterWorker(
                **asdict(self._names),
                rank=self.rank.number,
                world_size=1,
                attachment=attachment,
                memory=caches.memory,
                words=WORDS,
                planes=caches.planes,
                num_blocks=pool.pages,
                block_tokens=pool.page_tokens,
                chunk_blocks=CHUNK_PAGES,
                groups=pool.groups,
                layout=caches.layout,
                counted=self._counted,
            )

        margin = GPU_MARGIN_SECONDS if self.on_gpu else 0.0
        return Link(self._settings.endpoint, f"rank {self.rank.number}", Registration(caches.fds, message, margin))

    @cached_property
    def _counted(self) -> tuple[Counted, ...]:
        return (Counted("sglang", sglang.__version__, sglang.__version__),)
