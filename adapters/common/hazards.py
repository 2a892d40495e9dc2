"""Blocks that must not be touched: a store still reads them, or a load may still write them.

Owns: the stores that some rank has not acknowledged, with the blocks they read; the quarantined blocks; the pins of both. Refuses
to know: requests, keys, messages. Runs on the engine's scheduler thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol


class Pool(Protocol):
    """The engine's pool of blocks, as far as pins concern it."""

    kept: set[int]  # the blocks that only pins keep: every owner has freed them

    def pin(self, block_ids: list[int]) -> None:
        """Keep the pool from allocating the blocks, once more."""

    def unpin(self, block_ids: list[int]) -> None: ...


@dataclass(slots=True)
class _Store:
    block_ids: list[int]
    ranks_left: int
    step: int = 0  # with which it was sent
    cancelled: bool = False


class PinnedStores:
    """Stores whose blocks are pinned, from the plan until no server can publish what the blocks will contain next.

    A store ends here when every rank has reported its end. A rank may never report, so a store also ends `seconds` after the
    outputs of the step with which it was sent. `seconds` exceeds the store's deadline: by then every rank that will ever begin it
    has begun, and no server publishes it. A store whose step never ends stays pinned.
    """

    def __init__(self, pool: Pool, ranks: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._ranks = ranks
        self._seconds = seconds
        self._clock = clock
        self._stores: dict[int, _Store] = {}
        self._ended = 0  # the last step whose outputs the engine has
        self._forget_at: deque[tuple[float, int]] = deque()  # (when, the stores of steps up to this one)

    def __iter__(self) -> Iterator[int]:
        return iter(self._stores)

    def add(self, store_id: int, block_ids: list[int]) -> None:
        """A store that is not sent yet."""
        self._pool.pin(block_ids)
        self._stores[store_id] = _Store(block_ids, self._ranks)

    def sent(self, store_id: int, step: int) -> None:
        """The store is to go to the workers with this step."""
        self._stores[store_id].step = step

    def drop(self, store_id: int) -> None:
        """The store will not be sent."""
        if store_id in self._stores:
            self._forget(store_id)

    def step_ended(self, step: int) -> None:
        """The engine has the outputs of this step, by its number."""
        if step <= self._ended:
            return
        self._ended = step
        if self._is_awaited():
            self._forget_at.append((self._clock() + self._seconds, self._ended))
        self._forget_late()

    def ended(self, store_id: int) -> None:
        """Note one rank's report of the store's end."""
        store = self._stores.get(store_id)
        if store is None:
            return
        store.ranks_left -= 1
        if store.ranks_left == 0:
            self._forget(store_id)

    def kept(self) -> int:
        """Number of blocks that only stores keep from the engine."""
        kept = self._pool.kept
        return len(kept.intersection(chain.from_iterable(s.block_ids for s in self._stores.values()))) if kept else 0

    def cancel_all_that_keep(self) -> list[int]:
        """Stores for the workers to cancel, so that stores alone keep no block. Each once."""
        found = [i for i, s in self._stores.items() if not s.cancelled and not self._pool.kept.isdisjoint(s.block_ids)]
        for store_id in found:
            self._stores[store_id].cancelled = True
        return found

    @property
    def awaited(self) -> bool:
        """True while an idle engine should step for stores. Bounded, since a report may be lost."""
        self._forget_late()
        return bool(self._stores)

    def _is_awaited(self) -> bool:
        return any(0 < store.step <= self._ended for store in self._stores.values())

    def _forget_late(self) -> None:
        while self._forget_at and self._clock() >= self._forget_at[0][0]:
            _, step = self._forget_at.popleft()
            for store_id in [i for i, store in self._stores.items() if 0 < store.step <= step]:
                self._forget(store_id)

    def _forget(self, store_id: int) -> None:
        self._pool.unpin(self._stores.pop(store_id).block_ids[::-1])  # a prefix's end is evicted first, as vLLM has it


@dataclass(slots=True)
class _Load:
    block_ids: list[int]
    ranks: int


class Quarantine:
    """Blocks of loads that were given up while the server may still write them. A pin keeps them from reuse."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loads: dict[int, _Load] = {}

    def __len__(self) -> int:
        """Number of blocks; a block counts once for each load that may write it."""
        return sum(len(load.block_ids) for load in self._loads.values())

    def add(self, load_id: int, block_ids: list[int]) -> bool:
        """Note one rank's report of a load that was given up. True for the first rank, before the engine frees the blocks."""
        held = self._loads.get(load_id)
        if held is not None:
            held.ranks += 1
            return False
        self._pool.pin(block_ids)
        self._loads[load_id] = _Load(block_ids, 1)
        return True

    def release(self, load_id: int) -> None:
        """Note one rank's report that the server no longer writes the blocks; the last rank's report frees them."""
        held = self._loads.get(load_id)
        if held is None:
            return
        held.ranks -= 1
        if held.ranks == 0:
            del self._loads[load_id]
            self._pool.unpin(held.block_ids)
