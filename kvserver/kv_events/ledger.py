"""Turns stored and removed chunks into stored and removed blocks.

Chunks may share blocks: two prompts that differ inside a chunk, or the same tokens in two namespaces. A block is
reported once when the first chunk with it is stored, and once when the last chunk with it is removed.

Owns: the number of chunks with each block, in one tier and group, for one audience. Refuses to know: how blocks are published.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable

from kvserver._native import HashCounts
from kvserver.kv_events.descriptions import part_of
from kvserver.kv_events.types import Description, Members, Tier

Run = tuple[int, int]  # blocks [first, last) of a chunk


class Ledger:
    def __init__(self) -> None:
        self._counts = HashCounts(secrets.randbits(64))
        self.unbalanced = 0  # blocks that were removed but never stored: must stay 0

    def stored(self, chunk: Description) -> list[Run]:
        """The runs of blocks that this chunk is the first to have: mostly one run with all blocks."""
        return _runs(self._counts.add(chunk.hashes, chunk.hash_bytes))

    def removed(self, chunk: Description) -> list[Run]:
        """The runs of blocks that no chunk has any more."""
        flags = self._counts.remove(chunk.hashes, chunk.hash_bytes)
        self.unbalanced += flags.count(2)
        return _runs(flags)

    def __len__(self) -> int:
        """Blocks that any chunk has."""
        return len(self._counts)

    @property
    def memory_bytes(self) -> int:
        return self._counts.memory_bytes


class Ledgers:
    """A ledger for each tier and the KV cache groups of a Description: groups name different blocks by the same hashes."""

    def __init__(self) -> None:
        self._ledgers: defaultdict[tuple[Tier, Members], Ledger] = defaultdict(Ledger)

    def count(self, stored: bool, tier: Tier, chunk: Description) -> list[Description]:
        """Count a stored or removed chunk. Returns its parts that are to be announced."""
        ledger = self._ledgers[tier, chunk.members]
        return [part_of(chunk, *run) for run in (ledger.stored(chunk) if stored else ledger.removed(chunk))]

    def total(self, measure: Callable[[Ledger], int]) -> int:
        """May be called while another thread makes a ledger."""
        return sum(map(measure, list(self._ledgers.values())))


def _runs(flags: bytes) -> list[Run]:
    runs: list[Run] = []
    first = flags.find(1)
    while first >= 0:
        last = first
        while last < len(flags) and flags[last] == 1:
            last += 1
        runs.append((first, last))
        first = flags.find(1, last)
    return runs
