"""Bytes move between planes and pages exactly as the contract states, and no other byte changes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import Geometry, Memory, awkward
from support.properties import Dice, examples, walks

from kvserver._native import NO_BLOCK, Direction, Outcome
from kvserver.protocol import Plane

from .rig import L0, Device, Job, flat, l0_after_load, l1_after_store

DEVICE_PAGES = 61


def random_geometry(rng: random.Random, page_bytes: int) -> Geometry:
    """Up to three memories with up to six planes each: any run, stride, gap and alignment."""
    num_blocks = rng.randint(1, 24)
    sizes, planes = [], []
    for memory in range(rng.randint(1, 3)):
        end = rng.randint(0, 9)
        for _ in range(rng.randint(1, 6)):
            run = rng.choice([1, 3, 8, 17, 64, page_bytes - 1, page_bytes, page_bytes + 1, rng.randint(1, 300)])
            stride = run + rng.choice([0, 0, 1, 5, 64])
            planes.append(Plane(memory, end, stride, run))
            end += num_blocks * stride + rng.choice([0, 0, 1, 13])
        sizes.append(end + rng.randint(0, 5))
    rng.shuffle(planes)
    return Geometry(num_blocks, 16, tuple(sizes), tuple(planes))


def scattered(rng: random.Random, pages: int, count: int) -> list[int]:
    """`count` pages in runs of any length: single ones, neighbours, whole extents that hold several slots."""
    longest = rng.choice([1, 4, pages])
    runs, page = [], 0
    while page < pages:
        length = rng.randint(1, longest)
        runs.append(range(page, min(page + length, pages)))
        page += length
    rng.shuffle(runs)
    return [page for run in runs for page in run][:count]


def random_job(rng: random.Random, device: Device, geometry: Geometry) -> Job | None:
    """Some blocks into some slots; None if L1 cannot hold even one slot."""
    blocks_per_slot = rng.randint(1, 5)
    pages_per_slot = -(-blocks_per_slot * geometry.block_bytes // device.page_bytes) + rng.choice([0, 0, 1])
    most = min(device.pages // pages_per_slot, -(-geometry.num_blocks // blocks_per_slot))
    if most == 0:
        return None
    slots = rng.randint(1, most)
    pages = scattered(rng, device.pages, slots * pages_per_slot)
    room = slots * blocks_per_slot
    skip = rng.choice([0, rng.randrange(room)])
    count = rng.randint(1, min(room - skip, geometry.num_blocks))
    if rng.random() < 0.5:
        count = min(room - skip, geometry.num_blocks)
    return Job(rng.sample(range(geometry.num_blocks), count), pages, pages_per_slot, blocks_per_slot, skip)


@given(page_bytes=st.sampled_from([16, 64, 100, 509, 4096]), threads=st.integers(1, 4), steps=walks(10))
@examples(30)
def test_stores_and_loads_of_any_geometry_move_these_bytes_and_no_others(
    page_bytes: int, threads: int, steps: list[Dice]
) -> None:
    device = Device(DEVICE_PAGES, page_bytes, threads=threads)
    l1 = device.fill_l1()
    for rng in steps:
        l0 = L0(device, random_geometry(rng, page_bytes))
        job = random_job(rng, device, l0.geometry)
        if job is None:
            continue
        moved = len(job.blocks) * l0.geometry.block_bytes
        image, expected = l0.memory.image(), l1_after_store(l1, job, l0.memory, page_bytes)
        end = device.store(l0, job)
        assert (end.outcome, end.bytes) == (Outcome.DONE, moved)
        l1 = device.read_l1()
        assert l1 == expected
        assert l0.memory.image() == image

        l0.memory.fill()
        again = random_job(rng, device, l0.geometry) or job
        wanted = l0_after_load(l1, again, l0.memory, page_bytes)
        assert device.load(l0, again).outcome == Outcome.DONE
        assert l0.memory.image() == wanted
        assert device.read_l1() == l1
        device.unmap(l0.mappings)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("direction", [Direction.STORE, Direction.LOAD])
def test_many_threads_share_one_job_and_lose_no_block(direction: Direction, threads: int) -> None:
    device = Device(pages=5120, threads=threads)  # 20 MiB: twenty batches
    l0 = L0(device, awkward(num_blocks=2000, scale=4))
    pages = -(-l0.geometry.block_bytes // 4096)
    blocks = random.Random(1).sample(range(2000), 5120 // pages)
    job = Job(blocks, range(len(blocks) * pages), pages, 1)
    l1 = device.fill_l1()
    wanted = l0_after_load(l1, job, l0.memory, 4096)
    expected = l1_after_store(l1, job, l0.memory, 4096)
    end = device.wait(device.submit(direction, l0, job))
    assert (end.outcome, end.bytes) == (Outcome.DONE, len(blocks) * l0.geometry.block_bytes)
    assert end.nanos > 0
    if direction == Direction.STORE:
        assert device.read_l1() == expected
    else:
        assert l0.memory.image() == wanted


def test_what_one_geometry_stored_comes_back_in_another_memory() -> None:
    device = Device(pages=64)
    one, other = L0(device, awkward()), L0(device, awkward())
    there = Job(range(1, 13), [59 - i for i in range(20)], 5, 3)
    back = Job(range(40, 52), there.pages, 5, 3)
    content = one.memory.blocks(there.blocks)
    wanted = other.memory.image_with(dict(zip(back.blocks, content, strict=True)))
    assert device.store(one, there).outcome == Outcome.DONE
    assert device.load(other, back).outcome == Outcome.DONE
    assert other.memory.image() == wanted


@pytest.mark.parametrize("skip", range(4))
def test_a_skip_leaves_the_first_blocks_untouched(skip: int) -> None:
    device = Device(pages=64)
    l0 = L0(device, awkward())
    whole = Job(range(1, 9), range(14), 7, 4)
    content = l0.memory.blocks(whole.blocks)
    assert device.store(l0, whole).outcome == Outcome.DONE
    l0.memory.fill()
    part = Job(range(20 + skip, 28), whole.pages, 7, 4, skip=skip)
    wanted = l0.memory.image_with(dict(zip(part.blocks, content[skip:], strict=True)))
    assert device.load(l0, part).outcome == Outcome.DONE
    assert l0.memory.image() == wanted


def test_a_load_may_leave_out_the_last_blocks() -> None:
    device = Device(pages=64)
    l0 = L0(device, awkward())
    whole = Job(range(1, 9), range(14), 7, 4)
    content = l0.memory.blocks(whole.blocks)
    device.store(l0, whole)
    l0.memory.fill()
    part = Job([30, 29, 28, 27, 26], whole.pages, 7, 4, skip=1)
    wanted = l0.memory.image_with(dict(zip(part.blocks, content[1:6], strict=True)))
    assert device.load(l0, part).outcome == Outcome.DONE
    assert l0.memory.image() == wanted


def random_groups(rng: random.Random, groups: int) -> Geometry:
    """Planes of several groups over the same bytes: runs of any length anywhere in a block's stride."""
    num_blocks, stride = rng.randint(groups, 40), rng.randint(50, 6000)
    planes = []
    for group in [*range(groups), *(rng.randrange(groups) for _ in range(rng.randint(0, 4)))]:
        begin = rng.randrange(stride)
        planes.append(Plane(0, begin, stride, rng.randint(1, stride - begin), group))
    rng.shuffle(planes)
    return Geometry(num_blocks, 16, (num_blocks * stride,), tuple(planes))


@given(page_bytes=st.sampled_from([64, 509, 4096]), threads=st.integers(1, 4), steps=walks(8))
@examples(30)
def test_groups_over_the_same_bytes_are_copied_block_by_block_and_holes_left_alone(
    page_bytes: int, threads: int, steps: list[Dice]
) -> None:
    device = Device(DEVICE_PAGES * 4, page_bytes, threads=threads)
    l1 = device.fill_l1()
    for rng in steps:
        l0 = L0(device, random_groups(rng, rng.randint(2, 4)))
        groups, size = l0.geometry.groups, l0.geometry.block_bytes
        per_slot = rng.randint(1, 3)
        pages_per_slot = -(-per_slot * size // device.page_bytes)
        slots = min(device.pages // pages_per_slot, 4)
        positions = min(slots * per_slot, l0.geometry.num_blocks // groups)
        if not positions:
            continue
        pages = scattered(rng, device.pages, slots * pages_per_slot)

        def blocks(count: int, l0: L0 = l0, rng: Dice = rng) -> list[tuple[int, ...]]:
            ids = iter(rng.sample(range(l0.geometry.num_blocks), count * l0.geometry.groups))
            return [tuple(next(ids) for _ in range(l0.geometry.groups)) for _ in range(count)]

        job = Job(blocks(positions), pages, pages_per_slot, per_slot)
        image, expected = l0.memory.image(), l1_after_store(l1, job, l0.memory, device.page_bytes)
        assert device.store(l0, job).bytes == positions * size
        l1 = device.read_l1()
        assert l1 == expected
        assert l0.memory.image() == image

        l0.memory.fill()
        skip = rng.randrange(positions)
        holed = [
            tuple(id if group == kept or rng.random() < 0.6 else NO_BLOCK for group, id in enumerate(ids))
            for ids in blocks(positions - skip)
            for kept in [rng.randrange(groups)]
        ]
        again = Job(holed, pages, pages_per_slot, per_slot, skip)
        wanted = l0_after_load(l1, again, l0.memory, device.page_bytes)
        end = device.load(l0, again)
        assert end.outcome == Outcome.DONE
        assert end.bytes == sum(p.run_bytes for ids in holed for p in l0.geometry.planes if ids[p.group] != NO_BLOCK)
        assert l0.memory.image() == wanted
        assert device.read_l1() == l1
        device.unmap(l0.mappings)


def test_the_last_block_of_a_plane_may_end_with_its_memory() -> None:
    device = Device(pages=8)
    planes = (Plane(0, 0, 100, 3), Plane(0, 97, 100, 3))
    l0 = L0(device, Geometry(5, 16, (500,), planes))
    content = l0.memory.read(4)
    assert device.store(l0, Job([4], [7], 1, 1)).outcome == Outcome.DONE
    assert device.read_l1()[7 * 4096 : 7 * 4096 + 6] == content


def test_a_thousand_planes_are_one_block() -> None:
    device = Device(pages=64)
    planes = tuple(Plane(0, 48 * i, 48_000, 41) for i in range(1000))
    l0 = L0(device, Geometry(4, 16, (4 * 48_000,), planes))
    content = l0.memory.read(3)
    assert device.store(l0, Job([3], range(20, 31), 11, 1)).outcome == Outcome.DONE
    assert device.read_l1()[20 * 4096 :][: len(content)] == content


def test_two_engines_store_side_by_side() -> None:
    device = Device(pages=600, threads=4)
    engines = [L0(device, awkward(num_blocks=150)) for _ in range(2)]
    jobs = [Job(range(1, 101), range(300 * i, 300 * i + 200), 2, 1) for i in range(2)]
    tickets = [device.submit(Direction.STORE, l0, job) for l0, job in zip(engines, jobs, strict=True)]
    assert all(device.wait(ticket).outcome == Outcome.DONE for ticket in tickets)
    l1 = device.read_l1()
    for l0, job in zip(engines, jobs, strict=True):
        assert l1_after_store(l1, job, l0.memory, 4096) == l1


def test_memory_stays_an_engines_own() -> None:
    """A store reads and a load writes: one Memory for both shows that neither does more."""
    device = Device(pages=4)
    memory = Memory(flat(4, 4096))
    image = memory.image()
    l0 = L0(device, flat(4, 4096))
    device.store(l0, Job([0, 1], [0, 1], 1, 1))
    device.load(l0, Job([2, 3], [0, 1], 1, 1))
    assert l0.memory.blocks([2, 3]) == l0.memory.blocks([0, 1])
    assert memory.image() == image
