"""Blocks that must not be touched: a store still reads them, or a load may still write them.

Owns: which stores were not acknowledged by every rank and what they read; which blocks are quarantined.
Refuses to know: requests, keys, messages. Runs on the engine's scheduler thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class _Store:
    block_ids: list[int]
    ranks_left: int
    step: int


class PendingStores:
    """Stores from their plan until no server can publish what their blocks will hold next.

    That is when every rank has reported their end; or when a step ends them before it overwrites a block of theirs;
    or `seconds`, which exceed their deadline, after the outputs of their step: every rank that will ever begin a store
    has begun it by then, and no server publishes one after its deadline. So one whose ranks never answer is forgotten;
    one whose step never ends is not.
    """

    def __init__(self, ranks: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks = ranks
        self._seconds = seconds
        self._clock = clock
        self._stores: dict[int, _Store] = {}  # in the order of their steps
        self._readers: dict[int, set[int]] = {}  # block id -> stores that read it
        self._planned = 0  # steps
        self._ended = 0
        self._forget_at: deque[tuple[float, int]] = deque()  # (when, the stores of steps up to this one)

    def __len__(self) -> int:
        return len(self._stores)

    def add(self, store_id: int, block_ids: list[int]) -> None:
        """Add a store to the step that is being planned."""
        self._stores[store_id] = _Store(block_ids, self._ranks, self._planned + 1)
        for block_id in block_ids:
            self._readers.setdefault(block_id, set()).add(store_id)

    def planned(self) -> None:
        """Stores added from now on belong to the next step."""
        self._planned += 1

    def step_ended(self) -> None:
        """The engine has the outputs of the oldest step under way."""
        self._ended = min(self._ended + 1, self._planned)
        if self._is_awaited():
            self._forget_at.append((self._clock() + self._seconds, self._ended))
        self._forget_late()

    def overwrite(self, block_id: int) -> Iterable[int]:
        """The stores that still read this block. REQUIRES: the next step ends them before it writes anything."""
        readers = tuple(self._readers.get(block_id, ()))
        for store_id in readers:
            self._forget(store_id)
        return readers

    def ended(self, store_id: int) -> None:
        """One rank reports the store's end."""
        store = self._stores.get(store_id)
        if store is None:
            return
        store.ranks_left -= 1
        if store.ranks_left == 0:
            self._forget(store_id)

    @property
    def awaited(self) -> bool:
        """Whether an idle engine should step to receive reports of their end; bounded, since a report may be lost."""
        self._forget_late()
        return self._is_awaited()

    def _is_awaited(self) -> bool:
        oldest = next(iter(self._stores.values()), None)
        return oldest is not None and oldest.step <= self._ended

    def _forget_late(self) -> None:
        while self._forget_at and self._clock() >= self._forget_at[0][0]:
            _, step = self._forget_at.popleft()
            for store_id in [i for i, store in self._stores.items() if store.step <= step]:
                self._forget(store_id)

    def _forget(self, store_id: int) -> None:
        store = self._stores.pop(store_id)
        for block_id in store.block_ids:
            readers = self._readers[block_id]
            readers.discard(store_id)
            if not readers:
                del self._readers[block_id]


@dataclass(slots=True)
class _Load:
    block_ids: list[int]
    ranks: int


class Pins(Protocol):
    """The engine's pool of blocks, as far as a quarantine needs it."""

    def pin(self, block_ids: list[int]) -> None:
        """Keep the pool from allocating the blocks, once more."""

    def unpin(self, block_ids: list[int]) -> None: ...


class Quarantine:
    """Blocks of loads that were given up while the server may still write them, kept from reuse by a pin."""

    def __init__(self, pool: Pins) -> None:
        self._pool = pool
        self._loads: dict[int, _Load] = {}

    def __len__(self) -> int:
        """How many blocks; a block that several loads may write counts once for each."""
        return sum(len(load.block_ids) for load in self._loads.values())

    def add(self, load_id: int, block_ids: list[int]) -> bool:
        """One rank reports a load that was given up; True for the first rank, before the engine frees the blocks."""
        held = self._loads.get(load_id)
        if held is not None:
            held.ranks += 1
            return False
        self._pool.pin(block_ids)
        self._loads[load_id] = _Load(block_ids, 1)
        return True

    def release(self, load_id: int) -> None:
        """One rank reports that the server no longer writes the blocks; the last rank's report frees them."""
        held = self._loads.get(load_id)
        if held is None:
            return
        held.ranks -= 1
        if held.ranks == 0:
            del self._loads[load_id]
            self._pool.unpin(held.block_ids)
