"""Object groups: which KV cache groups of an engine are stored together, and what a hit needs of each.

A chunk has the same tokens in every group. An object of a group holds the last `object_blocks` positions of its chunk, always the
same ones. So no two stores of an object disagree about its extent.

Owns: `ObjectGroup` and its arithmetic. Refuses to know: planes' memory, keys, what is resident.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvserver.protocol.errors import ErrorCode, KVServerError
from kvserver.protocol.fields import Positive, Tokens
from kvserver.protocol.planes import MAX_GROUPS, Plane

MAX_OBJECT_GROUPS = 16
MAX_CHUNK_TOKENS = 1 << 20  # counts of tokens stay below 2^63 then
_Member = Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]


class ObjectGroup(msgspec.Struct, frozen=True):
    """KV cache groups of equal kind and size, `members`: a position has one block of each.

    Needs of a hit at a boundary, by kind:
    - "full": all blocks before the boundary.
    - "window": the blocks of the last `tokens` tokens. A window of w tokens has w - 1, and what the engine keeps beyond that.
    - "local": the blocks from the last multiple of `tokens` on.
    - "state": the state at the boundary, which is one block.
    """

    kind: Literal["full", "window", "local", "state"]
    members: Annotated[tuple[_Member, ...], Meta(min_length=1, max_length=MAX_GROUPS)]  # as Plane.group
    block_tokens: Positive
    tokens: Tokens = 0
    replicated: bool = False  # all ranks hold the same bytes (MLA)

    def object_blocks(self, chunk_tokens: int) -> int:
        """Positions of one object: the last ones of a chunk of `chunk_tokens` tokens."""
        if self.kind in ("full", "local"):
            return chunk_tokens // self.block_tokens
        return -(-min(chunk_tokens, self._last_tokens) // self.block_tokens)

    def first_needed(self, boundary: int, chunk_tokens: int) -> int:
        """A hit at the end of chunk `boundary` - 1 needs the objects of chunks [first_needed, boundary)."""
        if self.kind == "full":
            return 0
        if self.kind == "local":
            return boundary * chunk_tokens // self.tokens * self.tokens // chunk_tokens
        return max(0, boundary - -(-self._last_tokens // chunk_tokens))

    @property
    def _last_tokens(self) -> int:
        return 1 if self.kind == "state" else self.tokens


def chunk_tokens_for(wanted: int, groups: Sequence[ObjectGroup]) -> int:
    """Tokens of a chunk: whole blocks of every group, `wanted` at most unless that is no block."""
    unit = math.lcm(*(group.block_tokens for group in groups))
    return max(1, wanted // unit) * unit


def has_tails(groups: Sequence[ObjectGroup], chunk_tokens: int) -> bool:
    """True if the last chunk of a prompt can be stored block by block: full attention alone, chunks of several equal blocks.

    Of such a model any block ends a hit. A window or a state would need objects of its own for each block.
    """
    sizes = {group.block_tokens for group in groups if group.kind == "full"}
    all_full = all(group.kind == "full" for group in groups)
    return all_full and len(sizes) == 1 and sizes != {chunk_tokens} and 2 * len(groups) <= MAX_OBJECT_GROUPS


def check_object_groups(groups: Sequence[ObjectGroup], planes: Sequence[Plane]) -> None:
    """KVServerError(BAD_PLANES) unless each KV cache group of the planes is a member of one object group."""
    members = sorted(member for group in groups for member in group.members)
    present = sorted({plane.group for plane in planes})
    if members != present:
        raise KVServerError(
            ErrorCode.BAD_PLANES, f"the object groups have the members {members}, the planes are of groups {present}"
        )
    for number, group in enumerate(groups):
        if group.kind in ("window", "local") and not group.tokens:
            raise KVServerError(ErrorCode.BAD_PLANES, f"object group {number} is a {group.kind} of 0 tokens")
