"""Nothing outside the registered memory and L1 can be named."""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest
from support.descriptors import descriptors_of
from support.memory import awkward, two_groups
from support.slots import slot_of
from support.worker import packed

from kvserver._native import (
    NO_BLOCK,
    BlockIds,
    CpuDevice,
    Direction,
    FileMapping,
    HostRegion,
    Mapping,
    Outcome,
    PlaneTable,
    WordMapping,
)

from .rig import L0, Device, Job, flat

TOP = (1 << 64) - 1


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def mapped(device: Device) -> Mapping:
    """A page of an engine's memory."""
    mapping = L0(device, flat(1, 4096)).mappings[0]
    assert mapping.mapped
    return mapping


FITS = [
    ((0, 0, 512, 512), 8),
    ((0, 512, 512, 512), 7),
    ((0, 4095, 0, 1), 1),
    ((0, 0, 0, 4096), 1),
    ((0, 0, TOP, 4096), 1),
    ((0, 3, 511, 511), 8),
]
LEAVES = [
    ((0, 1, 512, 512), 8),
    ((0, 0, 512, 513), 8),
    ((0, 0, 513, 512), 9),
    ((0, 4096, 0, 1), 1),
    ((0, 0, 0, 4097), 1),
    ((0, 0, 1 << 63, 512), 3),  # stride * 2 is 2^64
    ((0, TOP, 512, 512), 2),  # offset + run wraps
    ((0, TOP - 511, 512, 512), 1),  # exactly 2^64
    ((0, 0, TOP, 1), 2),
    ((0, 1, TOP, 1), 2),  # offset + stride wraps to 0
    ((0, 0, 512, TOP), 1),
    ((0, 512, 512, TOP - 511), 1),
    ((0, 0, 1, 1), TOP),
    ((0, 0, 1 << 32, 1), (1 << 32) + 1),  # (blocks - 1) * stride is 2^64
    ((1, 0, 512, 512), 1),
    ((TOP, 0, 512, 512), 1),
    ((0, 0, 512, 0), 1),
    ((0, 0, 256, 512), 8),  # blocks that overlap
    ((0, 0, 0, 512), 2),
    ((0, 0, 512, 512), 0),
]


@pytest.mark.parametrize(("row", "blocks"), FITS)
def test_a_plane_within_its_memory_is_taken(mapped: Mapping, row: Any, blocks: int) -> None:
    table = PlaneTable([mapped], [(*row, 0)], blocks)
    assert (table.num_blocks, table.block_bytes) == (blocks, row[3])


@pytest.mark.parametrize(("row", "blocks"), LEAVES)
def test_a_plane_that_leaves_its_memory_is_refused(mapped: Mapping, row: Any, blocks: int) -> None:
    with pytest.raises(ValueError, match="plane"):
        PlaneTable([mapped], [(*row, 0)], blocks)


def test_the_plane_that_is_wrong_is_named_with_its_numbers(mapped: Mapping) -> None:
    with pytest.raises(ValueError, match=r"plane 1 ends outside its memory of 4096 bytes .*offset 8, stride 512"):
        PlaneTable([mapped], [(0, 0, 512, 512, 0), (0, 8, 512, 512, 0)], 8)


def test_planes_need_memory_that_is_mapped() -> None:
    with pytest.raises(ValueError, match="not mapped"):
        PlaneTable([FileMapping(os.memfd_create("m"), 4096)], [(0, 0, 64, 64, 0)], 1)


def test_a_table_needs_planes(mapped: Mapping) -> None:
    with pytest.raises(ValueError, match="at least one plane"):
        PlaneTable([mapped], [], 1)


@pytest.mark.parametrize("groups", [[1], [0, 2], [0, 63], [3, 1, 0]])
def test_a_group_without_a_plane_is_refused(mapped: Mapping, groups: list[int]) -> None:
    with pytest.raises(ValueError, match="no plane is of group"):
        PlaneTable([mapped], [(0, 0, 64, 64, group) for group in groups], 8)


@pytest.mark.parametrize("group", [64, TOP])
def test_a_group_beyond_the_bound_is_refused(mapped: Mapping, group: int) -> None:
    with pytest.raises(ValueError, match="plane 0 is of group"):
        PlaneTable([mapped], [(0, 0, 64, 64, group)], 8)


def test_a_table_counts_its_groups(mapped: Mapping) -> None:
    table = PlaneTable([mapped], [(0, 0, 64, 64, group) for group in (1, 0, 2, 1)], 8)
    assert (table.groups, table.block_bytes) == (3, 256)


BAD_JOBS = {
    "no blocks": Job([], [0], 1, 1),
    "no pages": Job([1], [], 1, 1),
    "no slot size": Job([1], [0], 1, 0),
    "no pages in a slot": Job([1], [0], 0, 1),
    "a block too many for the slots": Job([1, 2, 3], [0, 1], 1, 1),
    "a skip that leaves too few": Job([1], [0], 1, 1, skip=1),
    "a skip that wraps": Job([1, 2], [0, 1], 1, 1, skip=(1 << 32) - 1),
    "a slot with too few pages": Job([1], [0], 1, 65),
    "pages that make no whole slot": Job([1, 2], [0, 1, 2], 2, 1),
    "a block out of range": Job([8], [0], 1, 1),
    "the largest block": Job([(1 << 32) - 1], [0], 1, 1),
    "a page out of range": Job([1], [64], 1, 1),
    "the largest page": Job([1], [(1 << 32) - 1], 1, 1),
}


@pytest.mark.parametrize("job", BAD_JOBS.values(), ids=BAD_JOBS)
@pytest.mark.parametrize("direction", [Direction.STORE, Direction.LOAD])
def test_a_copy_outside_its_bounds_is_refused(device: Device, direction: Direction, job: Job) -> None:
    l0 = L0(device, flat(8, 64))
    with pytest.raises(ValueError, match=r"copy job|slot|block|page"):
        device.submit(direction, l0, job)
    assert device.drain() == []


BAD_GROUP_JOBS = {
    "a position of one group only": (Direction.LOAD, [(1, 2), (3,)]),
    "a position too many": (Direction.LOAD, [(1, 2), (3, 4), (5, 6)]),
    "a hole in a store": (Direction.STORE, [(1, NO_BLOCK)]),
    "a block out of range beside a hole": (Direction.LOAD, [(NO_BLOCK, 8)]),
}


@pytest.mark.parametrize(("direction", "blocks"), BAD_GROUP_JOBS.values(), ids=BAD_GROUP_JOBS)
def test_a_copy_of_groups_outside_its_bounds_is_refused(device: Device, direction: Direction, blocks: Any) -> None:
    l0 = L0(device, two_groups(num_blocks=8))
    with pytest.raises(ValueError, match=r"copy job|block"):
        device.submit(direction, l0, Job(blocks, range(6), 3, 1))


def test_a_hole_where_there_is_one_group_is_refused(device: Device) -> None:
    l0 = L0(device, flat(8, 64))
    with pytest.raises(ValueError, match="block id"):
        device.submit(Direction.LOAD, l0, Job([NO_BLOCK], [0], 1, 1))


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 0), (0, 65), (63, 2), (64, 1), (1, (1 << 32) - 1), ((1 << 32) - 1, 1), ((1 << 32) - 1, (1 << 32) - 1)],
)
def test_an_extent_that_leaves_l1_is_refused(device: Device, first: int, count: int) -> None:
    l0 = L0(device, flat(8, 64))
    arguments = {
        **Job([1], [0], 1, 1).arguments(Direction.STORE, l0.table),
        "extents": struct.pack("=II", first, count),
    }
    with pytest.raises(ValueError, match="do not lie in L1"):
        device.native.submit_copy(1, **arguments)


@pytest.mark.parametrize("length", [4, 5, 12])
def test_a_part_of_an_extent_is_refused(device: Device, length: int) -> None:
    l0 = L0(device, flat(8, 64))
    arguments = {**Job([1], [0], 1, 1).arguments(Direction.STORE, l0.table), "extents": slot_of([0, 2])[:length]}
    with pytest.raises(ValueError, match="pairs"):
        device.native.submit_copy(1, **arguments)


def test_slots_whose_size_wraps_around_are_refused(device: Device) -> None:
    """128 planes of 2^45 bytes are 2^52 to a block; 2^12 of those are 2^64, which is 0 to a 64-bit product."""
    fd = os.memfd_create("vast")
    os.ftruncate(fd, 1 << 45)
    vast = FileMapping(os.dup(fd), 1 << 45)
    try:
        words = L0(device, flat(1, 64)).words
        assert device.map([vast, WordMapping(os.dup(words.fd), 64)]).outcome == Outcome.DONE
        table = PlaneTable([vast], [(0, 0, 0, 1 << 45, 0)] * 128, 1)
        with pytest.raises(ValueError, match="too few pages"):
            device.native.submit_copy(
                1, BlockIds(table, Direction.STORE, packed([0]), 1, 1, NO_BLOCK), slot_of([0]), 1, 1 << 12
            )
    finally:
        os.close(fd)
        device.unmap([vast])


@pytest.mark.parametrize(("page_bytes", "threads"), [(0, 1), (4096, 0), (TOP, 1), (8192, 1)])
def test_a_copier_that_could_not_work_is_refused(page_bytes: int, threads: int) -> None:
    with pytest.raises(ValueError, match=r"thread|page"):
        CpuDevice(HostRegion(4096), page_bytes, threads)


@pytest.mark.parametrize("size", [0, 1 << 62])
def test_l1_that_cannot_be_allocated_is_refused(size: int) -> None:
    with pytest.raises(RuntimeError, match="L1"):
        HostRegion(size)


class TestMapping:
    def test_memory_shorter_than_its_registration_states_is_refused(self, device: Device) -> None:
        words = L0(device, flat(1, 64)).words
        short = os.memfd_create("short")
        os.ftruncate(short, 4095)
        first, last = FileMapping(short, 4096), WordMapping(os.dup(words.fd), 64)
        end = device.map([first, last])
        assert end.outcome == Outcome.FAILED
        assert "4095" in end.what
        assert "4096" in end.what
        assert not first.mapped
        assert not last.mapped

    def test_a_word_page_that_may_shrink_is_refused(self, device: Device) -> None:
        fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096)
        end = device.map([WordMapping(fd, 4096)])
        assert end.outcome == Outcome.FAILED
        assert "F_SEAL_SHRINK" in end.what

    def test_a_word_page_in_a_file_is_refused(self, device: Device, tmp_path: Any) -> None:
        path = tmp_path / "page"
        path.write_bytes(bytes(4096))
        end = device.map([WordMapping(os.open(path, os.O_RDWR), 4096)])
        assert end.outcome == Outcome.FAILED

    @pytest.mark.parametrize("kind", ["pipe", "directory", "read-only"])
    def test_descriptor_of_no_memory_is_refused(self, device: Device, kind: str, tmp_path: Any) -> None:
        words = L0(device, flat(1, 64)).words
        if kind == "pipe":
            fd, other = os.pipe()
            os.close(other)
        elif kind == "directory":
            fd = os.open(tmp_path, os.O_RDONLY)
        else:
            (tmp_path / "file").write_bytes(bytes(16))
            fd = os.open(tmp_path / "file", os.O_RDONLY)
        end = device.map([FileMapping(fd, 16), WordMapping(os.dup(words.fd), 64)])
        assert end.outcome == Outcome.FAILED
        assert end.what

    def test_memory_of_an_impossible_size_is_refused(self, device: Device) -> None:
        for size in (0, 1 << 62, TOP):
            assert device.map([FileMapping(os.memfd_create("m"), size)]).outcome == Outcome.FAILED

    def test_unmapping_closes_the_descriptors_and_may_be_repeated(self, device: Device) -> None:
        l0 = L0(device, awkward())
        shared = (*l0.memory.fds, l0.words.fd)
        held = descriptors_of(*shared)
        for _ in range(2):
            assert device.unmap(l0.mappings).outcome == Outcome.DONE
            assert not any(mapping.mapped for mapping in l0.mappings)
        assert descriptors_of(*shared) == held - len(l0.mappings)

    def test_memory_is_intact_until_it_is_shortened(self, device: Device) -> None:
        l0 = L0(device, flat(4, 4096))
        assert l0.mappings[0].intact()
        l0.memory.truncate(size=4 * 4096 - 1)
        assert not l0.mappings[0].intact()
