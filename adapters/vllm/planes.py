"""Tensors to planes, from shapes and strides alone.

Owns: finding the block dimension and the contiguous runs. Refuses to know: what layers, heads or
dtypes mean, and how memory is shared.

Method: take the block dimension out, sort the other dimensions by stride; the tail that is contiguous
is the run, the other dimensions enumerate planes. Planes of consecutive layers that lie end to end
within one block are merged. The order is that of the layers, never of addresses, which differ from
process to process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from kvserver.planes import Plane


class UnsupportedLayout(Exception):
    """These tensors cannot be told apart into blocks; the message says why."""


def block_dimension(shape: Sequence[int], num_blocks: int) -> int:
    """Which dimension counts blocks. vLLM 0.29+ puts it first, older [2, blocks, ...] second."""
    if shape[0] == num_blocks and not (shape[0] == 2 and len(shape) > 1 and shape[1] == num_blocks):
        return 0
    if len(shape) > 1 and shape[0] == 2 and shape[1] == num_blocks:
        return 1
    raise UnsupportedLayout(f"shape {tuple(shape)} has no dimension of {num_blocks} blocks in first or second place")


def runs(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], int]:
    """(offsets of the runs, elements per run) of one block, given its shape and strides in elements.

    Offsets are in the order of the dimensions by falling stride. Dimensions of size 1 do not matter.
    """
    dims = sorted(((s, n) for n, s in zip(shape, strides, strict=True) if n != 1), reverse=True)
    run = 1
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    if any(stride <= 0 for stride, _ in dims):
        raise UnsupportedLayout(f"strides {tuple(strides)} repeat elements")
    steps = ([i * stride for i in range(count)] for stride, count in dims)
    return [sum(offsets) for offsets in itertools.product(*steps)], run


def tensor_planes(tensor: torch.Tensor, num_blocks: int, memory: int, offset: int) -> list[Plane]:
    """The planes of one layer's KV cache; `offset` is where the tensor begins in memory number `memory`."""
    dim = block_dimension(tensor.shape, num_blocks)
    shape = [n for i, n in enumerate(tensor.shape) if i != dim]
    strides = [s for i, s in enumerate(tensor.stride()) if i != dim]
    size = tensor.element_size()
    offsets, run = runs(shape, strides)
    return [Plane(memory, offset + o * size, tensor.stride(dim) * size, run * size) for o in offsets]


def merge(planes: Iterable[Plane]) -> list[Plane]:
    """Join each plane to the one before it where a block's bytes simply go on."""
    merged: list[Plane] = []
    for plane in planes:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.memory, last.stride_bytes) == (plane.memory, plane.stride_bytes)
            and last.offset + last.run_bytes == plane.offset
            and last.run_bytes + plane.run_bytes <= plane.stride_bytes
        ):
            merged[-1] = Plane(last.memory, last.offset, last.stride_bytes, last.run_bytes + plane.run_bytes)
        else:
            merged.append(plane)
    return merged


def describe(name: str, tensor: torch.Tensor, num_blocks: int) -> str:
    """How one layer's block is arranged, for the fingerprint: equal texts mean interchangeable bytes.

    Dimensions by falling stride, as `runs` puts them into a slot; the strides themselves may grow with
    the number of blocks, which engines that share need not have in common.
    """
    dim = block_dimension(tensor.shape, num_blocks)
    sizes = [
        (s, i, n) for i, (n, s) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if i != dim and n > 1
    ]
    return f"{name}:{tensor.dtype}:{[(i, n) for _, i, n in sorted(sizes, reverse=True)]}"
