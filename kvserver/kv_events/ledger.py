"""From chunks to blocks: which blocks came with a chunk, and which went with it.

Chunks may share blocks: those of two prompts that part inside a chunk, or the same tokens in two namespaces. A block is
told once when the first chunk with it comes, and once when the last one goes.

Owns: how often each block is held, in one tier, for one audience. Refuses to know: how it is told.
"""

from __future__ import annotations

import secrets

from kvserver._native import HashCounts
from kvserver.kv_events.types import Description

Run = tuple[int, int]  # blocks [first, last) of a chunk


class Ledger:
    def __init__(self) -> None:
        self._counts = HashCounts(secrets.randbits(64))
        self.unbalanced = 0  # blocks that went without having come: must stay 0

    def stored(self, chunk: Description) -> list[Run]:
        """The runs of the chunk's blocks that are held since now: mostly one, all of them."""
        return _runs(self._counts.add(chunk.hashes, chunk.hash_bytes))

    def removed(self, chunk: Description) -> list[Run]:
        """The runs of its blocks that are held no more."""
        gone = self._counts.remove(chunk.hashes, chunk.hash_bytes)
        self.unbalanced += gone.count(2)
        return _runs(gone)

    def __len__(self) -> int:
        """Blocks that are held."""
        return len(self._counts)

    @property
    def memory_bytes(self) -> int:
        return self._counts.memory_bytes


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
