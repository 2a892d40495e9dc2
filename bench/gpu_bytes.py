"""Whether the bytes arrived: the KV's and L1's, compared after what was timed. A wrong byte ends the benchmark."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvserver._native import PIN_BYTES

if TYPE_CHECKING:
    from gpu_rig import Board

_PIECE = 256 << 20  # compared at a time
_NEXT = bytes((byte + 1) % 256 for byte in range(256))
_ONES = 0x0101010101010101


class WrongBytes(BaseException):
    """No `except Exception` may go on after it: a rate of a copy that moved nothing is worse than no rate."""

    EXIT_STATUS = 9  # of the benchmark, so that what runs its parts runs no other


class KvBytes:
    """Planes from the KV's start on, `num_blocks * run` bytes apart. On a GPU torch compares, else Python."""

    def __init__(self, board: Board, planes: int, run: int, num_blocks: int) -> None:
        self._board = board
        self._shape = (planes, num_blocks, run)
        self._span = planes * num_blocks * run

    def _tensor(self) -> Any:
        planes, num_blocks, run = self._shape
        return self._board.gpu_words()[: self._span // 8].view(planes, num_blocks, run // 8)

    def change(self) -> None:
        """Every byte becomes another one: what an earlier copy left there is no longer right, on either side."""
        if self._board.simulated:
            view = self._board.kv.view
            view[: self._span] = view[: self._span].translate(_NEXT)
        else:
            self._tensor().add_(_ONES)  # a byte grows by one or, with a carry, by two
            self._board.synchronize()

    def of(self, blocks: Sequence[int], chunk_blocks: int = 1) -> Any:
        """Of these blocks: [chunk][plane][block of the chunk][run]."""
        planes, num_blocks, run = self._shape
        if self._board.simulated:
            view = self._board.kv.view
            starts = (
                (plane * num_blocks + block) * run
                for first in range(0, len(blocks), chunk_blocks)
                for plane in range(planes)
                for block in blocks[first : first + chunk_blocks]
            )
            return b"".join(view[start : start + run] for start in starts)
        import torch

        ids = torch.tensor(list(blocks), device="cuda:0")
        found = self._tensor()[:, ids].view(planes, -1, chunk_blocks, run // 8)
        return found.transpose(0, 1).contiguous().view(-1)

    def check(self, what: str, blocks: Sequence[int], l1_offset: int, chunk_blocks: int = 1) -> None:
        """L1 holds these blocks from there on."""
        planes, _, run = self._shape
        step = max(1, _PIECE // (planes * run * chunk_blocks)) * chunk_blocks
        for first in range(0, len(blocks), step):
            part = blocks[first : first + step]
            expect_equal(
                what,
                self.of(part, chunk_blocks),
                l1_bytes(self._board, l1_offset + first * planes * run, len(part) * planes * run),
            )


def l1_bytes(board: Board, offset: int, size: int) -> Any:
    memory = (ctypes.c_ubyte * size).from_address(board.region.address + offset)
    if board.simulated:
        return bytes(memory)
    import torch

    host, found = torch.frombuffer(memory, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device="cuda:0")
    at = 0
    while at < size:  # no copy may span two registrations
        end = min(size, at + PIN_BYTES - (offset + at) % PIN_BYTES)
        found[at:end].copy_(host[at:end])
        at = end
    return found.view(torch.int64)


def expect_equal(what: str, left: Any, right: Any) -> None:
    if isinstance(left, bytes):
        same = left == right
    else:
        import torch

        same = torch.equal(left, right)
    if not same:
        raise WrongBytes(f"WRONG BYTES: {what} did not move what it should have; no measurement of this run counts")
