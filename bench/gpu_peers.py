"""What the GPU benchmark compares with, in torch: other ways to move the same bytes.

- by tokens: one index a token, a gather into a buffer of one chunk and then its copy, one after the other; the load the
  other way round. This is how connectors that know slot mappings do it.
- over PCIe: a kernel that gathers from and scatters to pinned host memory itself.
"""

from __future__ import annotations

from typing import Any

from gpu_rig import LOAD, STORE, Board, Direction, Transfer, tensor_at, torch

CHUNK_TOKENS = 256


class ByTokens:
    """REQUIRES: a layout per layer, whose planes are rows of tokens."""

    def __init__(self, board: Board, transfer: Transfer) -> None:
        geometry = transfer.geometry
        self.board, self.transfer = board, transfer
        token_bytes = geometry.run // geometry.block_tokens
        span = transfer.num_blocks * geometry.run
        self._planes = [
            board.tensor[p * span : (p + 1) * span].view(torch.int64).view(-1, token_bytes // 8)
            for p in range(geometry.planes)
        ]
        device = board.tensor.device
        self._slots = {
            direction: torch.tensor(
                [block * geometry.block_tokens + i for block in ids for i in range(geometry.block_tokens)],
                device=device,
            ).split(CHUNK_TOKENS)
            for direction, ids in transfer.ids.items()
        }
        shape = (geometry.planes, CHUNK_TOKENS, token_bytes // 8)
        self._buffer = torch.empty(shape, dtype=torch.int64, device=device)
        chunks = len(self._slots[STORE])
        self._host = torch.zeros((chunks, *shape), dtype=torch.int64, pin_memory=not board.simulated)

    def run(self, direction: Direction) -> int:
        """The bytes that were moved."""
        for slots, host in zip(self._slots[direction], self._host, strict=True):
            if direction == STORE:
                for plane, part in zip(self._planes, self._buffer, strict=True):
                    torch.index_select(plane, 0, slots, out=part[: len(slots)])
                host.copy_(self._buffer, non_blocking=True)
            else:
                self._buffer.copy_(host, non_blocking=True)
                for plane, part in zip(self._planes, self._buffer, strict=True):
                    plane.index_copy_(0, slots, part[: len(slots)])
            self.board.synchronize()
        return self.transfer.payload


class OverPcie:
    """One plane's blocks at a time, by a kernel whose other end is host memory."""

    def __init__(self, board: Board, transfer: Transfer) -> None:
        geometry = transfer.geometry
        self.board, self.transfer = board, transfer
        span = transfer.num_blocks * geometry.run
        self._planes = [
            board.tensor[p * span : (p + 1) * span].view(torch.int64).view(-1, geometry.run // 8)
            for p in range(geometry.planes)
        ]
        device = board.tensor.device
        self._ids = {direction: torch.tensor(ids, device=device) for direction, ids in transfer.ids.items()}
        self._pinned = torch.zeros(transfer.payload, dtype=torch.uint8, pin_memory=not board.simulated)
        mapped = self._pinned if board.simulated else tensor_at(self._pinned.data_ptr(), transfer.payload)
        self._mapped: Any = mapped.view(torch.int64).view(geometry.planes, transfer.blocks, geometry.run // 8)

    def run(self, direction: Direction) -> int:
        ids = self._ids[direction]
        for plane, part in zip(self._planes, self._mapped, strict=True):
            if direction == LOAD:
                plane.index_copy_(0, ids, part)
            else:
                torch.index_select(plane, 0, ids, out=part)
        self.board.synchronize()
        return self.transfer.payload
