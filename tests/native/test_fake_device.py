"""What a test may make the fake device do, and what it holds against its caller."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.daemon import wait_until
from support.simulators import FakeDevice, Order

from kvserver._native import Direction, HostRegion, Outcome, State

from .rig import L0, Device, Job, flat

STORE, LOAD = Direction.STORE, Direction.LOAD
BOTH = pytest.mark.parametrize("direction", [STORE, LOAD])
BLOCK = 4096


def rig(delay_micros: int = 0) -> tuple[Device, FakeDevice, L0]:
    """64 pages of noise and a worker of 64 blocks of a page each; word n belongs to block n."""
    device = Device(64, BLOCK, delay_micros=delay_micros, fake_seed=7)
    assert device.fake is not None
    return device, device.fake, L0(device, flat(64, BLOCK))


def submit(device: Device, l0: L0, direction: Direction, first: int, count: int = 4) -> int:
    """A copy between the blocks and pages of these numbers."""
    numbers = range(first, first + count)
    return device.submit_with_word(direction, l0, Job(numbers, numbers, 1, 1), index=first)


def drain_until(device: Device, tickets: list[int]) -> list[Outcome]:
    """Without a step: they have ended, though some are reported later."""
    wait_until(lambda: device.drain() is None or set(tickets) <= set(device.ended))
    return [device.ended[ticket].outcome for ticket in tickets]


class TestEnds:
    def test_nothing_moves_until_the_test_calls_for_it(self) -> None:
        device, fake, l0 = rig()
        ticket = submit(device, l0, LOAD, 1)
        image = l0.memory.image()
        assert device.drain() == []
        assert fake.open == [ticket]
        assert l0.words.state(1) == State.PENDING
        assert l0.memory.image() == image

    def test_any_ticket_may_be_the_first_to_end(self) -> None:
        device, fake, l0 = rig()
        first, second, third = (submit(device, l0, LOAD, 1 + 4 * n) for n in range(3))
        fake.release(second)
        assert drain_until(device, [second]) == [Outcome.DONE]
        assert fake.open == [first, third]
        assert [l0.memory.read(block) for block in range(5, 9)] == [fake.read_l1(page) for page in range(5, 9)]
        assert l0.words.state(1) == l0.words.state(9) == State.PENDING

    def test_ends_are_reported_in_reverse_on_request(self) -> None:
        device = Device(64, BLOCK, fake_seed=7)
        plain = FakeDevice(HostRegion(64 * BLOCK), BLOCK)  # no seed: ends are reported in their order
        l0 = L0(device, flat(64, BLOCK))
        for ticket in range(1, 6):
            job = Job([ticket], [ticket], 1, 1)
            plain.submit_copy(ticket, **job.arguments(STORE, l0.table))
        plain.release_all(Order.REVERSED)
        assert [end[0] for end in plain.drain()] == [5, 4, 3, 2, 1]

    @BOTH
    def test_a_copy_may_fail_half_way(self, direction: Direction) -> None:
        device, fake, l0 = rig()
        pages, blocks = [fake.read_l1(n) for n in range(1, 5)], l0.memory.blocks(range(1, 5))
        ticket = submit(device, l0, direction, 1)
        fake.fail(ticket, 3, "a bad day")
        assert drain_until(device, [ticket]) == [Outcome.FAILED]
        assert (device.ended[ticket].bytes, device.ended[ticket].what) == (3 * BLOCK, "a bad day")
        assert l0.words.state(1) == State.FAILED
        moved = blocks[:3] + pages[3:] if direction == STORE else pages[:3] + blocks[3:]
        assert [fake.read_l1(n) for n in range(1, 5)] == (moved if direction == STORE else pages)
        assert l0.memory.blocks(range(1, 5)) == (moved if direction == LOAD else blocks)

    def test_a_ticket_that_ended_cannot_be_released_again(self) -> None:
        device, fake, l0 = rig()
        ticket = submit(device, l0, STORE, 1)
        fake.release(ticket)
        with pytest.raises(ValueError, match="not open"):
            fake.release(ticket)


class TestLoss:
    def test_copies_in_flight_at_a_loss_end_with_the_reason(self) -> None:
        device, fake, l0 = rig()
        tickets = [submit(device, l0, direction, 1 + 4 * n) for n, direction in enumerate([STORE, LOAD, STORE, LOAD])]
        fake.run(tickets[2], 2)
        fake.run(tickets[3], 2)
        assert l0.words.move(13, 1, State.RUNNING, State.CANCELLING)
        assert l0.words.move(5, 1, State.PENDING, State.CANCELLED)
        image = l0.memory.image()
        fake.lose("it fell off the bus")
        assert drain_until(device, tickets) == [Outcome.DEVICE_LOST] * 4
        assert {device.ended[ticket].what for ticket in tickets} == {"it fell off the bus"}
        states = [l0.words.state(1 + 4 * n) for n in range(4)]
        assert states == [State.FAILED, State.CANCELLED, State.FAILED, State.CANCELLED]
        assert fake.open == []
        assert fake.lost == "it fell off the bus"
        assert l0.memory.image() == image

    def test_copy_submitted_after_a_loss_ends_as_device_lost_at_once(self) -> None:
        device, fake, l0 = rig()
        fake.lose("gone")
        assert drain_until(device, [submit(device, l0, STORE, 1)]) == [Outcome.DEVICE_LOST]
        assert l0.words.state(1) == State.FAILED

    def test_memory_can_be_unmapped_after_a_loss(self) -> None:
        device, fake, l0 = rig()
        ticket = device.next_ticket()
        fake.submit_unmap(ticket, l0.mappings)
        fake.lose("gone")
        assert drain_until(device, [ticket]) == [Outcome.DONE]
        assert not any(mapping.mapped for mapping in l0.mappings)

    def test_map_under_way_at_a_loss_leaves_nothing_mapped(self) -> None:
        device, fake, _ = rig()
        other = L0(device, flat(4, BLOCK))
        device.unmap(other.mappings)
        ticket = device.next_ticket()
        fake.submit_map(ticket, other.mappings)
        fake.lose("gone")
        assert drain_until(device, [ticket]) == [Outcome.DEVICE_LOST]
        assert not any(mapping.mapped for mapping in other.mappings)

    def test_copy_that_runs_at_a_loss_ends_when_it_has_left_the_memory(self) -> None:
        device, fake, l0 = rig(delay_micros=20_000)
        ticket = submit(device, l0, LOAD, 1, 32)
        runner = threading.Thread(target=lambda: fake.release(ticket))
        runner.start()
        wait_until(lambda: l0.words.state(1) == State.RUNNING)
        fake.lose("gone")
        assert drain_until(device, [ticket]) == [Outcome.DEVICE_LOST]
        image = l0.memory.image()
        runner.join()
        assert l0.memory.image() == image
        assert l0.words.state(1) == State.FAILED

    def test_a_device_that_was_replaced_copies_again(self) -> None:
        device, fake, l0 = rig()
        fake.lose("gone")
        fake.recover()
        assert fake.lost == ""
        assert device.store(l0, Job([1], [1], 1, 1)).outcome == Outcome.DONE


class TestRulesOfTheCaller:
    """What device.h REQUIRES: a device that copies for speed does not look."""

    def test_copy_that_names_a_chunk_twice_is_refused(self) -> None:
        device, _, l0 = rig()
        with pytest.raises(RuntimeError, match="named twice"):
            device.submit(STORE, l0, Job([1, 2], [0, 1], 1, 1), chunks=[1, 1])

    def test_store_of_two_slots_that_share_a_page_is_refused(self) -> None:
        device, _, l0 = rig()
        with pytest.raises(RuntimeError, match="two slots"):
            device.submit(STORE, l0, Job([1, 2], [0, 0], 1, 1))

    @pytest.mark.parametrize(("one", "other"), [(STORE, STORE), (STORE, LOAD), (LOAD, STORE)])
    def test_a_page_under_a_copy_is_not_named_by_another(self, one: Direction, other: Direction) -> None:
        device, fake, l0 = rig()
        ticket = device.submit(one, l0, Job([1], [9], 1, 1))
        with pytest.raises(RuntimeError, match="named by another"):
            device.submit(other, l0, Job([2], [9], 1, 1))
        fake.release(ticket)
        device.submit(other, l0, Job([2], [9], 1, 1))

    def test_two_loads_may_read_one_page(self) -> None:
        device, fake, l0 = rig()
        device.submit(LOAD, l0, Job([1], [9], 1, 1))
        device.submit(LOAD, l0, Job([2], [9], 1, 1))
        fake.release_all()
        assert l0.memory.read(1) == l0.memory.read(2) == fake.read_l1(9)

    def test_memory_under_a_copy_is_not_unmapped(self) -> None:
        device, fake, l0 = rig()
        submit(device, l0, STORE, 1)
        with pytest.raises(RuntimeError, match="unmapped under a copy"):
            fake.submit_unmap(device.next_ticket(), l0.mappings)

    def test_memory_that_is_not_mapped_is_not_copied(self) -> None:
        device, _, l0 = rig()
        device.unmap(l0.mappings)
        with pytest.raises(RuntimeError, match="not mapped"):
            device.submit(STORE, l0, Job([1], [0], 1, 1))


TRUNCATED = """
import mmap, os, sys
from native.rig import Device, Job, L0, Outcome, flat

devices = [Device(fake_seed=int(seed)) for seed in sys.argv[1:]]
for device in devices + devices:
    l0 = L0(device, flat(9, 4096))
    l0.memory.truncate()
    assert device.store(l0, Job(range(1, 9), range(8), 1, 1)).outcome == Outcome.MEMORY_LOST
fd = os.memfd_create("m")
os.ftruncate(fd, 4096)
view = mmap.mmap(fd, 4096)
os.ftruncate(fd, 0)
print("all were lost", flush=True)
view[0]
"""


@pytest.mark.parametrize("seeds", [["0", "1"], ["1", "0"]], ids=["the CPU device first", "the fake device first"])
def test_each_module_survives_truncated_memory_and_neither_hides_another_bus_error(seeds: list[str]) -> None:
    """Both contain the code that copies, with a handler of SIGBUS of its own, and the later one calls the earlier."""
    command = [sys.executable, "-c", TRUNCATED, *seeds]
    ended = subprocess.run(command, cwd=Path(__file__).parent.parent, timeout=30, capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("all were lost\n", -signal.SIGBUS), ended.stderr
