"""The request of a `Transfer`, moved by other ways than ours (`gpu_ways`): the same blocks, the same pinned L1."""

from __future__ import annotations

import time
from pathlib import Path

from gpu_rig import LOAD, ONE_WAY, Direction, Transfer
from gpu_ways import BY_CHUNKS, WAYS, OtherWays, WayFailed

from kvserver._native import PIN_BYTES

CHUNK_TOKENS = 256


class Peers:
    """REQUIRES: both slots lie in one registration of L1, since these ways know nothing of registrations."""

    def __init__(self, library: Path, transfer: Transfer) -> None:
        self._transfer = transfer
        board, geometry = transfer.board, transfer.geometry
        self._chunk_blocks = CHUNK_TOKENS // geometry.block_tokens
        kv = board.kv_address
        self._ways = {}
        for direction in ONE_WAY.values():
            offset = transfer.l1_offset(direction)
            assert offset // PIN_BYTES == (offset + transfer.payload - 1) // PIN_BYTES
            self._ways[direction] = OtherWays(
                library,
                bases=[kv + plane * transfer.num_blocks * geometry.run for plane in range(geometry.planes)],
                run=geometry.run,
                block_tokens=geometry.block_tokens,
                blocks=transfer.ids[direction],
                chunk_blocks=self._chunk_blocks,
                host=board.region.address + offset,
            )

    def usable(self) -> tuple[list[str], list[str]]:
        """(ways that move this request, why each other one does not)."""
        usable, refused = [], []
        for way in WAYS:
            try:
                for direction in ONE_WAY.values():
                    self.move(way, direction)
                usable.append(way)
            except WayFailed as error:
                refused.append(f"{way}, {self._transfer.geometry.name}: {error}")
        return usable, refused

    def move(self, way: str, direction: Direction) -> int:
        """The bytes that were moved."""
        self._ways[direction].run(way, direction == LOAD)
        return self._transfer.payload

    def gb_per_second(self, way: str, direction: Direction) -> float:
        self._transfer.kv.change()
        began = time.perf_counter()
        moved = self.move(way, direction)
        seconds = time.perf_counter() - began
        self._transfer.check(way, direction, self._chunk_blocks if way in BY_CHUNKS else 1)
        return moved / seconds / 1e9

    def close(self) -> None:
        for ways in self._ways.values():
            ways.close()
