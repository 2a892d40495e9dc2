"""Which pieces a copy by DMA is cut into (`csrc/gpu/pieces.h`, `csrc/copy/plane_series.h`): how few, and that the bytes are the same.

The bytes of every layout are also compared with a reference in tests/gpu; here the CPU device is the other side.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest
from gpu.layouts import engine_layouts
from support.memory import Geometry, awkward, two_groups
from support.simulators import FakeGpu

from kvserver._native import (
    NO_BLOCK,
    PIN_BYTES,
    Direction,
    GpuDevice,
    GpuMapping,
    Mapping,
    Outcome,
    PlaneTable,
    Way,
    dma_pieces,
)
from kvserver.protocol import Plane

from .rig import L0, Device, Job, flat

STORE, LOAD = Direction.STORE, Direction.LOAD
KiB, GiB = 1 << 10, 1 << 30
BLOCKS, PAGE = 24, 4093  # an odd page: slots are cut anywhere


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    gpu = FakeGpu("GPU-0")
    yield gpu
    assert gpu.faults == []


def layered(blocks: int, layers: int, run: int, gap: int = 0) -> Geometry:
    """One memory; each layer's blocks lie together, `gap` bytes before the next one's."""
    step = blocks * run + gap
    return Geometry(blocks, 16, (layers * step,), tuple(Plane(0, n * step, run, run) for n in range(layers)))


def pieces(device: Device, l0: L0, job: Job, direction: Direction = STORE) -> list[tuple[int, int]]:
    """(bytes of a row, rows) of each."""
    found = dma_pieces(device.region, device.page_bytes, **job.arguments(direction, l0.table))
    return [piece[2:4] for piece in found]


class TestHowFew:
    def test_planes_equally_spaced_are_one_piece_a_block(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu)
        for geometry in (layered(9, 8, 512), layered(9, 8, 512, gap=512)):
            scattered = Job([7, 2, 4], range(3), 1, 1)
            assert pieces(device, L0(device, geometry), scattered) == [(512, 8)] * 3

    def test_blocks_that_follow_each_other_are_one_piece_a_plane_where_that_is_fewer(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu)
        l0 = L0(device, layered(20, 8, 512))
        assert pieces(device, l0, Job(range(1, 17), range(16), 16, 16)) == [(512, 16)] * 8
        assert pieces(device, l0, Job(range(1, 6), range(5), 5, 5)) == [(512, 8)] * 5

    def test_one_plane_without_gaps_is_one_piece_for_all_neighbours(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu)
        l0 = L0(device, flat(65, 4 * KiB))
        assert pieces(device, l0, Job(range(1, 65), range(64), 1, 1)) == [(256 * KiB, 1)]
        assert pieces(device, l0, Job(range(64, 0, -1), range(64), 1, 1)) == [(4 * KiB, 1)] * 64

    def test_planes_that_touch_are_one_run(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu)
        within = tuple(Plane(0, n * 100, 800, 100 if n < 7 else 60) for n in range(8))
        l0 = L0(device, Geometry(9, 16, (9 * 800,), within))
        assert pieces(device, l0, Job([4, 2], [0, 1], 1, 1)) == [(760, 1)] * 2

    def test_an_indexers_planes_between_those_of_the_layers_are_a_series_of_their_own(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu)
        l0 = L0(device, engine_layouts(9, 1)["fp8 MLA with an indexer"].geometry())
        assert sorted(pieces(device, l0, Job([4, 2], range(20), 10, 1))) == [(132 * 16, 3)] * 2 + [(656 * 16, 3)] * 2

    def test_groups_that_take_turns_in_the_slot_have_a_series_of_their_own_each(self, gpu: FakeGpu) -> None:
        """K and V of group 0, then those of group 1, layer by layer in one memory."""
        device = Device(64, gpu=gpu)
        step = 9 * 512
        planes = tuple(
            Plane(0, (2 * layer + kv) * step, 512, 512, group)
            for layer in range(6) for group in range(2) for kv in range(2)
        )  # fmt: skip
        l0 = L0(device, Geometry(9, 16, (12 * step,), planes))
        assert pieces(device, l0, Job([(4, 5), (2, 7)], range(6), 3, 1)) == [(512, 6)] * 8

    def test_a_gap_behind_each_layer_leaves_a_series_of_ks_and_one_of_vs(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu)
        step = 9 * 512
        planes = tuple(Plane(0, layer * 3 * step + kv * step, 512, 512) for layer in range(6) for kv in range(2))
        l0 = L0(device, Geometry(9, 16, (18 * step,), planes))
        assert pieces(device, l0, Job([4, 2], range(4), 2, 1)) == [(512, 6)] * 4

    def test_planes_in_two_memories_are_never_one_piece(self, gpu: FakeGpu) -> None:
        """They may lie equally spaced by chance; a copy must not span two allocations."""
        device = Device(64, gpu=gpu)
        size = 9 * 512
        l0 = L0(device, Geometry(9, 16, (size,) * 4, tuple(Plane(n, 0, 512, 512) for n in range(4))))
        assert pieces(device, l0, Job([7, 2], [0, 1], 1, 1)) == [(512, 1)] * 8

    def test_windows_of_one_allocation_may_be_one_piece(self, gpu: FakeGpu) -> None:
        """As torch's tensors may share a segment: each registered by itself, by one handle and an offset."""
        device = Device(64, gpu=gpu)
        fd = os.memfd_create("segment")
        os.ftruncate(fd, 4 * 9 * 512)
        handle = f"/proc/self/fd/{fd}".encode().ljust(64, b"\0")
        windows: list[Mapping] = [GpuMapping.by_ipc(gpu, handle, n * 9 * 512, 9 * 512) for n in range(4)]
        assert device.map(windows).outcome == Outcome.DONE
        table = PlaneTable(windows, [(n, 0, 512, 512, 0) for n in range(4)], 9)
        found = dma_pieces(device.region, 4096, **Job([7, 2], [0, 1], 1, 1).arguments(LOAD, table))
        assert [piece[2:4] for piece in found] == [(512, 4)] * 2

    @pytest.mark.parametrize(("step", "expected"), [(2 * GiB - 1, [(512, 2)]), (2 * GiB, [(512, 1)] * 2)])
    def test_a_pitch_is_less_than_two_gib(self, gpu: FakeGpu, step: int, expected: list[tuple[int, int]]) -> None:
        device = Device(64, gpu=gpu)
        fd = os.memfd_create("sparse")
        os.ftruncate(fd, 3 * GiB)
        memory = GpuMapping.by_fd(gpu, fd, 0, 3 * GiB)
        assert device.map([memory]).outcome == Outcome.DONE
        table = PlaneTable([memory], [(0, n * step, 512, 512, 0) for n in range(2)], 9)
        found = dma_pieces(device.region, 4096, **Job([7], [0], 1, 1).arguments(LOAD, table))
        assert [piece[2:4] for piece in found] == expected

    def test_a_block_cut_by_the_end_of_an_extent_keeps_its_whole_rows_together(self, gpu: FakeGpu) -> None:
        device = Device(64, page_bytes=1 * KiB, gpu=gpu)
        l0 = L0(device, layered(9, 8, 400))
        assert pieces(device, l0, Job([7], [9, 5, 6, 7], 4, 1)) == [(400, 2), (224, 1), (176, 1), (400, 5)]

    def test_no_piece_spans_two_registrations(self, gpu: FakeGpu) -> None:
        pages = PIN_BYTES // 4096 + 8
        device = Device(pages, gpu=gpu)
        l0 = L0(device, layered(20, 8, 800))
        across = Job(range(1, 9), range(pages - 16, pages), 16, 8)
        found = dma_pieces(device.region, 4096, **across.arguments(STORE, l0.table))
        assert sum(row * rows for _, _, row, rows, _, _ in found) == 8 * 8 * 800
        assert [piece[2:4] for piece in found].count((800, 8)) == 7
        assert [piece[2:4] for piece in found if piece[3] < 8] == [(768, 1), (32, 1), (800, 7)], "cut in its first row"


class TestBytes:
    """As the CPU device moves them: the same jobs on both, whose L1 begins with zeros."""

    LAYOUTS: ClassVar = {
        **{name: layout.geometry() for name, layout in engine_layouts(BLOCKS, 2).items()},
        "awkward": awkward(BLOCKS),
        "awkward groups": two_groups(num_blocks=BLOCKS),
    }
    IDS: ClassVar = [[5], [2, 3, 4, 5, 6, 7], [7, 1, 10, 4, 3], [8, 7, 6, 1, 2, 3, 11]]

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_a_layout_is_copied_as_the_cpu_copies_it(self, gpu: FakeGpu, name: str) -> None:
        geometry = self.LAYOUTS[name]
        ours, cpu = Device(400, PAGE, gpu=gpu, way=Way.DMA, batch_bytes=1 << 20, pinned=True), Device(400, PAGE)
        theirs, mine = L0(cpu, geometry), L0(ours, geometry)
        for seed, numbers in enumerate(self.IDS):
            for skip in (0, 3):
                job = self.job(geometry, numbers, skip, seed)
                self.same(ours, mine, cpu, theirs, job, STORE)
                self.same(ours, mine, cpu, theirs, job, LOAD)
        assert isinstance(ours.native, GpuDevice)
        assert ours.native.counts(STORE)[2] == 0, "all of it was pinned"

    def job(self, geometry: Geometry, numbers: list[int], skip: int, seed: int) -> Job:
        """Some in neighbouring pages, some not; of groups a load leaves holes."""
        rng = random.Random(seed)
        slots = -(-(skip + len(numbers)) // 4)
        pages_per_slot = -(-4 * geometry.block_bytes // PAGE)
        count = slots * pages_per_slot
        pages = list(range(count)) if seed % 2 else rng.sample(range(400), count)
        if geometry.groups == 1:
            return Job(numbers, pages, pages_per_slot, 4, skip)
        blocks = [tuple(n + g * BLOCKS // 2 for g in range(geometry.groups)) for n in numbers]
        return Job(blocks, pages, pages_per_slot, 4, skip)

    def same(self, ours: Device, mine: L0, cpu: Device, theirs: L0, job: Job, direction: Direction) -> None:
        theirs.memory.fill()
        for view, other in zip(mine.memory.maps, theirs.memory.maps, strict=True):
            view[:] = other[:]
        if direction == LOAD and mine.geometry.groups > 1:
            holed = [(NO_BLOCK, *block[1:]) if n % 2 else block for n, block in enumerate(job.blocks)]
            job = replace(job, blocks=holed)
        ends = [device.wait(device.submit(direction, l0, job)) for device, l0 in ((ours, mine), (cpu, theirs))]
        assert [end.outcome for end in ends] == [Outcome.DONE] * 2
        assert ends[0].bytes == ends[1].bytes > 0
        assert ours.read_l1() == cpu.read_l1()
        assert mine.memory.image() == theirs.memory.image()
