"""How much a GPU's lane has in flight (`csrc/gpu/gpu_device.h`): more where much waits, bounded by slots and free memory.

The simulated GPU's streams stand still while a test counts what was given to them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.daemon import wait_until
from support.memory import Geometry
from support.simulators import FakeGpu

from kvserver._native import (
    GPU_MOST_SLOTS,
    GPU_SLOTS,
    GPU_SPARE_BYTES,
    Direction,
    GpuDevice,
    HostRegion,
    Outcome,
    State,
    Way,
)
from kvserver.protocol import Plane

from .rig import L0, Device, Job, l0_after_load

STORE, LOAD = Direction.STORE, Direction.LOAD
KiB = 1 << 10
BLOCK, PLANES = 16 * KiB, 16
BATCH = 2 * BLOCK
BLOCKS = 400


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    gpu = FakeGpu("GPU-0")
    yield gpu
    assert gpu.faults == []


class Lane:
    """The loads of one engine, two blocks a batch; one copy has been, so that the lane has what it needs."""

    def __init__(self, gpu: FakeGpu, way: Way = Way.STAGED) -> None:
        self.gpu = gpu
        self.device = Device(4 * BLOCKS, gpu=gpu, way=way, batch_bytes=BATCH, pinned=True)
        run = BLOCK // PLANES
        planes = tuple(Plane(0, n * BLOCKS * run, run, run) for n in range(PLANES))
        self.l0 = L0(self.device, Geometry(BLOCKS, 16, (BLOCKS * BLOCK,), planes))
        self.device.store(self.l0, self.batches(BLOCKS // 2 - 1))
        assert self.device.load(self.l0, self.batches(1)).outcome == Outcome.DONE
        self.before = self.calls()

    def calls(self) -> int:
        return self.gpu.calls.get("copy_blocks", 0) if self.device.native.counts(LOAD)[1] else self.gpu.calls["copy"]

    def batches(self, count: int, first: int = 0) -> Job:
        blocks = range(2 * first, 2 * (first + count))
        return Job(blocks, range(8 * first, 8 * (first + count)), 4, 1)

    def load(self, count: int, word: int = 0, first: int = 0) -> int:
        return self.device.submit_with_word(LOAD, self.l0, self.batches(count, first), word)

    def queued(self) -> int:
        """Batches given to the GPU since the lane was ready."""
        return self.calls() - self.before

    def steady(self) -> int:
        """The same, once it does not change any more."""
        seen, deadline = -1, time.monotonic() + 60
        while seen != (seen := self.queued()):
            assert time.monotonic() < deadline, "it still changes"
            time.sleep(0.1)
        return seen

    def staging(self) -> int:
        return self.device.native.counts(LOAD)[3] // BATCH


def test_a_deep_queue_gets_more_in_flight_up_to_the_most_slots(gpu: FakeGpu) -> None:
    lane = Lane(gpu)
    assert lane.staging() == GPU_SLOTS
    stored = lane.device.read_l1()
    lane.before = lane.calls()
    lane.l0.memory.fill()
    expected = l0_after_load(stored, lane.batches(100), lane.l0.memory, 4096)
    gpu.pause()
    ticket = lane.load(100)
    wait_until(lambda: lane.queued() == GPU_MOST_SLOTS)
    assert lane.steady() == GPU_MOST_SLOTS
    assert lane.staging() == GPU_MOST_SLOTS
    gpu.resume()
    assert lane.device.wait(ticket).outcome == Outcome.DONE
    assert lane.l0.memory.image() == expected


@pytest.mark.parametrize("waiting", [0, 1, 3])
def test_shallow_queue_gets_no_more_slots(gpu: FakeGpu, waiting: int) -> None:
    """No more waits than is in flight."""
    lane = Lane(gpu)
    gpu.pause()
    ticket = lane.load(GPU_SLOTS + waiting)
    assert lane.steady() == lane.staging() == GPU_SLOTS
    gpu.resume()
    assert lane.device.wait(ticket).outcome == Outcome.DONE


def test_a_lane_that_has_grown_uses_its_slots_for_long_copies_only_while_much_waits(gpu: FakeGpu) -> None:
    lane = Lane(gpu)
    gpu.pause()
    grown = lane.load(100)
    wait_until(lambda: lane.queued() == GPU_MOST_SLOTS)
    gpu.resume()
    assert lane.device.wait(grown).outcome == Outcome.DONE
    lane.before = lane.calls()
    gpu.pause()
    ticket = lane.load(GPU_SLOTS + 3, word=1)
    assert lane.steady() == GPU_SLOTS, "three wait"
    shorts = [lane.load(1, word=2 + n, first=110 + n) for n in range(3)]
    wait_until(lambda: lane.queued() >= GPU_SLOTS + 3, what="short copies may use every slot")
    gpu.resume()
    assert {lane.device.wait(each).outcome for each in (ticket, *shorts)} == {Outcome.DONE}


def test_dma_alone_needs_no_memory_and_does_not_grow(gpu: FakeGpu) -> None:
    lane = Lane(gpu, Way.DMA)
    gpu.pause()
    ticket = lane.load(100)
    assert lane.steady() == GPU_SLOTS
    assert lane.staging() == 0
    gpu.resume()
    assert lane.device.wait(ticket).outcome == Outcome.DONE


@pytest.mark.parametrize("more", [0, 3])
def test_growth_leaves_memory_of_the_gpu_to_others(more: int) -> None:
    probe = Lane(FakeGpu("GPU-0"))
    taken = probe.gpu.allocated_bytes
    gpu = FakeGpu("GPU-1")
    grown = Lane(gpu)
    gpu.pause()
    grown.load(100)
    wait_until(lambda: grown.queued() == GPU_MOST_SLOTS)
    slot = (gpu.allocated_bytes - taken) // (GPU_MOST_SLOTS - GPU_SLOTS)
    gpu.resume()

    full = FakeGpu("GPU-2", memory_bytes=GPU_SPARE_BYTES + taken + more * slot)
    lane = Lane(full)
    full.pause()
    ticket = lane.load(100)
    assert lane.steady() == lane.staging() == GPU_SLOTS + more
    full.resume()
    assert lane.device.wait(ticket).outcome == Outcome.DONE
    assert full.allocated_bytes == taken + more * slot


@pytest.mark.parametrize("call", ["free_bytes", "allocate", "allocate_pinned", "make_stream", "make_event"])
def test_growth_that_fails_harms_no_copy_and_leaves_nothing_behind(gpu: FakeGpu, call: str) -> None:
    lane = Lane(gpu)
    before = gpu.allocated_bytes
    gpu.fail_next(call, f"{call} failed")
    gpu.pause()
    ticket = lane.load(GPU_SLOTS * 2)
    assert lane.steady() == GPU_SLOTS
    gpu.resume()
    end = lane.device.wait(ticket)
    assert (end.outcome, lane.device.native.lost) == (Outcome.DONE, "")
    assert gpu.allocated_bytes == before
    lane.device.unmap(lane.l0.mappings)
    del lane.device.native
    made = gpu.calls["make_stream"] - (call == "make_stream")
    assert (gpu.allocated_bytes, made) == (0, gpu.calls["free_stream"])


def test_a_gpu_that_is_lost_by_growth_ends_every_ticket(gpu: FakeGpu) -> None:
    lane = Lane(gpu)
    gpu.fail_next("free_bytes", "fallen off the bus", lost=True)
    gpu.pause()
    tickets = [lane.load(50), lane.load(1, word=1, first=60)]
    assert {lane.device.wait(ticket).outcome for ticket in tickets} == {Outcome.DEVICE_LOST}
    assert [lane.l0.words.state(word) for word in (0, 1)] == [State.FAILED] * 2


def test_a_cancel_is_looked_at_before_each_batch_of_a_lane_that_has_grown(gpu: FakeGpu) -> None:
    lane = Lane(gpu)
    gpu.pause()
    ticket = lane.load(100)
    wait_until(lambda: lane.queued() == GPU_MOST_SLOTS)
    lane.device.native.cancel(ticket)
    gpu.resume()
    end = lane.device.wait(ticket)
    assert (end.outcome, end.bytes) == (Outcome.CANCELLED, GPU_MOST_SLOTS * BATCH), "what was in flight, and no more"


def test_a_short_copy_goes_before_the_next_batches_of_a_long_one_in_a_lane_that_has_grown() -> None:
    gpu = FakeGpu("GPU-0", delay_micros=3000)
    lane = Lane(gpu)
    gpu.pause()
    long = lane.load(150)
    wait_until(lambda: lane.queued() == GPU_MOST_SLOTS)
    short = lane.load(1, word=1, first=170)
    lane.steady()
    assert lane.l0.words.state(1) == State.PENDING, "no slot is idle"
    gpu.resume()
    assert lane.device.wait(short).outcome == Outcome.DONE
    assert lane.queued() < 5 * GPU_MOST_SLOTS, "what was in flight, its own round, and what followed before we looked"
    assert long not in lane.device.ended
    lane.device.native.cancel(long)
    lane.device.wait(long)


def test_a_device_destroyed_while_it_grows_frees_everything(gpu: FakeGpu) -> None:
    lane = Lane(gpu)
    ticket = lane.load(180)
    wait_until(lambda: lane.staging() > GPU_SLOTS)
    lane.device.wait(ticket)
    lane.device.unmap(lane.l0.mappings)
    del lane.device.native
    assert (gpu.allocated_bytes, gpu.calls["make_stream"]) == (0, gpu.calls["free_stream"])


def test_device_with_fewer_than_the_first_slots_is_refused(gpu: FakeGpu) -> None:
    with pytest.raises(ValueError, match="at least 4 slots"):
        GpuDevice(HostRegion(4096), 4096, gpu, most_slots=GPU_SLOTS - 1)
