"""Block ids from the wire: a copy can name nothing but different blocks of its planes."""

from __future__ import annotations

import os
import random
import time

import pytest
from support.memory import two_groups
from support.slots import slot_of
from support.worker import packed

from kvserver._native import NO_BLOCK, BlockIds, Direction, FileMapping, Outcome, PlaneTable

from .rig import L0, Device, Job, flat

STORE, LOAD = Direction.STORE, Direction.LOAD
BOTH = [STORE, LOAD]
of_both = pytest.mark.parametrize("direction", BOTH)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def table(device: Device) -> PlaneTable:
    """Blocks 0 to 9 of one group."""
    return L0(device, flat(10, 64)).table


@pytest.fixture
def pair(device: Device) -> PlaneTable:
    """Blocks 0 to 8 of two groups."""
    return L0(device, two_groups(num_blocks=9)).table


def refused(table: PlaneTable, direction: Direction, raw: bytes, least: int, most: int) -> str:
    with pytest.raises(ValueError, match="block") as caught:
        BlockIds(table, direction, raw, least, most)
    return str(caught.value)


@of_both
@pytest.mark.parametrize("count", [2, 3, 4])
def test_any_count_between_the_bounds_is_taken(table: PlaneTable, direction: Direction, count: int) -> None:
    ids = BlockIds(table, direction, packed(range(1, count + 1)), 2, 4)
    assert (ids.positions, ids.direction) == (count, direction)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_are_named_with_the_right_count(table: PlaneTable, count: int) -> None:
    message = refused(table, STORE, packed(range(1, count + 1)), 2, 4)
    assert f"{4 * count} bytes" in message
    assert "2 to 4 blocks" in message
    assert "3 blocks" in refused(table, STORE, packed(range(1, count + 1)), 3, 3)


@pytest.mark.parametrize("raw", [packed([1, 2, 3, 4, 5]), b"\2", b"\0\x82", b"\1\2\xff\xff\xff\xff\x7f"])
def test_block_ids_that_cannot_be_unpacked_are_refused_with_the_count(table: PlaneTable, raw: bytes) -> None:
    message = refused(table, STORE, raw, 2, 4)
    assert f"block_ids of {len(raw)} bytes cannot be unpacked: byte " in message
    assert "2 to 4 blocks belong" in message


@of_both
@pytest.mark.parametrize("wrong", [10, 11, NO_BLOCK - 1, NO_BLOCK])
def test_an_id_out_of_range_is_named_with_the_bound(table: PlaneTable, direction: Direction, wrong: int) -> None:
    message = refused(table, direction, packed([1, wrong, 2]), 3, 3)
    assert f"block id {wrong} is out of range" in message
    assert "registered 10 blocks" in message


@of_both
def test_an_id_named_twice_is_named_in_the_error(table: PlaneTable, direction: Direction) -> None:
    assert "block id 5 is named more than once" in refused(table, direction, packed([4, 5, 6, 5]), 4, 4)


def test_finding_the_repeated_id_of_very_many_does_not_take_long(device: Device) -> None:
    count = 1 << 17  # a search per id would take minutes, and the loop would stop meanwhile
    table = L0(device, flat(count + 1, 1)).table
    blocks = list(range(1, count + 1))
    random.Random(1).shuffle(blocks)
    blocks[-1] = blocks[-2]
    began = time.monotonic()
    assert f"block id {blocks[-1]} is named" in refused(table, STORE, packed(blocks), count, count)
    assert time.monotonic() - began < 60


@of_both
def test_the_null_block_is_neither_stored_nor_loaded(table: PlaneTable, direction: Direction) -> None:
    assert "block id 0 is the null block" in refused(table, direction, packed([3, 0, 2]), 3, 3)


def test_a_load_of_several_groups_may_leave_out_groups(pair: PlaneTable) -> None:
    assert BlockIds(pair, LOAD, packed([0, 3, 4, 0, 5, 6]), 3, 3).positions == 3


OF_TWO_GROUPS = {  # 1 to 2 positions
    "half a position": (BOTH, [1, 2, 3], "3 block ids are no whole positions of 2 groups"),
    "too few": (BOTH, [], "2 to 4 blocks"),
    "too many": (BOTH, [1, 2, 3, 4, 5, 6], "2 to 4 blocks"),
    "a position without any block": ([LOAD], [1, 2, 0, 0], "null block, id 0, in every group"),
    "a position of a store without a block of one group": ([STORE], [1, 2, 3, 0], "block id 0 is the null block"),
    "a block of both groups": (BOTH, [1, 2, 3, 1], "block id 1 is named more than once"),
    "a block named twice among null blocks": ([LOAD], [0, 3, 0, 3], "block id 3 is named more than once"),
    "out of range": (BOTH, [1, 2, 3, 9], "block id 9 is out of range"),
    "out of range beside a null block": ([LOAD], [0, 9], "block id 9 is out of range"),
}


@pytest.mark.parametrize(("directions", "blocks", "words"), OF_TWO_GROUPS.values(), ids=OF_TWO_GROUPS)
def test_ids_of_two_groups_are_refused(
    pair: PlaneTable, directions: list[Direction], blocks: list[int], words: str
) -> None:
    for direction in directions:
        assert words in refused(pair, direction, packed(blocks), 1, 2)


def test_the_id_that_means_no_block_is_never_a_block() -> None:
    """Of memory with more blocks than 32 bits can name."""
    device, size = Device(), 1 << 33
    fd = os.memfd_create("vast")
    os.ftruncate(fd, size)
    vast = FileMapping(fd, size)
    assert device.map([vast]).outcome == Outcome.DONE
    for groups in (1, 2):
        table = PlaneTable([vast], [(0, 0, 1, 1, group) for group in range(groups)], size)
        assert "out of range" in refused(table, LOAD, packed([NO_BLOCK] * groups), 1, 1)
    device.unmap([vast])


def test_only_the_named_chunks_are_copied(device: Device) -> None:
    l0 = L0(device, flat(10, 64))
    ids = BlockIds(l0.table, STORE, packed([1, 2, 3, 4, 5, 6]), 6, 6)
    device.fill_l1()
    ticket = device.next_ticket()
    device.native.submit_copy(ticket, ids, slot_of([7, 9]), 1, 2, chunks=[2, 0])
    assert device.wait(ticket).bytes == 4 * 64
    l1 = device.read_l1()
    for page, blocks in ((7, (5, 6)), (9, (1, 2))):
        assert l1[page * 4096 : page * 4096 + 128] == b"".join(map(l0.memory.read, blocks))


@pytest.mark.parametrize(("chunks", "per_slot"), [([3], 2), ([0, 1 << 63], 2), ([1], 4), ([0], 0), ([], 2)])
def test_chunks_that_are_not_there_are_refused(device: Device, chunks: list[int], per_slot: int) -> None:
    l0 = L0(device, flat(10, 64))
    ids = BlockIds(l0.table, STORE, packed([1, 2, 3, 4, 5, 6]), 6, 6)
    with pytest.raises(ValueError, match="copy job"):
        device.native.submit_copy(1, ids, slot_of([0, 1]), 1, per_slot, chunks=chunks)
    assert device.drain() == []


def test_a_copy_keeps_the_table_of_its_ids(device: Device) -> None:
    l0, job = L0(device, flat(10, 64)), Job([3], [0], 1, 1)
    ids = job.block_ids(STORE, l0.table)
    del l0.table
    ticket = device.next_ticket()
    device.native.submit_copy(ticket, ids, slot_of([0]), 1, 1)
    assert device.wait(ticket).outcome == Outcome.DONE
