"""The hook into vLLM's block pool: sees every allocation, access, release and eviction.

Owns: the forwarding metrics collector and the pins of quarantined blocks. Refuses to know: stores,
loads and messages. Cost: well under a microsecond per event on the scheduler thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvserver.protocol import (
    RECORD_ACCESSED,
    RECORD_ALLOCATED,
    RECORD_CLEARED,
    RECORD_EVICTED,
    RECORD_OPERATION_SHIFT,
    RECORD_RELEASED,
)

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_ALLOCATED = RECORD_ALLOCATED << RECORD_OPERATION_SHIFT
_ACCESSED = RECORD_ACCESSED << RECORD_OPERATION_SHIFT
_RELEASED = RECORD_RELEASED << RECORD_OPERATION_SHIFT
_EVICTED = RECORD_EVICTED << RECORD_OPERATION_SHIFT
_CLEARED = RECORD_CLEARED << RECORD_OPERATION_SHIFT


class PoolHook:
    """Stands in the pool's `metrics_collector` slot and passes everything on to the one that was there."""

    def __init__(self, on_allocated: Callable[[int], None]) -> None:
        self.clears = 0  # how often the engine forgot all blocks, which it does only while none is in use
        self.unused = True  # no block was given out since then
        self._on_allocated = on_allocated
        self._records = array("I")
        self._inner: Any = None
        self._pool: BlockPool | None = None
        self._muted = False

    def install(self, pool: BlockPool) -> None:
        """Bind to the pool. Once per pool; a later call moves the hook."""
        self._pool = pool
        self._inner = pool.metrics_collector
        pool.metrics_collector = self
        free = pool.free_blocks

        def free_blocks(ordered_blocks: Iterable[KVCacheBlock], *args: Any, **kwargs: Any) -> None:
            blocks = list(ordered_blocks)
            if not self._muted:
                self._records.extend([_RELEASED | block.block_id for block in blocks])
            free(blocks, *args, **kwargs)

        pool.free_blocks = free_blocks

    def take_records(self) -> array[int]:
        records, self._records = self._records, array("I")
        return records

    def pin(self, block_ids: list[int]) -> None:
        """Take a reference, so that the blocks are not given to anyone."""
        assert self._pool is not None
        self._muted = True
        try:
            self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        finally:
            self._muted = False

    def unpin(self, block_ids: list[int]) -> None:
        assert self._pool is not None
        self._muted = True
        try:
            self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])
        finally:
            self._muted = False

    # ---- vLLM's collector interface -----------------------------------------------------------

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        self.unused = False
        self._records.append(_ALLOCATED | block.block_id)
        self._on_allocated(block.block_id)
        if self._inner is not None:
            self._inner.on_block_allocated(block)

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        if self._muted:
            return
        self._records.append(_ACCESSED | block.block_id)
        if self._inner is not None:
            self._inner.on_block_accessed(block)

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        self._records.append(_EVICTED | block.block_id)
        if self._inner is not None:
            self._inner.on_block_evicted(block)

    def reset(self) -> None:
        self.clears += 1
        self.unused = True
        self._records.append(_CLEARED)
        if self._inner is not None:
            self._inner.reset()

    def __getattr__(self, name: str) -> Any:
        """The rest of the collector (sampling, draining) is the inner one's."""
        inner = self.__dict__.get("_inner")
        if inner is None:
            raise AttributeError(name)
        return getattr(inner, name)
