"""How copies end: whole, cancelled, late, or because the memory went away. Each ticket ends once."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from support.daemon import wait_until

from kvserver._native import Direction, Outcome, State

from .rig import L0, Device, Job, flat, l1_after_store

STORE, LOAD = Direction.STORE, Direction.LOAD
BOTH = pytest.mark.parametrize("direction", [STORE, LOAD])


def slow(blocks: int = 200, delay_micros: int = 2000, threads: int = 1) -> tuple[Device, L0, Job]:
    """A copy that takes blocks * delay / threads, all of it while its word is RUNNING."""
    device = Device(pages=blocks, threads=threads, delay_micros=delay_micros)
    l0 = L0(device, flat(blocks + 1, 4096))
    return device, l0, Job(range(1, blocks + 1), range(blocks), 1, 1)


def wait_for_state(l0: L0, state: State, index: int = 0) -> None:
    wait_until(lambda: l0.words.state(index) == state, what=str(state))


def spin_while(l0: L0, *states: State) -> None:
    """Like wait_until, but back within microseconds: to meet a copy that takes less than a millisecond."""
    deadline = time.monotonic() + 10
    while l0.words.state(0) in states:
        assert time.monotonic() < deadline
        time.sleep(0)


class TestCancel:
    def test_a_cancelled_store_ends_early_and_its_word_stays_cancelled(self) -> None:
        device, l0, job = slow()
        ticket = device.submit_with_word(STORE, l0, job)
        wait_for_state(l0, State.RUNNING)
        assert l0.words.move(0, 1, State.RUNNING, State.CANCELLED)
        end = device.wait(ticket)
        assert end.outcome == Outcome.CANCELLED
        assert "worker" in end.what
        assert end.bytes < 200 * 4096
        assert l0.words.state(0) == State.CANCELLED

    def test_a_cancelled_load_is_acknowledged_and_then_nothing_is_written(self) -> None:
        device, l0, job = slow()
        ticket = device.submit_with_word(LOAD, l0, job)
        wait_for_state(l0, State.RUNNING)
        assert l0.words.move(0, 1, State.RUNNING, State.CANCELLING)
        wait_for_state(l0, State.CANCELLED)
        l0.memory.fill()
        image = l0.memory.image()
        end = device.wait(ticket)
        assert end.outcome == Outcome.CANCELLED
        assert end.bytes < 200 * 4096
        time.sleep(0.05)
        assert l0.memory.image() == image

    @BOTH
    def test_a_pending_copy_that_is_cancelled_moves_no_byte(self, direction: Direction) -> None:
        device, l0, _ = slow(40)
        first = device.submit(direction, l0, Job(range(1, 21), range(20), 1, 1))
        second = device.submit_with_word(direction, l0, Job(range(21, 41), range(20, 40), 1, 1), index=1)
        assert l0.words.move(1, 1, State.PENDING, State.CANCELLED)
        assert device.wait(second).bytes == 0
        assert device.wait(second).outcome == Outcome.CANCELLED
        assert device.wait(first).outcome == Outcome.DONE

    @BOTH
    def test_the_server_ends_a_running_copy_at_its_next_block(self, direction: Direction) -> None:
        device, l0, job = slow()
        ticket = device.submit_with_word(direction, l0, job)
        wait_for_state(l0, State.RUNNING)
        device.native.cancel(ticket)
        end = device.wait(ticket)
        assert end.outcome == Outcome.CANCELLED
        assert "server" in end.what
        assert l0.words.state(0) == State.FAILED

    @BOTH
    def test_the_server_ends_a_copy_that_has_not_begun(self, direction: Direction) -> None:
        device, l0, job = slow()
        running = device.submit_with_word(direction, l0, job)
        queued = device.submit_with_word(direction, l0, Job([1], [0], 1, 1), index=1)
        device.native.cancel(queued)
        device.native.cancel(running)
        assert device.wait(queued).bytes == 0
        assert device.wait(queued).outcome == Outcome.CANCELLED
        assert l0.words.state(1) == State.FAILED

    def test_a_load_that_both_sides_cancel_is_acknowledged(self) -> None:
        device, l0, job = slow()
        ticket = device.submit_with_word(LOAD, l0, job)
        wait_for_state(l0, State.RUNNING)
        device.native.cancel(ticket)
        l0.words.move(0, 1, State.RUNNING, State.CANCELLING)
        assert device.wait(ticket).outcome == Outcome.CANCELLED
        assert l0.words.state(0) in (State.CANCELLED, State.FAILED)

    def test_cancelling_what_is_unknown_or_over_changes_nothing(self) -> None:
        device, l0, _ = slow()
        device.native.cancel(12345)
        ticket = device.submit_with_word(STORE, l0, Job([1], [0], 1, 1))
        assert device.wait(ticket).outcome == Outcome.DONE
        device.native.cancel(ticket)
        assert device.drain() == []
        assert l0.words.state(0) == State.DONE

    @pytest.mark.parametrize("seed", range(3))
    def test_a_cancel_at_any_moment_ends_in_exactly_one_way(self, seed: int) -> None:
        """DONE with the word DONE and every byte there, or not DONE, and the word is not DONE either."""
        rng = random.Random(seed)
        device = Device(pages=32, threads=2, delay_micros=100)  # before each of four blocks: time to come in between
        l0 = L0(device, flat(9, 8 * 4096))
        job = Job(range(1, 5), range(32), 8, 1)
        moments: list[Callable[[], object]] = [
            lambda: None,
            lambda: time.sleep(rng.uniform(0, 0.001)),
            lambda: spin_while(l0, State.PENDING),
            lambda: spin_while(l0, State.PENDING, State.RUNNING),
        ]
        while_it_ran = done = 0
        for sequence in range(1, 400):
            direction = rng.choice([STORE, LOAD])
            asked = State.CANCELLED if direction == STORE else State.CANCELLING
            ticket = device.submit_with_word(direction, l0, job, sequence=sequence)
            rng.choice(moments)()
            for _ in range(rng.randint(0, 60)):
                l0.words.state(0)
            early = l0.words.move(0, sequence, State.PENDING, State.CANCELLED)
            late = not early and l0.words.move(0, sequence, State.RUNNING, asked)
            end = device.wait(ticket)
            cancelled = early or late
            assert end.outcome == (Outcome.CANCELLED if cancelled else Outcome.DONE), f"seed {seed} at {sequence}"
            assert l0.words.state(0) == (State.CANCELLED if cancelled else State.DONE)
            assert not early or end.bytes == 0
            assert cancelled or end.bytes == 32 * 4096
            while_it_ran += late
            done += not cancelled
        assert while_it_ran > 0
        assert 0 < done < 399


class TestDeadlines:
    @BOTH
    def test_a_copy_whose_deadline_has_passed_moves_no_byte(self, direction: Direction) -> None:
        device = Device()
        l0 = L0(device, flat(4, 4096))
        l1, image = device.fill_l1(), l0.memory.image()
        l0.words.arm(0, 1)
        ticket = device.submit(
            direction,
            l0,
            Job([1], [0], 1, 1),
            word_memory=l0.mappings[-1],
            word_index=0,
            sequence=1,
            deadline_nanos=time.monotonic_ns() - 1,
        )
        end = device.wait(ticket)
        assert (end.outcome, end.bytes) == (Outcome.LATE, 0)
        assert "deadline" in end.what
        assert l0.words.state(0) == State.FAILED
        assert device.read_l1() == l1
        assert l0.memory.image() == image

    @BOTH
    def test_a_deadline_that_passes_in_the_queue_counts(self, direction: Direction) -> None:
        device, l0, job = slow(50)
        first = device.submit(direction, l0, job)
        second = device.submit(direction, l0, Job([1], [0], 1, 1), deadline_nanos=time.monotonic_ns() + 20_000_000)
        assert device.wait(first).outcome == Outcome.DONE
        assert device.wait(second).outcome == Outcome.LATE

    @BOTH
    def test_a_deadline_ends_the_wait_and_not_the_copy(self, direction: Direction) -> None:
        device, l0, job = slow(50)
        ticket = device.submit(direction, l0, job, deadline_nanos=time.monotonic_ns() + 50_000_000)
        assert device.wait(ticket).outcome == Outcome.DONE

    def test_a_cancelled_copy_that_is_late_as_well_stays_cancelled_in_its_word(self) -> None:
        device = Device()
        l0 = L0(device, flat(4, 4096))
        l0.words.arm(0, 1)
        l0.words.move(0, 1, State.PENDING, State.CANCELLED)
        ticket = device.submit(
            STORE, l0, Job([1], [0], 1, 1), word_memory=l0.mappings[-1], sequence=1, deadline_nanos=1
        )
        assert device.wait(ticket).outcome in (Outcome.LATE, Outcome.CANCELLED)
        assert l0.words.state(0) == State.CANCELLED


class TestLostMemory:
    @BOTH
    def test_memory_that_was_truncated_before_the_copy_is_lost(self, direction: Direction) -> None:
        device = Device(pages=16)
        l0, other = L0(device, flat(9, 4096)), L0(device, flat(9, 4096))
        l0.memory.truncate()
        ticket = device.submit_with_word(direction, l0, Job(range(1, 9), range(8), 1, 1))
        end = device.wait(ticket)
        assert end.outcome == Outcome.MEMORY_LOST
        assert "truncated" in end.what
        assert l0.words.state(0) == State.FAILED
        job = Job(range(1, 9), range(8, 16), 1, 1)
        assert device.store(other, job).outcome == Outcome.DONE, "no other mapping is hurt"
        l1 = device.read_l1()
        assert l1_after_store(l1, job, other.memory, 4096) == l1

    @BOTH
    @pytest.mark.parametrize("threads", [1, 4])
    def test_memory_that_is_truncated_during_the_copy_is_lost(self, direction: Direction, threads: int) -> None:
        device, l0, job = slow(300, 1000, threads)
        ticket = device.submit_with_word(direction, l0, job)
        wait_for_state(l0, State.RUNNING)
        l0.memory.truncate()
        end = device.wait(ticket)
        assert end.outcome == Outcome.MEMORY_LOST
        assert end.bytes < 300 * 4096

    @BOTH
    def test_memory_that_lost_its_end_is_lost_though_no_block_was_there(self, direction: Direction) -> None:
        device = Device(pages=4)
        l0 = L0(device, flat(9, 4096))
        l0.memory.truncate(size=8 * 4096 + 100)  # reads of the last page see zeros, without a signal
        ticket = device.submit_with_word(direction, l0, Job([8], [0], 1, 1))
        assert device.wait(ticket).outcome == Outcome.MEMORY_LOST
        assert l0.words.state(0) == State.FAILED

    def test_losing_memory_again_and_again_hurts_no_other(self) -> None:
        device = Device(pages=64, threads=4)
        steady = L0(device, flat(33, 4096))
        job = Job(range(1, 33), range(32, 64), 1, 1)
        for turn in range(100):
            doomed = L0(device, flat(33, 4096))
            direction = (STORE, LOAD)[turn % 2]
            lost = device.submit(direction, doomed, Job(range(1, 33), range(32), 1, 1))
            whole = device.submit(STORE, steady, job)
            doomed.memory.truncate()
            assert device.wait(lost).outcome in (Outcome.MEMORY_LOST, Outcome.DONE)
            assert device.wait(whole).outcome == Outcome.DONE
            assert device.unmap(doomed.mappings).outcome == Outcome.DONE

    def test_a_bus_error_outside_of_copies_still_kills(self) -> None:
        program = """
import mmap, os
from kvserver._native import CpuDevice, HostRegion
device = CpuDevice(HostRegion(4096), 4096, 1)
fd = os.memfd_create("m")
os.ftruncate(fd, 4096)
view = mmap.mmap(fd, 4096)
os.ftruncate(fd, 0)
view[0]
"""
        ended = subprocess.run([sys.executable, "-c", program], timeout=30, capture_output=True)
        assert ended.returncode == -signal.SIGBUS


class TestTickets:
    def test_python_runs_on_while_bytes_move(self) -> None:
        device, l0, job = slow(100, 2000)
        turns = 0
        ticket = device.submit_with_word(STORE, l0, job)
        wait_for_state(l0, State.RUNNING)
        progress = threading.Thread(target=lambda: [sum(range(1000)) for _ in range(1000)])
        progress.start()
        deadline = time.monotonic() + 60
        while l0.words.state(0) == State.RUNNING:
            turns += 1
            assert time.monotonic() < deadline
        progress.join()
        assert device.wait(ticket).outcome == Outcome.DONE
        assert turns > 1000

    def test_python_runs_on_while_much_is_copied(self) -> None:
        device = Device(pages=16384, threads=1)  # 64 MiB
        l0 = L0(device, flat(17, 4 << 20))
        job = Job(range(1, 17), range(16384), 1024, 1)
        tickets = [device.submit(LOAD, l0, job) for _ in range(8)]
        turns = 0
        deadline = time.monotonic() + 60
        while len(device.ended) < len(tickets) + 1:
            device.drain()
            turns += 1
            assert time.monotonic() < deadline
        assert all(device.ended[ticket].outcome == Outcome.DONE for ticket in tickets)
        assert turns > 100, "the interpreter stood still while half a gigabyte was copied"

    def test_a_load_overtakes_the_stores_that_wait(self) -> None:
        device = Device(pages=12 * 256, threads=1, delay_micros=5000)
        l0 = L0(device, flat(13, 1 << 20))
        store = device.submit(STORE, l0, Job(range(1, 11), range(10 * 256), 256, 1))
        load = device.submit(LOAD, l0, Job([11], range(10 * 256, 11 * 256), 256, 1))
        device.wait(load)
        assert store not in device.ended
        assert device.wait(store).outcome == Outcome.DONE

    def test_a_copier_that_is_dropped_stops_writing(self) -> None:
        device, l0, job = slow(200)
        for _ in range(3):
            device.submit(LOAD, l0, job)
        wait_until(lambda: l0.memory.read(1) == bytes(4096), what="the first block")
        del device.native
        gc.collect()
        l0.memory.fill()
        image = l0.memory.image()
        time.sleep(0.05)
        assert l0.memory.image() == image

    @pytest.mark.parametrize("seed", range(3))
    def test_every_ticket_ends_once_whatever_threads_submit_and_cancel(self, seed: int) -> None:
        device = Device(pages=64, threads=3, delay_micros=20)
        engines = [L0(device, flat(33, 4096)) for _ in range(4)]
        device.drain()
        before, each = device.tickets, 250
        submitted: list[int] = []

        def run(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            l0 = engines[number]
            for i in range(each):
                ticket = before + 1 + number * each + i
                blocks = rng.sample(range(1, 33), rng.randint(1, 8))
                # A quarter of L1 for each: the device trusts its caller to keep slots unshared.
                job = Job(blocks, range(16 * number, 16 * number + len(blocks)), 1, 1)
                index, sequence = i % 64, i // 64 + 1
                l0.words.arm(index, sequence)
                submitted.append(ticket)
                device.native.submit_copy(
                    ticket,
                    **job.arguments(rng.choice([STORE, LOAD]), l0.table),
                    word_memory=l0.mappings[-1],
                    word_index=index,
                    sequence=sequence,
                    deadline_nanos=rng.choice([0, 0, time.monotonic_ns() + 1_000_000]),
                )
                if rng.random() < 0.3:
                    device.native.cancel(rng.choice(submitted))
                if rng.random() < 0.3:
                    from_, to = rng.choice([(State.PENDING, State.CANCELLED), (State.RUNNING, State.CANCELLED)])
                    l0.words.move(index, sequence, from_, to)
                if i % 16 == 0:
                    time.sleep(0.001)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            device.drain()
        for ticket in submitted:
            device.wait(ticket)
        assert len(submitted) == 4 * each
        time.sleep(0.01)
        assert device.drain() == []
