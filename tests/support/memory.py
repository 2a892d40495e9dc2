"""An engine's KV memory: how it lies there, and its bytes. Memory and descriptors are real; the engine is made up."""

from __future__ import annotations

import itertools
import mmap
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvserver._native import NO_BLOCK
from kvserver.protocol import Plane, SharedFd
from kvserver.protocol import messages as protocol


@dataclass(frozen=True)
class Geometry:
    """How a test engine's KV cache lies in memory. `sizes[i]` is the bytes of memory i."""

    num_blocks: int
    block_tokens: int
    sizes: tuple[int, ...]
    planes: tuple[Plane, ...]

    @property
    def block_bytes(self) -> int:
        return sum(plane.run_bytes for plane in self.planes)

    @property
    def groups(self) -> int:
        return 1 + max(plane.group for plane in self.planes)


def awkward(num_blocks: int = 64, block_tokens: int = 16, scale: int = 1) -> Geometry:
    """Two memories: a contiguous plane, two interleaved ones with gaps, one longer than an L1 page.

    Runs of different and odd lengths, so that nothing lines up with pages by chance.
    """
    small, stride = 192 * scale, 1000 * scale
    large = 4096 + 136 * scale
    return Geometry(
        num_blocks,
        block_tokens,
        sizes=(num_blocks * small + num_blocks * stride, 64 + num_blocks * large),
        planes=(
            Plane(0, 0, small, small),
            Plane(0, num_blocks * small + 5, stride, 333 * scale),
            Plane(0, num_blocks * small + 400 * scale, stride, 577 * scale),
            Plane(1, 64, large, large),
        ),
    )


def two_groups(num_blocks: int = 64, block_tokens: int = 16) -> Geometry:
    """A hybrid model: the planes of both groups lie over the same bytes, cut in different ways."""
    return Geometry(
        num_blocks,
        block_tokens,
        sizes=(num_blocks * 6000 + 100,),
        planes=(
            Plane(0, 7, 6000, 2500, group=0),
            Plane(0, 0, 6000, 1111, group=1),
            Plane(0, 3000, 6000, 2999, group=0),
            Plane(0, 1500, 6000, 4500, group=1),
        ),
    )


Position = int | Sequence[int]  # the block of the only group, or one of each; NO_BLOCK for none


class Piece(Protocol):
    """One memory of an engine: `view` reads and writes its bytes by slices, `fds` are handed over for it."""

    view: Any
    fds: list[int]

    def described(self, index: int) -> protocol.Memory:
        """As it is registered; its descriptor is the `index`-th."""

    def fill(self) -> None:
        """New noise everywhere."""

    def close(self) -> None: ...


class SharedMemory:
    """A memfd: a new one, or the caller's, which it takes over."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.fds = [os.memfd_create("test-kv") if fd is None else fd]
        if fd is None:
            os.ftruncate(self.fds[0], size)
        self.view = mmap.mmap(self.fds[0], size)

    def described(self, index: int) -> protocol.Memory:
        return SharedFd(index=index, size_bytes=len(self.view))

    def fill(self) -> None:
        self.view[:] = random.randbytes(len(self.view))

    def close(self) -> None:
        self.view.close()
        while self.fds:
            os.close(self.fds.pop())


class Memory:
    """The memories of one geometry, filled with noise."""

    def __init__(self, geometry: Geometry, allocate: Callable[[int], Piece] = SharedMemory) -> None:
        self.geometry = geometry
        self.pieces = [allocate(size) for size in geometry.sizes]
        self.maps = [piece.view for piece in self.pieces]
        self.fill()

    @property
    def fds(self) -> list[int]:
        return [fd for piece in self.pieces for fd in piece.fds]

    def described(self) -> list[protocol.Memory]:
        before = itertools.accumulate((len(piece.fds) for piece in self.pieces), initial=0)
        return [piece.described(index) for piece, index in zip(self.pieces, before, strict=False)]

    def fill(self) -> None:
        """New noise everywhere, also between the planes."""
        for piece in self.pieces:
            piece.fill()

    def read(self, position: Position) -> bytes:
        """The bytes of one position over all planes; zeros where a group has no block."""
        ids = [position] if isinstance(position, int) else position
        parts = []
        for plane in self.geometry.planes:
            at = plane.offset + ids[plane.group] * plane.stride_bytes
            if ids[plane.group] == NO_BLOCK:
                parts.append(bytes(plane.run_bytes))
                continue
            parts.append(self.maps[plane.memory][at : at + plane.run_bytes])
        return b"".join(parts)

    def blocks(self, positions: Iterable[Position]) -> list[bytes]:
        return [self.read(position) for position in positions]

    def write(self, position: Position, content: bytes) -> None:
        put(self.geometry, self.maps, position, content)

    def image(self) -> list[bytes]:
        """A copy of every byte."""
        return [view[:] for view in self.maps]

    def image_with(self, contents: Mapping[Any, bytes]) -> list[bytes]:
        """What image() would be if these positions had these bytes and nothing else changed."""
        copies = [bytearray(view[:]) for view in self.maps]
        for position, content in contents.items():
            put(self.geometry, copies, position, content)
        return [bytes(copy) for copy in copies]

    def truncate(self, memory: int = 0, size: int = 0) -> None:
        """Take memory away from every process that mapped it; ours must not be read afterwards."""
        os.ftruncate(self.fds[memory], size)

    def close(self) -> None:
        """Idempotent."""
        for piece in self.pieces:
            piece.close()


def put(geometry: Geometry, maps: Sequence[Any], position: Position, content: bytes) -> None:
    """Write one position's bytes over all planes into `maps`, but for groups without a block."""
    ids = [position] if isinstance(position, int) else position
    done = 0
    for plane in geometry.planes:
        if ids[plane.group] != NO_BLOCK:
            at = plane.offset + ids[plane.group] * plane.stride_bytes
            maps[plane.memory][at : at + plane.run_bytes] = content[done : done + plane.run_bytes]
        done += plane.run_bytes


def gpu_handle(fd: int) -> bytes:
    """How a simulated GPU of another process finds this memory."""
    return f"/proc/{os.getpid()}/fd/{fd}".encode().ljust(64, b"\0")
