"""The copies of a GPU device, each way forced: every layout, element size, skip and pattern of ids, byte for byte.

The same cases as `tests/native/kernel_matrix.cpp` has for the kernels' addresses alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from native.rig import L0, Device, Job, l0_after_load, l1_after_store
from support.gpu_memory import by_fd, open_gpu
from support.worker import Geometry

from kvserver._native import NO_BLOCK, FakeGpu, Outcome, Way

from .layouts import boundary_runs, engine_layouts, of_runs

BLOCKS, PAGE = 11, 4093  # an odd page: slots are cut anywhere
ID_LISTS = [[5], [2, 3, 4, 5], [7, 1, 10, 4], [9, 8, 7, 6]]
SEED = 1


@pytest.fixture(params=[Way.DMA, Way.STAGED], ids=["dma", "staged"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    gpu = open_gpu()
    made = Device(300, PAGE, gpu=gpu, way=request.param, batch_bytes=1 << 20, allocate=by_fd)
    yield made
    if isinstance(gpu, FakeGpu):
        assert gpu.faults == []


def both_directions(device: Device, l0: L0, blocks: list[object], skip: int = 0, per_slot: int = 4) -> None:
    """Store to random pages and load to the same blocks: AssertionError unless L1 and L0 are as the reference says."""
    size = l0.geometry.block_bytes
    slots = -(-(skip + len(blocks)) // per_slot)
    pages_per_slot = -(-per_slot * size // PAGE)
    pages = random.Random(SEED).sample(range(device.pages), slots * pages_per_slot)
    job = Job(blocks, pages, pages_per_slot, per_slot, skip)
    l1 = device.fill_l1()
    end = device.store(l0, job)
    assert end.outcome == Outcome.DONE, end.what
    after = device.read_l1()
    assert after == l1_after_store(l1, job, l0.memory, PAGE)
    l0.memory.fill()
    expected = l0_after_load(after, job, l0.memory, PAGE)
    end = device.load(l0, job)
    assert end.outcome == Outcome.DONE, end.what
    assert l0.memory.image() == expected


def grouped(ids: list[int], geometry: Geometry) -> list[object]:
    if geometry.groups == 1:
        return list(ids)
    return [tuple((block + group * 5) % BLOCKS for group in range(geometry.groups)) for block in ids]


@pytest.mark.parametrize("element_bytes", [2, 1])
@pytest.mark.parametrize("name", engine_layouts(1, 1))
def test_a_layout_is_copied_byte_for_byte(device: Device, name: str, element_bytes: int) -> None:
    geometry = engine_layouts(BLOCKS, element_bytes)[name].geometry()
    l0 = L0(device, geometry)
    for ids in ID_LISTS:
        for skip in (0, 1, 3):
            both_directions(device, l0, grouped(ids, geometry), skip)


@pytest.mark.parametrize("misaligned", [1, 3, 4, 8])
@pytest.mark.parametrize("name", ["per-layer [2, NB, ...]", "MLA", "pages padded by an odd count", "two groups"])
def test_memory_that_is_not_aligned_is_copied_byte_for_byte(device: Device, name: str, misaligned: int) -> None:
    geometry = engine_layouts(BLOCKS, 1)[name].geometry(misaligned)
    both_directions(device, L0(device, geometry), grouped([3, 0, 1, 6], geometry))


def test_holes_of_a_group_are_left_alone(device: Device) -> None:
    l0 = L0(device, engine_layouts(BLOCKS, 2)["two groups"].geometry())
    stored = [(1, 6), (2, 7), (3, 8), (4, 9)]
    both_directions(device, l0, list(stored))
    pages_per_slot = -(-4 * l0.geometry.block_bytes // PAGE)
    job = Job([(NO_BLOCK, 6), (2, NO_BLOCK), (10, 0)], range(pages_per_slot), pages_per_slot, 4, 1)
    l1 = device.fill_l1()
    expected = l0_after_load(l1, job, l0.memory, PAGE)
    assert device.load(l0, job).outcome == Outcome.DONE
    assert l0.memory.image() == expected


def test_runs_around_every_boundary_of_the_kernels_loops(device: Device) -> None:
    """Many planes in one table: odd runs make every following plane begin at another alignment."""
    runs = boundary_runs()
    for part in (runs[0::3], runs[1::3], runs[2::3]):
        both_directions(device, L0(device, of_runs(part, 3).geometry()), [2, 0], per_slot=2)


def test_a_long_plane_among_short_ones(device: Device) -> None:
    both_directions(device, L0(device, of_runs([256, 1 << 19, 256, 3, 2048, 2047, 1], 2).geometry()), [1], per_slot=1)
