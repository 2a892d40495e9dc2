"""The hook into vLLM's block pool: sees every allocation, access, release and eviction, and when.

Owns: the forwarding metrics collector, the records that were not drained yet, and pins. Refuses to know: stores, loads and
messages. Runs on the scheduler's thread; cost: well under a microsecond per event.

Pins are the connector's, not the engine's: no record and no full state contains them.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvserver.adapters.common.notices import Records
from kvserver.adapters.common.steps import NULL_BLOCK
from kvserver.protocol import (
    MARK,
    RECORD_ACCESSED,
    RECORD_ALLOCATED,
    RECORD_CLEARED,
    RECORD_EVICTED,
    RECORD_OPERATION_SHIFT,
    RECORD_OWNED,
    RECORD_PRESENT,
    RECORD_RELEASED,
)

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MARK_NS = 200_000  # a record's time is at most so much late, so a block's lifetime is within 1 ms of the engine's own
MAX_RECORDS = 1 << 16  # kept until drained, give or take the events of one mark; 256 KiB of records

# What a pin adds to a block's references, whose lower bits count owners. vLLM with cascade attention takes a block with as many
# references as requests run for a prefix of all of them; one with a pin has more.
_PIN = 1 << 20

_ALLOCATED = RECORD_ALLOCATED << RECORD_OPERATION_SHIFT
_ACCESSED = RECORD_ACCESSED << RECORD_OPERATION_SHIFT
_RELEASED = RECORD_RELEASED << RECORD_OPERATION_SHIFT
_EVICTED = RECORD_EVICTED << RECORD_OPERATION_SHIFT
_CLEARED = RECORD_CLEARED << RECORD_OPERATION_SHIFT
_PRESENT = RECORD_PRESENT << RECORD_OPERATION_SHIFT
_OWNED = RECORD_OWNED << RECORD_OPERATION_SHIFT


class PoolHook:
    """Hook in place of the pool's `metrics_collector`. It forwards every call to the collector that it replaced."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clears = 0  # how often the engine forgot all blocks, which it does only while none is in use
        self.unused = True  # no block was allocated since then
        self.resets = 0  # how often the engine was to forget all blocks, also where it could not
        self.clears_awaited = 0  # `clears` when no block holds anything from before the last of these
        self.lost = False  # records were dropped: the daemon needs a full state
        self.kept: set[int] = set()  # blocks that only pins keep: every owner has freed them
        self.forgettable: Callable[[], list[list[int]]] = list  # blocks of requests that begin again after a reset
        self.was_reset: Callable[[], None] = lambda: None
        self.suspects: set[int] = set()  # blocks that may hold KV that was taken back (acceptance.py)
        self._clock = clock
        self._records = array("I")
        self._append = self._records.append
        self._marks = array("Q")  # (number of a record, its time) in turn
        self._next_mark = 0  # when the time has moved enough for another
        self._whole = False  # the records began with an empty pool
        self._inner: Any = None
        self._pool: BlockPool | None = None
        self._blocks: Sequence[KVCacheBlock] = ()
        self._muted = False

    def install(self, pool: BlockPool) -> None:
        """Bind to the pool. Once per pool; a later call moves the hook."""
        self.lost = self._pool is not None
        self._drop()
        self._pool = pool
        self._blocks = pool.blocks
        self._whole = not self._state()
        self._forward_to(pool.metrics_collector)
        pool.metrics_collector = self
        pool.free_blocks = self._releasing(pool, pool.free_blocks)
        if hasattr(pool, "unpin_blocks"):  # newer vLLMs' other way to release
            pool.unpin_blocks = self._releasing(pool, pool.unpin_blocks)
        pool.reset_prefix_cache = self._resetting(pool.reset_prefix_cache)

    def _forward_to(self, inner: Any) -> None:
        """Forward the rest of the collector (sampling, draining) to the inner one, by name.

        A __getattr__ would make each look at an attribute of this object slow, and an event has ten.
        """
        self._inner = inner
        for name in dir(inner) if inner is not None else ():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, getattr(inner, name))

    def _releasing(self, pool: BlockPool, release: Callable[..., None]) -> Callable[..., None]:
        ours = (None, pool)  # newer vLLMs pass blocks of several pools, which go on to their own

        def release_blocks(ordered_blocks: Iterable[KVCacheBlock], *args: Any, **kwargs: Any) -> None:
            blocks = list(ordered_blocks)
            released = [b for b in blocks if b.block_id and getattr(b, "pool", None) in ours]
            if released and not self._muted:
                now = self._clock()
                if now >= self._next_mark:
                    self._mark(now)
                self._records.extend([_RELEASED | b.block_id for b in released])
            release(blocks, *args, **kwargs)
            self.kept.update([b.block_id for b in released if b.ref_cnt >= _PIN and not b.ref_cnt % _PIN])

        return release_blocks

    def _resetting(self, reset: Callable[..., bool]) -> Callable[..., bool]:
        """The pool calls reset() only if no block is in use; only this wrapper sees a reset that the pool refuses."""

        def reset_prefix_cache(*args: Any, **kwargs: Any) -> bool:
            self.resets += 1
            self.clears_awaited = self.clears + 1
            with self._unpinned():
                done = reset(*args, **kwargs)
            if done:
                self.was_reset()
            return done

        return reset_prefix_cache

    @contextlib.contextmanager
    def _unpinned(self) -> Iterator[None]:
        """A pool resets only while none of its blocks is in use. No lookup finds pinned blocks, nor blocks of requests that begin again, so
        both count as free during the check. The pool allocates none meanwhile: all this is one call on one thread.
        """
        pinned = [b.block_id for b in self._blocks for _ in range(b.ref_cnt // _PIN)]
        owned = [[self._blocks[block_id] for block_id in block_ids] for block_ids in self.forgettable()]
        if pinned:
            self.unpin(pinned)
        for blocks in owned:
            self._mutely("free_blocks", blocks)
        try:
            yield
        finally:
            for blocks in owned:
                self._mutely("touch", blocks)
            if pinned:
                self.pin(pinned)

    @property
    def size(self) -> int:
        """Size of the pool in blocks."""
        return len(self._blocks)

    def has(self, block_id: int, group: int, block_hash: bytes) -> bool:
        """True if vLLM's own cache has the KV of this hash in the block. A block that was allocated anew has no hash, or another one."""
        return bool(self._blocks[block_id].block_hash == block_hash + group.to_bytes(4, "big"))

    @property
    def free(self) -> int:
        """Number of blocks that the pool could allocate."""
        return self._pool.get_num_free_blocks() if self._pool is not None else 0

    # ---- what happened ------------------------------------------------------------------------

    @property
    def has_records(self) -> bool:
        return bool(self._records)

    def drain_records(self) -> Records:
        """The records since the last call. REQUIRES: not `lost`."""
        taken = Records(self._records.tobytes(), self._marks.tobytes())
        self._drop()
        return taken

    def drain_full_state(self) -> list[Records]:
        """Records that build the pool's present state from an empty pool, MAX_RECORDS at most in each part.

        They may be all events since the pool was new. Otherwise they are one PRESENT for each block with content and
        one `RECORD_HELD` for each owner of a block; records not drained before are dropped.
        """
        self.lost = False
        if self._whole:
            return [self.drain_records()]
        self._drop()
        state, mark = self._state(), MARK.pack(0, self._clock())
        parts = range(0, max(len(state), 1), MAX_RECORDS)
        return [Records(state[at : at + MAX_RECORDS].tobytes(), mark) for at in parts]

    def _state(self) -> array[int]:
        found = array("I")
        for block in self._blocks:
            number, owners = block.block_id, block.ref_cnt % _PIN
            if number != NULL_BLOCK and (owners or block.block_hash is not None):
                found.append(_PRESENT | number)
                found.extend([_OWNED | number] * owners)
        return found

    def _mark(self, now: int) -> None:
        """Mark `now` as the time of the next record. REQUIRES: there is a next record."""
        if len(self._records) >= MAX_RECORDS:
            self._drop()
            self.lost = True
        self._marks.append(len(self._records))
        self._marks.append(now)
        self._next_mark = now + MARK_NS

    def _drop(self) -> None:
        del self._records[:]
        del self._marks[:]
        self._next_mark = 0
        self._whole = False

    # ---- pins ---------------------------------------------------------------------------------

    def pin(self, block_ids: list[int]) -> None:
        """Add references, so that the pool does not allocate the blocks."""
        blocks = [self._blocks[block_id] for block_id in block_ids]
        self.kept.update([b.block_id for b in blocks if not b.ref_cnt])
        self._mutely("touch", blocks)
        for block in blocks:
            block.ref_cnt += _PIN - 1

    def unpin(self, block_ids: list[int]) -> None:
        blocks = [self._blocks[block_id] for block_id in block_ids]
        for block in blocks:
            block.ref_cnt -= _PIN - 1
        self._mutely("free_blocks", blocks)
        self.kept.difference_update([b.block_id for b in blocks if not b.ref_cnt])

    def _mutely(self, method: str, blocks: list[KVCacheBlock]) -> None:
        """Have the pool change the blocks' references, which is no event of the engine's."""
        assert self._pool is not None
        self._muted = True
        try:
            getattr(self._pool, method)(blocks)
        finally:
            self._muted = False

    # ---- vLLM's collector interface -----------------------------------------------------------

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        now = self._clock()
        if now >= self._next_mark:
            self._mark(now)
        self._append(_ALLOCATED | block.block_id)
        self.unused = False
        if self.suspects:
            self.suspects.discard(block.block_id)
        if self._inner is not None:
            self._inner.on_block_allocated(block)

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        if self._muted:
            return
        self.kept.discard(block.block_id)
        if block.block_id:
            now = self._clock()
            if now >= self._next_mark:
                self._mark(now)
            self._append(_ACCESSED | block.block_id)
        if self._inner is not None:
            self._inner.on_block_accessed(block)

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """vLLM also calls it for every block that it allocates: a block without content is recycled, not evicted."""
        if block.block_hash is not None:
            now = self._clock()
            if now >= self._next_mark:
                self._mark(now)
            self._append(_EVICTED | block.block_id)
        if self._inner is not None:
            self._inner.on_block_evicted(block)

    def reset(self) -> None:
        self.clears += 1
        self.unused = True
        now = self._clock()
        if now >= self._next_mark:
            self._mark(now)
        self._append(_CLEARED)
        if self._inner is not None:
            self._inner.reset()
