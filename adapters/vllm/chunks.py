"""Chunks as the scheduler half counts and names them, and the single blocks behind the last chunk: the tail.

Owns: their size, which the daemon of the session sets, and the place of their objects in block tables. Refuses to know: lookups
and stores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from kvserver.adapters.common.steps import NULL_BLOCK
from kvserver.protocol import KEY_BYTES, ObjectGroup, chunk_tokens_for, has_tails

if TYPE_CHECKING:
    from vllm.v1.request import Request

# A request's block ids by KV cache group, in the order of tokens.
Tables: TypeAlias = Sequence[list[int]]
# (KV cache group, block, tokens): a state right behind so many tokens, in a block that the step leaves unchanged.
Offer: TypeAlias = tuple[int, int, int]


class Uncovered(Exception):
    """Load for which the engine allocated a block that no object covers."""


class Chunks:
    def __init__(self, groups: Sequence[ObjectGroup], hash_block_tokens: int, all_groups: bool = True) -> None:
        """`all_groups`: False if the engine has KV cache groups beside these, which it fills anew from the hit's boundary."""
        self.groups = groups
        self.block_tokens = groups[0].block_tokens if groups else 1
        self.hash_block_tokens = hash_block_tokens
        # So many tokens end a block of some group: contents of chunks have a hash there.
        self.described_tokens = math.gcd(*(group.block_tokens for group in groups)) if groups else 1
        self.only_full = all_groups and all(group.kind == "full" for group in groups)
        self.states = {
            member: group.block_tokens for group in groups if group.kind == "state" for member in group.members
        }
        self.tokens = self.block_tokens
        self.resize(0)

    def resize(self, chunk_tokens: int, tails: bool = False) -> None:
        """Set the size, as the daemon of this session states it. `tails`: it serves single blocks too, of the models that have tails."""
        self.tokens = chunk_tokens_for(chunk_tokens, self.groups) if self.groups else 1
        self.object_blocks = [group.object_blocks(self.tokens) for group in self.groups]
        self.tails = tails and has_tails(self.groups, self.tokens)

    @property
    def blocks(self) -> int:
        """Blocks of group 0 in a chunk."""
        return self.tokens // self.block_tokens

    def hashed(self, request: Request) -> int:
        """Number of the request's chunks that the engine has hashed."""
        return len(request.block_hashes) * self.hash_block_tokens // self.tokens

    def useful(self, request: Request) -> int:
        """Number of chunks to look up."""
        return min(self.hashed(request), self.most_tokens(request) // self.tokens)

    def most_tokens(self, request: Request) -> int:
        """Number of tokens that a hit may have.

        One token is computed in any case. Full attention may compute its KV again. A window, a state or a ring must be that of an
        earlier boundary.
        """
        return int(request.num_tokens) - (not self.only_full)

    def tail(self, request: Request, chunks: int, tokens: int) -> range:
        """The whole blocks in the first `tokens` tokens of the request that lie behind so many chunks, but of one chunk at most.

        In numbers of blocks; empty without tails.
        """
        if not self.tails:
            return range(0)
        hashed = len(request.block_hashes) * self.hash_block_tokens
        first = chunks * self.blocks
        return range(first, max(first, min(first + self.blocks, min(tokens, hashed) // self.block_tokens)))

    def found_tokens(self, chunks: int, tail_blocks: int) -> int:
        return chunks * self.tokens + tail_blocks * self.block_tokens

    def keys(self, request: Request, chunks: Sequence[int]) -> bytes:
        """Keys of these chunks: the engine's hash of each chunk's last block. IndexError if one is not hashed."""
        return self._keys(request, chunks, self.tokens)

    def block_keys(self, request: Request, blocks: Sequence[int]) -> bytes:
        """Keys of single blocks, as keys(). REQUIRES: `tails`."""
        return self._keys(request, blocks, self.block_tokens)

    def _keys(self, request: Request, chunks: Sequence[int], chunk_tokens: int) -> bytes:
        step, hashes = chunk_tokens // self.hash_block_tokens, request.block_hashes
        if isinstance(chunks, range) and chunks.step == 1:  # of a long prompt: no step for each chunk
            named = hashes[(chunks.start + 1) * step - 1 : chunks.stop * step : step]
            if len(named) != len(chunks):
                raise IndexError(f"{chunks} of a request with {len(hashes)} hashes, {step} a chunk")
        else:
            named = [hashes[(chunk + 1) * step - 1] for chunk in chunks]
        keys = b"".join(named)  # hashes of one request are of one length
        if len(keys) != len(chunks) * KEY_BYTES:
            keys = b"".join([bytes(name).ljust(KEY_BYTES, b"\0") for name in named])
        return keys

    def block_hashes(self, request: Request, first: int, last: int) -> list[bytes]:
        """Hashes of parts [first, last) of `described_tokens`: where hashes are finer, the last one inside the part."""
        step = self.described_tokens // self.hash_block_tokens
        hashes: list[bytes] = request.block_hashes[(first + 1) * step - 1 : last * step : step]
        return hashes

    # ---- objects in block tables --------------------------------------------------------------

    def tokens_of(self, tables: Tables) -> list[int]:
        """Tokens for which the tables have blocks, by KV cache group; [0] without tables."""
        if not tables:
            return [0]
        return [len(tables[member]) * group.block_tokens for group in self.groups for member in group.members]

    def offered(self, tables: Tables, offers: Sequence[Offer]) -> Tables:
        """The tables as stores read them: of states only the blocks that the engine offers, each at the end of its tokens."""
        if not self.states:
            return tables
        found = [[NULL_BLOCK] * len(table) if member in self.states else table for member, table in enumerate(tables)]
        for member, block_id, tokens in offers:
            position, rest = divmod(tokens, self.states[member])
            if not rest:
                found[member][position - 1] = block_id
        return found

    def whole(self, group: int, tables: Tables, chunk: int) -> bool:
        """True if the tables have every block of the chunk's object. A window that moved on has lost some."""
        first, end = self._positions(group, chunk)
        return not any(NULL_BLOCK in tables[member][first:end] for member in self.groups[group].members)

    def blocks_of(self, group: int, tables: Tables, chunks: Sequence[int]) -> list[int]:
        """The blocks of these chunks' objects, as a copy names them: [position][member]."""
        return [id for chunk in chunks for id in self._by_position(group, tables, *self._positions(group, chunk))]

    def to_load(self, group: int, tables: Tables, local_tokens: int, tokens: int) -> tuple[range, int, list[int]]:
        """Load of tokens [local_tokens, tokens): (chunks to read, positions to skip in the first, blocks to write).

        Blocks below a window are null and are left out. Raises Uncovered if no object covers a block that is not null.
        """
        size = self.groups[group].block_tokens
        first, end = local_tokens // size, -(-tokens // size)
        members = [tables[member] for member in self.groups[group].members]
        while first < end and all(table[first] == NULL_BLOCK for table in members):
            first += 1
        if first >= end:
            return range(0), 0, []
        per_chunk = self.tokens // size
        chunks = range(first // per_chunk, -(-end // per_chunk))
        begin, _ = self._positions(group, chunks[0])
        if first < begin or (len(chunks) > 1 and self.object_blocks[group] < per_chunk):
            raise Uncovered(
                f"block {first} of group {group}, whose objects end at block {end} and have {self.object_blocks[group]}"
            )
        return chunks, first - begin, self._by_position(group, tables, first, end)

    def tail_group(self, group: int) -> int:
        """The number of the object group that the group's single blocks are."""
        return len(self.groups) + group

    def tail_to_load(self, group: int, tables: Tables, first: int, tokens: int) -> tuple[range, list[int]]:
        """The single blocks from number `first` on that a load up to `tokens` reads, and the blocks that it writes."""
        blocks = range(first, -(-tokens // self.block_tokens))
        return blocks, self.tail_ids(group, tables, blocks)

    def tail_ids(self, group: int, tables: Tables, blocks: range) -> list[int]:
        """The block ids of single blocks, as a copy names them."""
        return self._by_position(group, tables, blocks.start, blocks.stop) if blocks else []

    def _positions(self, group: int, chunk: int) -> tuple[int, int]:
        """The positions [first, end) of a chunk's object in the group's tables."""
        end = (chunk + 1) * (self.tokens // self.groups[group].block_tokens)
        return end - self.object_blocks[group], end

    def _by_position(self, group: int, tables: Tables, first: int, end: int) -> list[int]:
        members = self.groups[group].members
        if len(members) == 1:
            return tables[members[0]][first:end]
        return [id for ids in zip(*(tables[member][first:end] for member in members), strict=True) for id in ids]
