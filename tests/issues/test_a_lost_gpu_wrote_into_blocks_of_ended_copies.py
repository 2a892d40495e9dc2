"""A GPU that was given up while its context lived still moved the batches that it had been given. Their tickets ended at
once, so the engine reused the blocks of loads, the server the pages of stores, and then the late copies landed there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from native.rig import L0, Device, Job
from support.daemon import wait_until
from support.memory import Geometry
from support.simulators import FakeGpu

from kvserver._native import Direction, Outcome, State, Way
from kvserver.protocol import Plane

REASON = "the driver reported something odd"
KiB = 1 << 10
JOB = Job(range(1, 9), range(32), 4, 1)  # eight blocks of sixteen planes: four batches


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    gpu = FakeGpu("GPU-0")
    yield gpu
    gpu.resume()
    assert gpu.faults == []


class Machine:
    """A device with pinned L1, an engine's memory, and four batches of a copy in flight on streams that stand still."""

    def __init__(self, gpu: FakeGpu, direction: Direction, way: Way) -> None:
        self.gpu = gpu
        self.device = Device(64, gpu=gpu, way=way, batch_bytes=32 * KiB, pinned=True)
        planes = tuple(Plane(0, i * 9 * KiB, KiB, KiB) for i in range(16))
        self.l0 = L0(self.device, Geometry(9, 16, (16 * 9 * KiB,), planes))
        assert self.device.wait(self.device.submit(direction, self.l0, JOB)).outcome == Outcome.DONE
        recorded = gpu.calls["record"]
        gpu.pause()
        self.ticket = self.device.submit_with_word(direction, self.l0, JOB)
        wait_until(lambda: gpu.calls["record"] == recorded + 5, what="an event at the beginning, and after each batch")

    def give_up(self) -> None:
        """By a thread that neither direction's calls pass through."""
        self.gpu.fail_next("enter", REASON, lost=True, alive=True)
        assert self.device.map([]).outcome == Outcome.DEVICE_LOST

    def resume_later(self) -> None:
        threading.Timer(0.3, self.gpu.resume).start()


BOTH_WAYS = pytest.mark.parametrize("way", [Way.DMA, Way.STAGED])


@BOTH_WAYS
def test_no_late_load_lands_in_blocks_that_the_engine_uses_again(gpu: FakeGpu, way: Way) -> None:
    machine = Machine(gpu, Direction.LOAD, way)
    machine.give_up()
    machine.resume_later()
    assert machine.device.wait(machine.ticket).outcome == Outcome.DEVICE_LOST
    assert machine.l0.words.state(0) == State.FAILED
    machine.l0.memory.fill()
    reused = machine.l0.memory.image()
    time.sleep(0.6)
    assert machine.l0.memory.image() == reused


@BOTH_WAYS
def test_no_late_store_lands_in_pages_that_another_device_fills(gpu: FakeGpu, way: Way) -> None:
    machine = Machine(gpu, Direction.STORE, way)
    on_cpu = Device(64, region=machine.device.region)
    machine.give_up()
    machine.resume_later()
    assert machine.device.wait(machine.ticket).outcome == Outcome.DEVICE_LOST
    reused = on_cpu.fill_l1()
    time.sleep(0.6)
    assert on_cpu.read_l1() == reused


@pytest.mark.parametrize("direction", [Direction.STORE, Direction.LOAD])
def test_copies_that_may_still_move_stay_open_however_long_and_others_end(gpu: FakeGpu, direction: Direction) -> None:
    """All slots are in use, so the second copy has not begun."""
    machine = Machine(gpu, direction, Way.STAGED)
    device = machine.device
    waiting = device.submit_with_word(direction, machine.l0, JOB, index=1)
    machine.give_up()
    assert device.wait(waiting).outcome == Outcome.DEVICE_LOST
    assert machine.l0.words.state(1) == State.FAILED
    time.sleep(0.3)
    assert device.drain() == []
    assert machine.l0.words.state(0) == State.RUNNING
    gpu.resume()
    assert device.wait(machine.ticket).outcome == Outcome.DEVICE_LOST
    assert machine.l0.words.state(0) == State.FAILED


def test_copies_of_which_the_gpu_does_not_report_whether_they_move_stay_open(gpu: FakeGpu) -> None:
    machine = Machine(gpu, Direction.LOAD, Way.DMA)
    gpu.fail_next("finish", "not even that")
    machine.give_up()
    gpu.resume()
    wait_until(lambda: gpu.calls.get("finish"))
    time.sleep(0.3)
    assert machine.device.drain() == []
    assert machine.l0.words.state(0) == State.RUNNING
    del machine.device.native  # it stops all the same
