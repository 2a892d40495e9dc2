"""Object groups of a namespace, as L1 counts them: slots of a chunk, and what a hit needs.

Owns: the numbering of a chunk's slots over groups and ranks, and the search for the greatest boundary of a hit. Refuses to know:
keys, leases, pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from kvserver.protocol import ObjectGroup


class _HasReady(Protocol):
    @property
    def ready(self) -> int: ...  # a bit for each group


class GroupObjects(msgspec.Struct, frozen=True):
    """Extent of a group's objects: the last `blocks` blocks of the chunk, of each KV cache group in `members`."""

    number: int  # of the object group; of its single blocks (tails) -1 - number
    members: tuple[int, ...]  # as the engine numbers KV cache groups; (): all of the engine's
    block_tokens: int
    blocks: int

    @property
    def place(self) -> int:
        """Index of the group in its layout."""
        return self.number if self.number >= 0 else -1 - self.number

    @property
    def first(self) -> int:
        """The number of the first group, of chunks or of single blocks, with whose stores the contents come."""
        return 0 if self.number >= 0 else -1


WHOLE_CHUNKS = GroupObjects(0, (), 0, 0)  # of a model with one object group: all blocks of the chunk


class Groups:
    """Object groups of a namespace. The slots of group g are numbers [first[g], first[g] + slots[g]), one for each rank that stores it.

    - `masks[g]` has a bit for each of these numbers.
    - `full` has bit g for each group of which a hit needs every chunk.
    - `objects[g]` is what KV events of the group's objects name.
    - `tails`: chunks are single blocks, of prompts' last chunks.
    """

    __slots__ = (
        "_others",
        "chunk_tokens",
        "first",
        "full",
        "made_of",
        "masks",
        "objects",
        "ranks",
        "slot_count",
        "slots",
        "tails",
    )

    def __init__(self, groups: Sequence[ObjectGroup], ranks: int, chunk_tokens: int, *, tails: bool = False) -> None:
        self.tails = tails
        self.made_of, self.ranks = tuple(groups), ranks
        self.chunk_tokens = chunk_tokens
        self.slots = [1 if group.replicated else ranks for group in groups]
        self.first = [sum(self.slots[:number]) for number in range(len(groups))]
        self.slot_count = sum(self.slots)
        self.masks = [((1 << slots) - 1) << first for slots, first in zip(self.slots, self.first, strict=True)]
        self.full = sum(1 << number for number, group in enumerate(groups) if group.kind == "full")
        self.objects = [_objects_of(number, group, chunk_tokens) for number, group in enumerate(groups)]
        if len(groups) == 1 and self.objects[0].blocks * self.objects[0].block_tokens == chunk_tokens:
            self.objects = [WHOLE_CHUNKS]
        if tails:
            self.objects = [replace(of, number=-1 - of.number) for of in self.objects]
        self._others = [(1 << number, group) for number, group in enumerate(groups) if group.kind != "full"]

    def boundary(self, chunks: Sequence[_HasReady | None]) -> int:
        """The greatest boundary of a hit, if all full groups have these chunks, which are the first of a prompt."""
        boundary, found = len(chunks), [len(chunks)] * len(self._others)
        while (missing := self._missing(chunks, boundary, found)) >= 0:
            boundary = missing  # each boundary above it needs the chunk too
        return boundary

    def boundaries(self, chunks: Sequence[_HasReady | None]) -> list[int]:
        """All boundaries of a hit, ascending, of which boundary() is the last. REQUIRES: all full groups have these chunks."""
        in_turn = [0] * len(self._others)  # the chunks up to here that each group has
        found: list[int] = []
        for end, chunk in enumerate(chunks, 1):
            whole = True
            for index, (bit, group) in enumerate(self._others):
                in_turn[index] = in_turn[index] + 1 if chunk is not None and chunk.ready & bit else 0
                whole = whole and in_turn[index] >= end - group.first_needed(end, self.chunk_tokens)
            if whole:
                found.append(end)
        return found

    def first_needed(self, boundary: int) -> int:
        """The first chunk of which a hit at the boundary needs an object."""
        if self.full:
            return 0
        return min((group.first_needed(boundary, self.chunk_tokens) for _, group in self._others), default=boundary)

    def _missing(self, chunks: Sequence[_HasReady | None], boundary: int, found: list[int]) -> int:
        """The last chunk that lacks an object that a hit at the boundary needs; -1 if there is none.

        `found`: from which chunk on each group has all objects up to an earlier, greater boundary: none is looked at twice.
        """
        for index, (bit, group) in enumerate(self._others):
            first = group.first_needed(boundary, self.chunk_tokens)
            for number in range(min(boundary, found[index]) - 1, first - 1, -1):
                chunk = chunks[number]
                if chunk is None or not chunk.ready & bit:
                    return number
            found[index] = min(found[index], first)
        return -1


def _objects_of(number: int, group: ObjectGroup, chunk_tokens: int) -> GroupObjects:
    return GroupObjects(number, group.members, group.block_tokens, group.object_blocks(chunk_tokens))


def one_group(ranks: int) -> Groups:
    """Groups of a model whose KV cache groups are all full, sharded over the ranks."""
    return Groups([ObjectGroup("full", (0,), 1)], ranks, 1)
