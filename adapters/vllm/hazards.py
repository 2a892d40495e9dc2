"""Blocks that must not be touched: a store still reads them, or a load may still write them.

Owns: which stores were not acknowledged by every rank and what they read; which blocks are quarantined.
Refuses to know: requests, keys, messages. Runs on the engine's scheduler thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvserver.adapters.vllm.blockpool import PoolHook

_PASSES_TO_BEGIN = 2  # an asynchronous scheduler is a pass ahead of the step that computes


@dataclass(slots=True)
class _Store:
    block_ids: list[int]
    ranks_left: int


class PendingStores:
    """Stores from their plan until every rank has said that they ended."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._stores: dict[int, _Store] = {}
        self._readers: dict[int, set[int]] = {}  # block id -> stores that read it
        self._seconds = 0.0
        self._until = 0.0
        self._passes_to_begin = 0

    def add(self, store_id: int, block_ids: list[int], seconds: float) -> None:
        """`seconds` after it began its end has been told, if it ever will. It begins with this pass's step."""
        self._stores[store_id] = _Store(block_ids, self._ranks)
        self._passes_to_begin = _PASSES_TO_BEGIN
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        for block_id in block_ids:
            self._readers.setdefault(block_id, set()).add(store_id)

    def next_pass(self) -> None:
        """A scheduler pass begins. The step of a store may have taken long to compute: only now its time begins."""
        if self._passes_to_begin > 0:
            self._passes_to_begin -= 1
            self._until = time.monotonic() + self._seconds

    def readers(self, block_id: int) -> Iterable[int]:
        return self._readers.get(block_id, ())

    def ended(self, store_id: int) -> None:
        """One rank says so."""
        store = self._stores.get(store_id)
        if store is None:
            return
        store.ranks_left -= 1
        if store.ranks_left > 0:
            return
        del self._stores[store_id]
        for block_id in store.block_ids:
            readers = self._readers[block_id]
            readers.discard(store_id)
            if not readers:
                del self._readers[block_id]

    @property
    def awaited(self) -> bool:
        """Whether an idle engine should step to hear of their end; not for ever, should that get lost."""
        return bool(self._stores) and time.monotonic() < self._until


@dataclass(slots=True)
class _Load:
    block_ids: list[int]
    ranks: int


class Quarantine:
    """Blocks of loads that were given up while the server may still write them, kept from reuse by a pin."""

    def __init__(self, pool: PoolHook) -> None:
        self._pool = pool
        self._loads: dict[int, _Load] = {}

    def add(self, load_id: int, block_ids: list[int]) -> bool:
        """One rank says so; True for the first, before vLLM frees the blocks."""
        held = self._loads.get(load_id)
        if held is not None:
            held.ranks += 1
            return False
        self._pool.pin(block_ids)
        self._loads[load_id] = _Load(block_ids, 1)
        return True

    def release(self, load_id: int) -> None:
        """One rank says that nobody writes there any more; the last one's word frees the blocks."""
        held = self._loads.get(load_id)
        if held is None:
            return
        held.ranks -= 1
        if held.ranks == 0:
            del self._loads[load_id]
            self._pool.unpin(held.block_ids)
