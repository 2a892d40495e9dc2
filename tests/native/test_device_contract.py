"""The contract of `csrc/copy/device.h`, the same cases for every device.

The CPU's threads, the fake device, a simulated GPU by each of its two ways, with L1 pinned and not, and a real one likewise
where there is one.
A new backend joins by one more line in BACKENDS.
"""

from __future__ import annotations

import gc
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
from support.daemon import wait_until
from support.gpu_memory import VmmMemory, real_gpu
from support.memory import awkward, two_groups
from support.simulators import FakeGpu, Order

from kvserver._native import NO_BLOCK, Direction, Outcome, State, Way, WordMapping, WordPage, cuda_gpu

from .rig import L0, Device, End, Job, flat, l0_after_load, l1_after_store

STORE, LOAD = Direction.STORE, Direction.LOAD
BOTH = pytest.mark.parametrize("direction", [STORE, LOAD])
WAYS = {"dma": Way.DMA, "staged": Way.STAGED}
BACKENDS = ["cpu", "fake"] + [
    f"{gpu}-{way}{pinned}"
    for gpu in ["gpu", "cuda"][: 2 if real_gpu() else 1]
    for way in WAYS
    for pinned in ("", "-pinned")
]

Make: TypeAlias = Callable[..., Device]


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    gpus: list[FakeGpu] = []

    def device(pages: int = 64, delay_micros: int = 0, **options: int) -> Device:
        kind, way, pinned = (*request.param.split("-"), "", "")[:3]
        if kind == "cuda":
            gpu, allocate = cuda_gpu(real_gpu()), VmmMemory
            return Device(pages, gpu=gpu, way=WAYS[way], pinned=bool(pinned), allocate=allocate, **options)
        if kind == "gpu":
            gpus.append(FakeGpu("GPU-0", 0 if delay_micros else 4711, delay_micros))
            return Device(pages, gpu=gpus[-1], way=WAYS[way], pinned=bool(pinned), **options)
        return Device(pages, delay_micros=delay_micros, fake_seed=4711 if kind == "fake" else 0, **options)

    yield device
    for gpu in gpus:
        assert gpu.faults == []


def long_copy(make: Make, blocks: int, delay_micros: int) -> tuple[Device, L0, Job]:
    """A copy that takes a while: by delays, or on a real GPU by its size."""
    device = make(blocks + 1, threads=1, delay_micros=delay_micros)
    block_bytes = 4096
    if device.gpu is not None and not isinstance(device.gpu, FakeGpu):
        blocks, block_bytes = 200, 2 << 20
        device = make(blocks + 1, page_bytes=block_bytes, batch_bytes=8 << 20)
    job = Job(range(1, blocks + 1), range(blocks), 1, 1)
    return device, L0(device, flat(blocks + 1, block_bytes)), job


def ended(device: Device, ticket: int) -> End:
    end = device.wait(ticket)
    time.sleep(0.01)
    device.drain()  # the rig holds that no ticket ends twice
    return end


class TestWhole:
    def test_a_store_and_a_load_move_their_bytes_and_no_others(self, make: Make) -> None:
        device = make(page_bytes=509)
        l0 = L0(device, awkward(24))
        l1 = device.fill_l1()
        job = Job([3, 17, 5, 20, 9], random.Random(1).sample(range(64), 63), 21, 2, 1)
        end = device.store(l0, job)
        assert (end.outcome, end.bytes, end.what) == (Outcome.DONE, 5 * l0.geometry.block_bytes, "")
        after = device.read_l1()
        assert after == l1_after_store(l1, job, l0.memory, 509)
        l0.memory.fill()
        expected = l0_after_load(after, job, l0.memory, 509)
        assert device.load(l0, job).outcome == Outcome.DONE
        assert l0.memory.image() == expected
        assert device.read_l1() == after

    def test_groups_have_blocks_of_their_own_and_a_load_leaves_the_holes_alone(self, make: Make) -> None:
        device = make(100, page_bytes=509)
        l0 = L0(device, two_groups(num_blocks=32))
        size = l0.geometry.block_bytes
        pages_per_slot = -(-2 * size // 509)
        pages = random.Random(2).sample(range(100), 2 * pages_per_slot)
        l1 = device.fill_l1()
        stored = Job([(1, 2), (3, 4), (5, 6)], pages, pages_per_slot, 2)
        end = device.store(l0, stored)
        assert (end.outcome, end.bytes) == (Outcome.DONE, 3 * size)
        after = device.read_l1()
        assert after == l1_after_store(l1, stored, l0.memory, 509)
        l0.memory.fill()
        holed = Job([(NO_BLOCK, 21), (22, NO_BLOCK)], pages, pages_per_slot, 2, skip=1)
        expected = l0_after_load(after, holed, l0.memory, 509)
        end = device.load(l0, holed)
        assert (end.outcome, end.bytes) == (Outcome.DONE, size), "one whole position in two halves"
        assert l0.memory.image() == expected

    @BOTH
    def test_the_word_is_done_by_the_time_the_end_is_reported(self, make: Make, direction: Direction) -> None:
        device = make()
        l0 = L0(device, flat(4, 64))
        assert ended(device, device.submit_with_word(direction, l0, Job([1], [0], 1, 1))).outcome == Outcome.DONE
        assert l0.words.state(0) == State.DONE

    def test_the_descriptor_is_readable_while_an_end_waits(self, make: Make) -> None:
        device = make()
        l0 = L0(device, flat(4, 64))
        ticket = device.submit(STORE, l0, Job([1], [0], 1, 1))
        if device.fake is not None:
            device.fake.release(ticket)
        assert select.select([device.native.completion_fd], [], [], 20)[0]
        device.wait(ticket)
        assert not select.select([device.native.completion_fd], [], [], 0)[0]

    def test_a_working_device_is_not_lost(self, make: Make) -> None:
        assert make().native.lost == ""


class TestRefusals:
    @pytest.mark.parametrize(
        ("job", "why"),
        [
            (Job([], [0], 1, 1), "blocks"),
            (Job([4], [0], 1, 1), "block id 4 is out of range"),
            (Job([1], [64], 1, 1), "page 64"),
            (Job([1, 2], [0], 1, 1), "more blocks"),
            (Job([1], [0], 1, 1, skip=1), "more blocks"),
            (Job([1], [0], 1, 65), "too few pages"),
            (Job([1], [0], 0, 1), "no whole slots"),
            (Job([1], [0, 1, 2], 2, 1), "no whole slots"),
            (Job([1], [], 1, 1), "more blocks"),
            (Job([NO_BLOCK], [0], 1, 1), "block id"),
        ],
    )
    def test_a_bad_job_is_refused_and_moves_no_word(self, make: Make, job: Job, why: str) -> None:
        device = make()
        l0 = L0(device, flat(4, 64))
        with pytest.raises(ValueError, match=why):
            device.submit_with_word(STORE, l0, job)
        assert l0.words.state(0) == State.PENDING
        assert device.drain() == []

    @BOTH
    def test_a_late_copy_moves_no_byte(self, make: Make, direction: Direction) -> None:
        device = make()
        l0 = L0(device, flat(4, 64))
        image, l1 = l0.memory.image(), device.fill_l1()
        l0.words.arm(0, 1)
        ticket = device.submit(
            direction, l0, Job([1], [0], 1, 1), word_memory=l0.mappings[-1], sequence=1, deadline_nanos=1
        )
        end = ended(device, ticket)
        assert (end.outcome, end.bytes, l0.words.state(0)) == (Outcome.LATE, 0, State.FAILED)
        assert (l0.memory.image(), device.read_l1()) == (image, l1)

    @BOTH
    def test_a_copy_that_was_cancelled_before_it_began_moves_no_byte(self, make: Make, direction: Direction) -> None:
        device = make()
        l0 = L0(device, flat(4, 64))
        image, l1 = l0.memory.image(), device.fill_l1()
        l0.words.arm(0, 1)
        assert l0.words.move(0, 1, State.PENDING, State.CANCELLED)
        ticket = device.submit(direction, l0, Job([1], [0], 1, 1), word_memory=l0.mappings[-1], sequence=1)
        end = ended(device, ticket)
        assert (end.outcome, end.bytes, l0.words.state(0)) == (Outcome.CANCELLED, 0, State.CANCELLED)
        assert (l0.memory.image(), device.read_l1()) == (image, l1)

    def test_a_cancel_of_an_unknown_ticket_is_ignored(self, make: Make) -> None:
        device = make()
        l0 = L0(device, flat(4, 64))
        device.native.cancel(12345)
        ticket = device.submit(STORE, l0, Job([1], [0], 1, 1))
        assert device.wait(ticket).outcome == Outcome.DONE
        device.native.cancel(ticket)


class TestCancels:
    def begun(self, make: Make, direction: Direction) -> tuple[Device, L0, int]:
        """A copy that runs and is far from its end."""
        device, l0, job = long_copy(make, 200, 2000)
        ticket = device.submit_with_word(direction, l0, job)
        if device.fake is not None:
            device.fake.run(ticket, 3)
        wait_until(lambda: l0.words.state(0) == State.RUNNING, what="RUNNING")
        return device, l0, ticket

    @BOTH
    def test_the_server_ends_a_running_copy(self, make: Make, direction: Direction) -> None:
        device, l0, ticket = self.begun(make, direction)
        device.native.cancel(ticket)
        end = ended(device, ticket)
        assert (end.outcome, l0.words.state(0)) == (Outcome.CANCELLED, State.FAILED)
        assert end.bytes < 200 * l0.geometry.block_bytes

    def test_a_store_that_its_worker_cancelled_never_counts(self, make: Make) -> None:
        device, l0, ticket = self.begun(make, STORE)
        assert l0.words.move(0, 1, State.RUNNING, State.CANCELLED)
        assert ended(device, ticket).outcome == Outcome.CANCELLED
        assert l0.words.state(0) == State.CANCELLED

    def test_nothing_is_written_after_a_cancelled_load_was_acknowledged(self, make: Make) -> None:
        device, l0, ticket = self.begun(make, LOAD)
        assert l0.words.move(0, 1, State.RUNNING, State.CANCELLING)
        assert device.wait(ticket).outcome == Outcome.CANCELLED
        assert l0.words.state(0) == State.CANCELLED
        image = l0.memory.image()
        time.sleep(0.05)
        assert l0.memory.image() == image

    def test_a_device_that_is_dropped_stops_writing(self, make: Make) -> None:
        device, l0, _ = self.begun(make, LOAD)
        device.fake = None
        del device.native
        gc.collect()
        l0.memory.fill()
        image = l0.memory.image()
        time.sleep(0.05)
        assert l0.memory.image() == image


class TestMemory:
    @BOTH
    def test_memory_that_was_truncated_is_lost(self, make: Make, direction: Direction) -> None:
        device = make()
        if device.gpu is not None:
            pytest.skip("a GPU's memory cannot be truncated")
        l0 = L0(device, flat(9, 4096))
        l0.memory.truncate()
        end = ended(device, device.submit_with_word(direction, l0, Job(range(1, 9), range(8), 1, 1)))
        assert (end.outcome, l0.words.state(0)) == (Outcome.MEMORY_LOST, State.FAILED)
        assert "truncated" in end.what

    def test_a_map_that_fails_leaves_nothing_mapped(self, make: Make) -> None:
        device = make()
        whole, words = device.allocate(4096), os.memfd_create("b")
        mappings = [device.mapping(os.dup(whole.fds[0]), 4096), WordMapping(words, 8)]
        end = device.map(mappings)
        assert end.outcome == Outcome.FAILED
        assert "sealed" in end.what
        assert not any(mapping.mapped for mapping in mappings)
        whole.close()

    def test_an_unmap_ends_whatever_was_mapped(self, make: Make) -> None:
        device = make()
        l0 = L0(device, flat(4, 64))
        assert device.unmap(l0.mappings).outcome == Outcome.DONE
        assert not any(mapping.mapped for mapping in l0.mappings)
        assert device.unmap(l0.mappings).outcome == Outcome.DONE

    def test_a_page_that_is_not_sealed_holds_no_words(self, make: Make) -> None:
        device = make()
        fd = os.memfd_create("words", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 8)
        assert "sealed" in device.map([WordMapping(fd, 8)]).what


@pytest.mark.parametrize("seed", range(3))
def test_every_ticket_ends_once_in_whatever_order(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    device = make(64, threads=2)
    l0 = L0(device, flat(65, 4096))
    open_tickets: dict[int, int] = {}  # ticket -> word
    for turn in range(300):
        free = set(range(16)) - set(open_tickets.values())
        if free:
            n = rng.choice(sorted(free))  # word, four blocks and four pages of its own
            blocks, pages = range(1 + 4 * n, 5 + 4 * n), range(4 * n, 4 * n + 4)
            direction = rng.choice([STORE, LOAD])
            ticket = device.submit_with_word(direction, l0, Job(blocks, pages, 1, 1), n, turn + 1)
            open_tickets[ticket] = n
        chosen = rng.choice(sorted(open_tickets))
        if rng.random() < 0.2:
            device.native.cancel(chosen)
        elif rng.random() < 0.5:
            device.wait(chosen)
        for ticket in set(open_tickets) & set(device.ended):
            state = l0.words.state(open_tickets.pop(ticket))
            done = device.ended[ticket].outcome == Outcome.DONE
            assert state == (State.DONE if done else State.FAILED)
    for ticket in open_tickets:
        device.wait(ticket)


class TestPythonRunsOn:
    """No call holds the interpreter's lock while bytes move or threads are joined."""

    def count_during(self, act: Callable[[], object]) -> int:
        """How often another thread ran meanwhile."""
        turns, over, counting = 0, threading.Event(), threading.Event()

        def count() -> None:
            nonlocal turns
            counting.set()
            while not over.is_set():
                turns += 1

        thread = threading.Thread(target=count)
        thread.start()
        counting.wait()
        before = turns
        act()
        after = turns
        over.set()
        thread.join()
        return after - before

    def test_python_runs_on_while_a_device_is_dropped_that_still_copies(self) -> None:
        device = Device(64, threads=1, delay_micros=200_000)
        l0 = L0(device, flat(9, 4096))
        device.submit_with_word(LOAD, l0, Job(range(1, 9), range(8), 1, 1))
        wait_until(lambda: l0.words.state(0) == State.RUNNING)
        assert self.count_during(lambda: delattr(device, "native")) > 1000

    @pytest.mark.parametrize("act", ["release", "release_all", "run", "fail", "step"])
    def test_python_runs_on_while_the_fake_device_copies(self, act: str) -> None:
        device = Device(64, fake_seed=1, delay_micros=100_000)
        l0 = L0(device, flat(9, 4096))
        ticket = device.submit(STORE, l0, Job([1, 2], [0, 1], 1, 1))
        fake = device.fake
        assert fake is not None
        fake.run(ticket, 0)
        calls: dict[str, Callable[[], None]] = {
            "release": lambda: fake.release(ticket),
            "release_all": lambda: fake.release_all(Order.REVERSED),
            "run": lambda: fake.run(ticket, 2),
            "fail": lambda: fake.fail(ticket, 2, "x"),
            "step": fake.step,
        }
        assert self.count_during(calls[act]) > 1000

    def test_no_call_waits_for_a_copy_that_runs(self, make: Make) -> None:
        """Each returns while a block is still under way."""
        device, l0, job = long_copy(make, 8, 300_000)
        words = WordPage(1)
        spare = WordMapping(os.dup(words.fd), 8)
        ticket = device.submit_with_word(STORE, l0, job)
        runner = threading.Thread(target=lambda: device.fake and device.fake.run(ticket, 8))
        runner.start()
        wait_until(lambda: l0.words.state(0) == State.RUNNING)
        device.submit(STORE, l0, Job([1], [len(job.pages)], 1, 1))
        device.native.submit_map(1001, [spare])
        device.native.cancel(ticket)
        device.native.drain()
        assert l0.words.state(0) == State.RUNNING, "one of them waited"
        runner.join()
