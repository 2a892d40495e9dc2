"""Tensors to planes, from shapes and strides alone.

Method: remove the block dimension and sort the others by stride. The contiguous tail is the run; the other dimensions enumerate
planes. Planes of one memory are ordered by offset, and those that lie end to end within one block are merged. Memories are
ordered by their first layer. Addresses do not count, for they differ from process to process. Offsets in a memory do not.

Owns: the block dimension, the contiguous runs, and their order in a slot. Refuses to know: what layers, heads or dtypes mean, and
how memory is shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvserver.protocol import Plane

MAX_PLANES = 65536  # what one registration may name


class UnsupportedLayout(Exception):
    """Tensors that cannot be divided into blocks; the message states why."""


@dataclass(frozen=True)
class Piece:
    """A plane before merging: run number `run` of layer number `layer`."""

    layer: int
    run: int
    plane: Plane


def block_dimension(shape: Sequence[int], num_blocks: int, known: int | None = None) -> int:
    """Index of the dimension that counts blocks: `known` to the engine, or the only one that can.

    Its size may be a multiple of `num_blocks`: tokens of a block (SGLang), or kernel blocks that split the manager's (vLLM).
    Never a guess: two candidates raise UnsupportedLayout.
    """
    found = [i for i, n in enumerate(shape) if n and n % num_blocks == 0]
    if known is not None:
        if known not in found:
            raise UnsupportedLayout(f"shape {tuple(shape)} has no dimension of {num_blocks} blocks in place {known}")
        return known
    if not found:
        raise UnsupportedLayout(f"shape {tuple(shape)} has no dimension of {num_blocks} blocks or a multiple")
    if len(found) > 1:
        raise UnsupportedLayout(f"shape {tuple(shape)}: dimensions {found} could all count {num_blocks} blocks")
    return found[0]


def by_block(tensor: torch.Tensor, num_blocks: int, known: int | None = None) -> torch.Tensor:
    """The same memory with dimension 0 of exactly `num_blocks`; what is left of a multiple becomes dimension 1."""
    dim = block_dimension(tensor.shape, num_blocks, known)
    per_block = tensor.shape[dim] // num_blocks
    return tensor.unflatten(dim, (num_blocks, per_block)).movedim((dim, dim + 1), (0, 1))


def runs(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], int]:
    """(offsets of the runs, elements per run) of one block, given its shape and strides in elements.

    Offsets are in the order of the dimensions by falling stride. Dimensions of size 1 do not matter.
    """
    dims = sorted(((s, n) for n, s in zip(shape, strides, strict=True) if n != 1), reverse=True)
    run = 1
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    reach = run
    for stride, count in reversed(dims):
        if stride < reach:
            raise UnsupportedLayout(f"strides {tuple(strides)} repeat elements")
        reach = stride * (count - 1) + reach
    steps = ([i * stride for i in range(count)] for stride, count in dims)
    return [sum(offsets) for offsets in itertools.product(*steps)], run


def tensor_planes(
    tensor: torch.Tensor, num_blocks: int, memory: int, offset: int, known: int | None = None
) -> list[Plane]:
    """The planes of one layer's KV cache; `offset` is where the tensor begins in memory number `memory`."""
    blocks = by_block(tensor, num_blocks, known)
    size = tensor.element_size()
    offsets, run = runs(blocks.shape[1:], blocks.stride()[1:])
    if num_blocks > 1 and blocks.stride(0) < run:
        raise UnsupportedLayout(f"strides {tensor.stride()} repeat elements")
    if len(offsets) > MAX_PLANES:
        raise UnsupportedLayout(f"shape {tuple(tensor.shape)} with strides {tensor.stride()} makes too many planes")
    stride = max(blocks.stride(0), run) * size
    return [Plane(memory, offset + o * size, stride, run * size) for o in offsets]


def in_slot_order(layers: Iterable[Sequence[Plane]]) -> list[Piece]:
    """All layers' planes as a slot holds them: memory by memory, by offset."""
    pieces = [Piece(i, j, plane) for i, planes in enumerate(layers) for j, plane in enumerate(planes)]
    return sorted(pieces, key=lambda piece: (piece.plane.memory, piece.plane.offset))


def merge(pieces: Sequence[Piece], num_blocks: int) -> list[Plane]:
    """Join planes where a block's bytes simply go on, and drop what another layer covers too.

    UnsupportedLayout if bytes of one block would be those of another one elsewhere. REQUIRES: slot order.
    """
    merged: list[Plane] = []
    for piece in pieces:
        joined = _joined(merged[-1], piece.plane) if merged else None
        if joined is not None:
            merged[-1] = joined
        else:
            merged.append(piece.plane)
    if len(merged) > MAX_PLANES:
        raise UnsupportedLayout(f"{len(merged)} planes; the most is {MAX_PLANES}")
    _refuse_overlap(merged, num_blocks)
    return merged


def _joined(last: Plane, plane: Plane) -> Plane | None:
    """Join both planes, if they touch or overlap and fit into one block's stride; else None."""
    if (last.memory, last.stride_bytes) != (plane.memory, plane.stride_bytes):
        return None
    if plane.offset > last.offset + last.run_bytes:
        return None
    run = max(last.run_bytes, plane.offset + plane.run_bytes - last.offset)
    return Plane(last.memory, last.offset, last.stride_bytes, run) if run <= last.stride_bytes else None


def _refuse_overlap(planes: Sequence[Plane], num_blocks: int) -> None:
    """Planes whose address ranges overlap must be interleaved: one stride, and all within one block of it."""
    first: Plane | None = None  # of those that are interleaved
    end = 0
    for plane in planes:
        if first is None or plane.memory != first.memory or plane.offset >= end:
            first, end = plane, 0
        elif (
            plane.stride_bytes != first.stride_bytes
            or plane.offset + plane.run_bytes > first.offset + first.stride_bytes
        ):
            raise UnsupportedLayout("layers overlap in memory, so that a block of one is another block of another")
        end = max(end, plane.offset + (num_blocks - 1) * plane.stride_bytes + plane.run_bytes)


def describe(name: str, tensor: torch.Tensor, num_blocks: int, known: int | None = None) -> str:
    """Arrangement of one layer's block: its dimensions by falling stride, as `runs` orders them.

    The strides are left out: they may grow with the number of blocks, which engines that share KV need not have in common.
    """
    blocks = by_block(tensor, num_blocks, known)
    dims = zip(blocks.stride()[1:], range(1, blocks.dim()), blocks.shape[1:], strict=True)
    return f"{name}:{tensor.dtype}:{[(i, n) for _, i, n in sorted((d for d in dims if d[2] > 1), reverse=True)]}"


def describe_order(pieces: Sequence[Piece]) -> str:
    """Order of the layers' runs in a slot, and the bytes that they have in common.

    With `describe` of each layer it makes a text for the fingerprint: equal texts mean interchangeable bytes.
    """
    text: list[str] = []
    last: Plane | None = None
    for piece in pieces:
        joined = _joined(last, piece.plane) if last is not None else None
        common = last.offset + last.run_bytes - piece.plane.offset if last is not None and joined is not None else 0
        text.append(f"{piece.layer}.{piece.run}" + (f"-{common}" if common else ""))
        last = joined or piece.plane
    in_turn = [f"{piece.layer}.{piece.run}" for piece in sorted(pieces, key=lambda piece: (piece.layer, piece.run))]
    return "" if text == in_turn else ",".join(text)  # layer after layer, however many runs each has
