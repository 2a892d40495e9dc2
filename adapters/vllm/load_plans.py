"""Loads of each request: how vLLM's allocated blocks are filled.

Owns: which objects a load reads, and into which blocks. Refuses to know: what was found, and how the engine accounts for a load.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvserver._native import pack_blocks
from kvserver.adapters.common.specs import LoadSpec
from kvserver.adapters.vllm.chunks import Chunks, Tables
from kvserver.adapters.vllm.requests import RequestState


class LoadPlanner:
    """Planner of loads. `ids` numbers the copies of the engine."""

    def __init__(self, chunks: Chunks, ids: Iterator[int]) -> None:
        self._chunks, self._ids = chunks, ids

    def plan(self, state: RequestState, tables: Tables, external_tokens: int) -> list[LoadSpec]:
        """The copies of a load, one for each object group that vLLM has allocated blocks of: of its chunks, and of single blocks."""
        request, local, end = state.request, state.local_tokens, state.local_tokens + external_tokens
        loads: list[LoadSpec] = []

        def add(group: int, object_blocks: int, keys: bytes, blocks: list[int], skip: int) -> None:
            loads.append(
                LoadSpec(
                    copy_id=next(self._ids),
                    request_id=request.request_id,
                    variant=state.variant.text,
                    durability=state.variant.durability,
                    chunk_blocks=object_blocks,
                    keys=keys,
                    block_ids=pack_blocks(blocks),
                    skip_blocks=skip,
                    group=group,
                    tokens=external_tokens,
                )
            )

        hit_chunks = state.answer.hit_chunks if state.answer is not None else 0
        of_chunks = min(end, hit_chunks * self._chunks.tokens) if self._chunks.tails else end
        for group, object_blocks in enumerate(self._chunks.object_blocks):
            chunks, skip, blocks = self._chunks.to_load(group, tables, local, of_chunks)
            if blocks:
                add(group, object_blocks, self._chunks.keys(request, chunks), blocks, skip)
        if end > of_chunks:
            first = max(local, of_chunks) // self._chunks.block_tokens
            for group in range(len(self._chunks.groups)):
                tail, blocks = self._chunks.tail_to_load(group, tables, first, end)
                add(self._chunks.tail_group(group), 1, self._chunks.block_keys(request, tail), blocks, 0)
        for load in loads:
            load.copies = len(loads)
        return loads

    def without_keys(self, request_id: str, tables: Tables) -> LoadSpec:
        """A load that fails: the engine waits for one, and none could be planned."""
        every = pack_blocks([block_id for table in tables for block_id in table])
        return LoadSpec(next(self._ids), request_id, "", 1, b"", every, 0)
