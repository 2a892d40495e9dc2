"""Keeps objects that lookups find in L1 young in L2 as well: else a prompt that is always an L1 hit would leave L2 first.

A lookup costs one entry here. Prompts beyond a second's share are left out: a prompt that is often found comes again.

Owns: the prompts found in the last second, and how many of their objects are made young in one turn and in one second. Refuses to
know: how a tier orders what it has.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvserver.engines import Instance
from kvserver.protocol import KEY_BYTES, Durability
from kvserver.tiering.tiers import Tiers

_MOST_CHUNKS = 16384  # of all prompts of one second; of one second's work, times object groups
_CHUNKS_PER_TURN = 256


class _Found(NamedTuple):
    instance: Instance
    namespace: bytes
    keys: bytes  # of the chunks
    chunks: int
    durability: Durability


class Ages:
    """Prompts to make young. REQUIRES: the loop's thread uses it."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._found: dict[tuple[bytes, bytes], _Found] = {}  # by namespace and key of the last chunk
        self._due: deque[_Found] = deque()
        self._room = _MOST_CHUNKS  # that may still be added in this second
        self._chunks_left = 0  # that may still be made young in this second

    def found(self, instance: Instance, namespace: bytes, keys: bytes, chunks: int, durability: Durability) -> None:
        """A lookup found the first `chunks` of these chunks in L1. `durability`: of the variant."""
        if not self._tiers.all or durability is Durability.PROCESS:
            return
        end = chunks * KEY_BYTES
        prompt = namespace, keys[end - KEY_BYTES : end]
        if self._room > 0 and prompt not in self._found:
            self._room -= chunks
            self._found[prompt] = _Found(instance, namespace, keys[:end], chunks, durability)

    def tick(self) -> None:
        """Once a second or so."""
        self._due = deque(self._found.values())
        self._found, self._room, self._chunks_left = {}, _MOST_CHUNKS, _MOST_CHUNKS

    def step(self) -> bool:
        """Make some objects young at the end of a turn, those of a prompt from its end on. True while there is more."""
        left = _CHUNKS_PER_TURN
        while self._due and left > 0 and self._chunks_left > 0:
            prompt = self._due.popleft()
            coverages = prompt.instance.coverages
            durability = prompt.instance.durability(prompt.durability)
            first = max(0, prompt.chunks - left)
            part = prompt.keys[first * KEY_BYTES : prompt.chunks * KEY_BYTES]
            for coverage in coverages:
                if coverage is not None:
                    self._tiers.touch(prompt.namespace, coverage.group, part, durability)
            looked_at = (prompt.chunks - first) * max(1, len(coverages))
            left -= looked_at
            self._chunks_left -= looked_at
            if first:
                self._due.appendleft(prompt._replace(chunks=first))
        return bool(self._due) and self._chunks_left > 0
