"""The copies of a GPU device, each way forced, L1 pinned and not: every layout, element size, skip and pattern of ids,
byte for byte; one copy after the other, and several at once.

The same cases as `tests/native/kernel_matrix.cpp` has for the kernels' addresses alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from native.rig import L0, Device, Job, l0_after_load, l1_after_store
from support.gpu_memory import by_fd, open_gpu
from support.memory import Geometry
from support.simulators import FakeGpu

from kvserver._native import NO_BLOCK, Direction, GpuDevice, Outcome, Way

from .layouts import boundary_runs, engine_layouts, of_runs

BLOCKS, PAGE = 11, 4093  # of one group; an odd page: slots are cut anywhere
ID_LISTS = [[5], [2, 3, 4, 5], [7, 1, 10, 4], [9, 8, 7, 6]]
SEED = 1


@pytest.fixture(params=["pinned", "unpinned"])
def pinned(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "pinned")


@pytest.fixture(params=[Way.DMA, Way.STAGED], ids=["dma", "staged"])
def device(request: pytest.FixtureRequest, pinned: bool) -> Iterator[Device]:
    """As it is used, but for the way: no copy of it may go another one, or to L1 that is not what the test chose."""
    gpu = open_gpu()
    made = Device(300, PAGE, gpu=gpu, way=request.param, batch_bytes=1 << 20, pinned=pinned, allocate=by_fd)
    yield made
    if isinstance(gpu, FakeGpu):
        assert gpu.faults == []
    assert isinstance(made.native, GpuDevice)
    for direction in (Direction.STORE, Direction.LOAD):
        dma, staged, unpinned, _ = made.native.counts(direction)
        moved, other = (staged, dma) if request.param == Way.STAGED else (dma, staged)
        assert moved > other == 0
        assert (unpinned == 0) == pinned


def both_directions(device: Device, l0: L0, blocks: list[object], skip: int = 0, per_slot: int = 4) -> None:
    """Store to random pages and load to the same blocks: AssertionError unless L1 and L0 are as the reference has them."""
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
    return [tuple(block + group * BLOCKS for group in range(geometry.groups)) for block in ids]


@pytest.mark.parametrize("element_bytes", [2, 1])
@pytest.mark.parametrize("name", engine_layouts(1, 1))
def test_a_layout_is_copied_byte_for_byte(device: Device, name: str, element_bytes: int) -> None:
    geometry = engine_layouts(2 * BLOCKS, element_bytes)[name].geometry()
    l0 = L0(device, geometry)
    for ids in ID_LISTS:
        for skip in (0, 1, 3):
            both_directions(device, l0, grouped(ids, geometry), skip)


STORED, LOADED = [[5], [2, 3], [7, 1, 10]], [[9, 8], [6], [0, 4]]


@pytest.mark.parametrize("name", engine_layouts(1, 1))
def test_copies_of_both_directions_that_are_queued_at_once_keep_every_byte(device: Device, name: str) -> None:
    """Nothing waits between the submissions, and a simulated GPU moves nothing before the last one."""
    geometry = engine_layouts(2 * BLOCKS, 2)[name].geometry()
    l0 = L0(device, geometry)
    pages_per_block = -(-geometry.block_bytes // PAGE)
    free = iter(random.Random(SEED).sample(range(device.pages), BLOCKS * pages_per_block))

    def job(blocks: list[int]) -> Job:
        pages = [next(free) for _ in range(len(blocks) * pages_per_block)]
        return Job(grouped(blocks, geometry), pages, pages_per_block, 1)

    stores, loads = [job(blocks) for blocks in STORED], [job(blocks) for blocks in LOADED]
    l1 = device.fill_l1()
    expected_l1 = l1_after_store(l1, joined(stores), l0.memory, PAGE)
    expected_l0 = l0_after_load(l1, joined(loads), l0.memory, PAGE)
    if isinstance(device.gpu, FakeGpu):
        device.gpu.pause()
    tickets = [
        device.submit(direction, l0, each)
        for pair in zip(stores, loads, strict=True)
        for direction, each in zip((Direction.STORE, Direction.LOAD), pair, strict=True)
    ]
    if isinstance(device.gpu, FakeGpu):
        assert device.drain() == []
        device.gpu.resume()
    for ticket in tickets:  # each is reported by the descriptor
        end = device.wait(ticket)
        assert end.outcome == Outcome.DONE, end.what
    assert l0.memory.image() == expected_l0
    assert device.read_l1() == expected_l1


def joined(jobs: list[Job]) -> Job:
    """What they do together."""
    blocks = [block for job in jobs for block in job.blocks]
    pages = [page for job in jobs for page in job.pages]
    return Job(blocks, pages, jobs[0].pages_per_slot, jobs[0].blocks_per_slot)


@pytest.mark.parametrize("misaligned", [1, 3, 4, 8])
@pytest.mark.parametrize("name", ["per-layer [2, NB, ...]", "MLA", "pages padded by an odd count", "two groups"])
def test_memory_that_is_not_aligned_is_copied_byte_for_byte(device: Device, name: str, misaligned: int) -> None:
    geometry = engine_layouts(2 * BLOCKS, 1)[name].geometry(misaligned)
    both_directions(device, L0(device, geometry), grouped([3, 0, 1, 6], geometry))


def test_holes_of_a_group_are_left_alone(device: Device) -> None:
    l0 = L0(device, engine_layouts(2 * BLOCKS, 2)["two groups"].geometry())
    stored = [(1, 6), (2, 7), (3, 8), (4, 9)]
    both_directions(device, l0, list(stored))
    pages_per_slot = -(-4 * l0.geometry.block_bytes // PAGE)
    job = Job([(NO_BLOCK, 6), (2, NO_BLOCK), (10, 0)], range(pages_per_slot), pages_per_slot, 4, 1)
    l1 = device.fill_l1()
    expected = l0_after_load(l1, job, l0.memory, PAGE)
    assert device.load(l0, job).outcome == Outcome.DONE
    assert l0.memory.image() == expected


def test_runs_around_every_boundary_of_the_kernels_loops_are_copied_byte_for_byte(device: Device) -> None:
    """Many planes in one table: odd runs make every following plane begin at another alignment."""
    runs = boundary_runs()
    for part in (runs[0::3], runs[1::3], runs[2::3]):
        both_directions(device, L0(device, of_runs(part, 3).geometry()), [2, 0], per_slot=2)


def test_long_plane_among_short_ones_is_copied_byte_for_byte(device: Device) -> None:
    both_directions(device, L0(device, of_runs([256, 1 << 19, 256, 3, 2048, 2047, 1], 2).geometry()), [1], per_slot=1)
