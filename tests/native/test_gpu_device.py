"""A GPU as a device (`csrc/gpu/gpu_device.h`), over a simulated one: ways, batches, pinning, failures and loss.

What every device must hold is in test_device_contract.py, over the same GPU.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest
from support.daemon import wait_until
from support.memory import Geometry, awkward
from support.simulators import FakeGpu

from kvserver._native import (
    PIN_BYTES,
    Direction,
    GpuDevice,
    GpuMapping,
    HostRegion,
    Outcome,
    Pinner,
    PlaneTable,
    State,
    Way,
)
from kvserver.protocol import Plane

from .rig import L0, Device, Job, flat, l0_after_load, l1_after_store

STORE, LOAD = Direction.STORE, Direction.LOAD
BOTH = pytest.mark.parametrize("direction", [STORE, LOAD])
KiB = 1 << 10


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    gpu = FakeGpu("GPU-0", seed=1)
    yield gpu
    gpu.resume()
    assert gpu.faults == []


def counts(device: Device, direction: Direction) -> dict[str, int]:
    assert isinstance(device.native, GpuDevice)
    return dict(zip(("dma", "staged", "unpinned", "staging"), device.native.counts(direction), strict=True))


def layered(blocks: int, layers: int, run: int) -> Geometry:
    """One memory, as many planes as layers, each block's runs apart."""
    size = blocks * run
    planes = tuple(Plane(0, layer * size, run, run) for layer in range(layers))
    return Geometry(blocks, 16, (layers * size,), planes)


class TestWays:
    @pytest.mark.parametrize(
        ("kib", "direction", "way"),
        [(12, STORE, "staged"), (12, LOAD, "staged"), (16, STORE, "dma"), (16, LOAD, "staged")],
    )
    def test_short_runs_are_staged_and_stores_sooner_go_by_dma(
        self, gpu: FakeGpu, kib: int, direction: Direction, way: str
    ) -> None:
        device = Device(64, gpu=gpu, batch_bytes=1 << 20)
        l0 = L0(device, layered(11, kib, 1 * KiB))
        pages = kib // 4
        end = device.wait(device.submit(direction, l0, Job(range(1, 11), range(10 * pages), pages, 1)))
        assert (end.outcome, end.bytes) == (Outcome.DONE, 10 * kib * KiB)
        found = counts(device, direction)
        assert (found[way], found["dma"] + found["staged"]) == (end.bytes, end.bytes)

    def test_short_runs_of_many_equally_spaced_planes_are_loaded_by_dma(self, gpu: FakeGpu) -> None:
        """One piece a block carries them all: 28 of 1 KiB are as good as one of 28 KiB."""
        device = Device(63, gpu=gpu, batch_bytes=1 << 20)
        l0 = L0(device, layered(19, 28, 1 * KiB))
        assert device.load(l0, Job(range(18, 9, -1), range(63), 7, 1)).outcome == Outcome.DONE
        assert counts(device, LOAD) == {"dma": 252 * KiB, "staged": 0, "unpinned": 252 * KiB, "staging": 0}
        step = 19 * KiB
        uneven = tuple(Plane(0, n * step + n * n, 1 * KiB, 1 * KiB) for n in range(28))
        l0 = L0(device, Geometry(19, 16, (28 * step + 27 * 27,), uneven))
        assert device.load(l0, Job(range(18, 9, -1), range(63), 7, 1)).outcome == Outcome.DONE
        assert counts(device, LOAD)["staged"] == 252 * KiB

    @pytest.mark.parametrize(
        ("direction", "limits", "way"),
        [
            (STORE, {"short_store_bytes": 16 * KiB + 1}, "staged"),
            (STORE, {"short_store_bytes": 16 * KiB, "short_load_bytes": 1 << 30}, "dma"),
            (LOAD, {"short_load_bytes": 16 * KiB + 1}, "staged"),
            (LOAD, {"short_load_bytes": 16 * KiB, "short_store_bytes": 1 << 30}, "dma"),
        ],
    )
    def test_each_direction_has_a_limit_of_its_own(
        self, gpu: FakeGpu, direction: Direction, limits: dict[str, int], way: str
    ) -> None:
        device = Device(64, gpu=gpu, batch_bytes=1 << 20, **limits)
        l0 = L0(device, layered(11, 16, 1 * KiB))
        end = device.wait(device.submit(direction, l0, Job(range(1, 11), range(40), 4, 1)))
        assert counts(device, direction)[way] == end.bytes == 160 * KiB

    @BOTH
    def test_long_runs_go_by_dma(self, gpu: FakeGpu, direction: Direction) -> None:
        device = Device(8 * 4 * 7, gpu=gpu, batch_bytes=1 << 20)
        l0 = L0(device, layered(9, 4, 28 * KiB))
        end = device.wait(device.submit(direction, l0, Job(range(1, 9), range(8 * 28), 28, 1)))
        assert (end.outcome, end.bytes) == (Outcome.DONE, 8 * 4 * 28 * KiB)
        assert counts(device, direction)["dma"] == end.bytes
        assert counts(device, direction)["staging"] == 0, "memory of the GPU is taken when it is needed"

    def test_few_short_runs_go_by_dma(self, gpu: FakeGpu) -> None:
        device = Device(8, gpu=gpu)
        l0 = L0(device, layered(9, 4, 1 * KiB))
        assert device.load(l0, Job([1, 2], [0, 1], 1, 1)).outcome == Outcome.DONE
        assert counts(device, LOAD)["dma"] == 8 * KiB

    @pytest.mark.parametrize("way", [Way.DMA, Way.STAGED])
    @pytest.mark.parametrize("batch_bytes", [1, 700, 30_000, 1 << 20])
    def test_batches_of_any_size_move_the_same_bytes(self, gpu: FakeGpu, way: Way, batch_bytes: int) -> None:
        device = Device(64, 509, gpu=gpu, way=way, batch_bytes=batch_bytes)
        l0 = L0(device, awkward(24))
        l1 = device.fill_l1()
        job = Job([3, 17, 5, 20, 9], random.Random(1).sample(range(64), 63), 21, 2, 1)
        assert device.store(l0, job).outcome == Outcome.DONE
        after = device.read_l1()
        assert after == l1_after_store(l1, job, l0.memory, 509)
        l0.memory.fill()
        expected = l0_after_load(after, job, l0.memory, 509)
        assert device.load(l0, job).outcome == Outcome.DONE
        assert l0.memory.image() == expected

    def test_a_block_larger_than_a_batch_goes_by_dma(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu, way=Way.STAGED, batch_bytes=4 * KiB)
        l0 = L0(device, layered(9, 16, 1 * KiB))
        assert device.store(l0, Job(range(1, 9), range(32), 4, 1)).outcome == Outcome.DONE
        assert counts(device, STORE)["dma"] == 8 * 16 * KiB

    def test_a_staged_copy_waits_for_nothing_while_it_is_queued(self, gpu: FakeGpu) -> None:
        """A copy's planes travel with it: tables are made and dropped without a trace on the GPU."""
        device = Device(64, gpu=gpu, way=Way.STAGED)
        job = Job(range(1, 9), range(32), 4, 1)
        allocated, waits = set(), []
        for layers in (16, 15, 14):
            l0 = L0(device, layered(9, layers, 1 * KiB))
            before = gpu.calls.get("wait", 0)
            assert (device.store(l0, job).outcome, device.load(l0, job).outcome) == (Outcome.DONE, Outcome.DONE)
            waits.append(gpu.calls["wait"] - before)
            device.unmap(l0.mappings)
            allocated.add(gpu.allocated_bytes)
        batches = -(-8 * 16 // 16)
        assert waits == [2 * batches] * 3, "one for each batch's end"
        assert len(allocated) == 1

    def test_a_table_of_very_many_planes_goes_by_dma(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu, way=Way.STAGED, batch_bytes=1 << 20)
        planes = 8000
        uneven = tuple(Plane(0, n * 20 + n % 3, 20 * planes, 16) for n in range(planes))
        l0 = L0(device, Geometry(3, 16, (3 * 20 * planes,), uneven))
        job = Job([1, 2], range(64), 32, 1)
        l1 = device.fill_l1()
        assert device.store(l0, job).outcome == Outcome.DONE
        assert device.read_l1() == l1_after_store(l1, job, l0.memory, 4096)
        assert counts(device, STORE)["staged"] == 64 * 4096, "only the reference's own copy"

    def test_a_short_job_goes_before_the_next_batch_of_a_longer_one(self) -> None:
        gpu = FakeGpu("GPU-0", delay_micros=2000)
        device = Device(200, gpu=gpu, batch_bytes=4 * KiB)
        l0 = L0(device, flat(202, 4 * KiB))
        long = device.submit_with_word(STORE, l0, Job(range(1, 200), range(199), 1, 1))
        wait_until(lambda: l0.words.state(0) == State.RUNNING)
        short = device.submit(STORE, l0, Job([200], [199], 1, 1))
        assert device.wait(short).outcome == Outcome.DONE
        assert long not in device.ended
        device.native.cancel(long)
        device.wait(long)

    def test_loads_go_on_while_stores_stand_still(self) -> None:
        gpu = FakeGpu("GPU-0", delay_micros=100_000)
        device = Device(64, gpu=gpu, batch_bytes=4 * KiB)
        l0 = L0(device, flat(64, 4 * KiB))
        stores = [device.submit(STORE, l0, Job([n], [n], 1, 1)) for n in range(1, 40)]
        assert device.load(l0, Job([50], [50], 1, 1)).outcome == Outcome.DONE
        assert len(set(stores) & set(device.ended)) < 20


class TestPinning:
    def test_l1_is_pinned_while_it_is_used_and_no_byte_of_it_changes(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu)
        l1 = device.fill_l1()
        pinner = Pinner(device.region, gpu, 2)
        wait_until(lambda pinner=pinner: pinner.done)
        assert (pinner.error, device.region.pinned_bytes, gpu.registered_bytes) == ("", 64 * 4096, 64 * 4096)
        assert device.read_l1() == l1
        before = counts(device, STORE)["unpinned"]
        l0 = L0(device, flat(9, 4096))
        assert device.store(l0, Job(range(1, 9), range(8), 1, 1)).outcome == Outcome.DONE
        assert counts(device, STORE)["unpinned"] == before
        del pinner
        assert (device.region.pinned_bytes, gpu.registered_bytes) == (0, 0)

    def test_no_copy_spans_two_registrations(self, gpu: FakeGpu) -> None:
        """The fake GPU complains of a piece that does; see the fixture."""
        pages = PIN_BYTES // 4096 + 8
        device = Device(pages, gpu=gpu, batch_bytes=1 << 20)
        pinner = Pinner(device.region, gpu, 2)
        wait_until(lambda: pinner.done, seconds=60)
        assert gpu.calls["pin"] == 2
        l0 = L0(device, flat(17, 4096))
        across = Job(range(1, 17), range(pages - 16, pages), 16, 16)
        assert device.store(l0, across).outcome == Outcome.DONE
        content = l0.memory.image()
        l0.memory.fill()
        assert device.load(l0, across).outcome == Outcome.DONE
        assert l0.memory.image()[0][4096:] == content[0][4096:]
        assert counts(device, STORE)["unpinned"] == 0

    def test_pinning_that_fails_leaves_the_rest_unpinned_and_in_use(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu)
        gpu.fail_next("pin", "cudaHostRegister: no more locked memory")
        pinner = Pinner(device.region, gpu, 1)
        wait_until(lambda: pinner.done)
        assert "no more locked memory" in pinner.error
        l0 = L0(device, flat(9, 4096))
        assert device.store(l0, Job(range(1, 9), range(8), 1, 1)).outcome == Outcome.DONE
        assert counts(device, STORE)["unpinned"] == 8 * 4096


class TestMemory:
    def test_a_full_gpu_is_served_by_dma(self) -> None:
        gpu = FakeGpu("GPU-0", memory_bytes=14 << 20)
        device = Device(64, gpu=gpu, way=Way.STAGED, batch_bytes=4 << 20)
        l0 = L0(device, layered(9, 16, 1 * KiB))
        for _ in range(3):
            assert device.store(l0, Job(range(1, 9), range(32), 4, 1)).outcome == Outcome.DONE
        assert counts(device, STORE) == {
            "dma": 3 * 8 * 16 * KiB, "staged": 0, "unpinned": 3 * 8 * 16 * KiB, "staging": 0
        }  # fmt: skip
        assert gpu.calls["allocate"] < 12, "it does not try again for every copy"
        assert gpu.allocated_bytes < 4 << 20, "what it got was not enough, and was freed"

    def test_staging_memory_is_there_for_every_batch_or_for_none(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu, way=Way.DMA)
        l0, job = L0(device, layered(9, 16, 1 * KiB)), Job(range(1, 9), range(32), 4, 1)
        assert device.store(l0, job).outcome == Outcome.DONE
        tables = gpu.allocated_bytes
        staging = Device(64, gpu=gpu, way=Way.STAGED, batch_bytes=16 * KiB)
        l0 = L0(staging, layered(9, 16, 1 * KiB))
        gpu.fail_next("allocate", "odd", after=6)
        end = staging.store(l0, job)
        assert (end.outcome, end.what) == (Outcome.FAILED, "odd")
        assert gpu.allocated_bytes == 2 * tables, "four tables, and two memories for staging that are free again"
        assert staging.store(l0, job).outcome == Outcome.DONE
        assert counts(staging, STORE)["staging"] == gpu.allocated_bytes - 2 * tables == 4 * 16 * KiB

    def test_a_device_frees_what_it_allocated(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu, way=Way.STAGED)
        l0 = L0(device, layered(9, 16, 1 * KiB))
        job = Job(range(1, 9), range(32), 4, 1)
        assert (device.store(l0, job).outcome, device.load(l0, job).outcome) == (Outcome.DONE, Outcome.DONE)
        assert gpu.allocated_bytes > 0
        device.unmap(l0.mappings)
        del device.native
        assert (gpu.allocated_bytes, gpu.open_memories) == (0, 0)
        made, freed = gpu.calls["make_event"], gpu.calls["free_event"]
        assert (made, gpu.calls["make_stream"]) == (freed, gpu.calls["free_stream"])

    def test_one_allocation_is_opened_once_and_closed_by_the_last(self, gpu: FakeGpu) -> None:
        device = Device(gpu=gpu)
        fd = os.memfd_create("allocation")
        os.ftruncate(fd, 8192)
        handle = f"/proc/self/fd/{fd}".encode().ljust(64, b"\0")
        one, other = (GpuMapping.by_ipc(gpu, handle, offset, 4096) for offset in (0, 4096))
        assert device.map([one]).outcome == device.map([other]).outcome == Outcome.DONE
        assert gpu.open_memories == 1
        device.unmap([one])
        assert (gpu.open_memories, other.mapped) == (1, True)
        device.unmap([other])
        assert gpu.open_memories == 0

    @pytest.mark.parametrize(("offset", "size"), [(0, 8193), (8192, 1), (1 << 62, 1 << 62), (0, 0), ((1 << 64) - 1, 2)])
    def test_a_window_outside_the_allocation_is_refused_and_nothing_stays_open(
        self, gpu: FakeGpu, offset: int, size: int
    ) -> None:
        device = Device(gpu=gpu)
        fd = os.memfd_create("allocation")
        os.ftruncate(fd, 8192)
        mapping = GpuMapping.by_fd(gpu, fd, offset, size)
        end = device.map([mapping])
        assert end.outcome == Outcome.FAILED
        assert (mapping.mapped, gpu.open_memories) == (False, 0)

    def test_planes_of_another_gpu_and_of_the_host_are_refused(self, gpu: FakeGpu) -> None:
        other = Device(gpu=FakeGpu("GPU-1"))
        device = Device(gpu=gpu)
        for table in (L0(other, flat(4, 64)).table, L0(Device(), flat(4, 64)).table):
            with pytest.raises(ValueError, match="not this GPU's"):
                device.native.submit_copy(1, **Job([1], [0], 1, 1).arguments(STORE, table))
        with pytest.raises(ValueError, match="no host memory"):
            Device().native.submit_copy(1, **Job([1], [0], 1, 1).arguments(STORE, L0(device, flat(4, 64)).table))


CALLS = ["enter", "make_stream", "make_event", "allocate_pinned", "allocate", "copy", "copy_blocks", "record"]
WAITS = ["wait", "nanos_between"]


class TestFailures:
    """A call that fails is a typed end of one ticket; one that takes the GPU with it ends all of them."""

    def begin(self, gpu: FakeGpu) -> tuple[Device, L0, Job]:
        device = Device(64, gpu=gpu, way=Way.STAGED, batch_bytes=32 * KiB)
        return device, L0(device, layered(9, 16, 1 * KiB)), Job(range(1, 9), range(32), 4, 1)

    @BOTH
    @pytest.mark.parametrize("call", CALLS)
    def test_a_call_that_fails_ends_its_ticket_and_no_other(
        self, gpu: FakeGpu, direction: Direction, call: str
    ) -> None:
        device, l0, job = self.begin(gpu)
        gpu.fail_next(call, f"{call} failed")
        ticket = device.submit_with_word(direction, l0, job)
        end = device.wait(ticket)
        assert (end.outcome, end.what, l0.words.state(0)) == (Outcome.FAILED, f"{call} failed", State.FAILED)
        assert device.native.lost == ""
        again = device.submit_with_word(direction, l0, job, sequence=2)
        assert (device.wait(again).outcome, l0.words.state(0)) == (Outcome.DONE, State.DONE)

    @BOTH
    @pytest.mark.parametrize("call", [*CALLS, *WAITS])
    def test_a_call_that_takes_the_gpu_with_it_ends_every_ticket(
        self, gpu: FakeGpu, direction: Direction, call: str
    ) -> None:
        device, l0, job = self.begin(gpu)
        gpu.fail_next(call, "an illegal address was met", lost=True)
        tickets = [device.submit_with_word(d, l0, job, word) for word, d in enumerate([direction, STORE, LOAD])]
        ends = [device.wait(ticket) for ticket in tickets]
        assert ends[0].outcome == Outcome.DEVICE_LOST
        assert {end.outcome for end in ends} <= {Outcome.DEVICE_LOST, Outcome.DONE}
        for word, end in enumerate(ends):
            done = end.outcome == Outcome.DONE
            assert l0.words.state(word) == (State.DONE if done else State.FAILED)
        assert device.native.lost == "an illegal address was met"
        self.assert_quiet(device, gpu, l0, job)

    def test_a_gpu_that_dies_by_itself_ends_every_ticket(self) -> None:
        gpu = FakeGpu("GPU-0")
        device, l0, job = self.begin(gpu)
        gpu.pause()
        tickets = [
            device.submit_with_word(direction, l0, job, word) for word, direction in enumerate([STORE, LOAD, STORE])
        ]
        wait_until(lambda: l0.words.state(0) == l0.words.state(1) == State.RUNNING)
        gpu.die("Xid 79: fallen off the bus")
        for word, ticket in enumerate(tickets):
            end = device.wait(ticket)
            assert (end.outcome, l0.words.state(word)) == (Outcome.DEVICE_LOST, State.FAILED)
        self.assert_quiet(device, gpu, l0, job)

    def assert_quiet(self, device: Device, gpu: FakeGpu, l0: L0, job: Job) -> None:
        """Work after the loss makes no call; unmaps are done, and end as DONE."""
        before, deadline = {}, time.monotonic() + 60
        while before != gpu.calls:  # a thread may have been on its way into a call
            assert time.monotonic() < deadline, "calls go on"
            before = gpu.calls
            time.sleep(0.1)
        assert device.store(l0, job).outcome == device.load(l0, job).outcome == Outcome.DEVICE_LOST
        assert device.map([]).outcome == Outcome.DEVICE_LOST
        assert device.unmap(l0.mappings).outcome == Outcome.DONE
        del device.native
        assert gpu.calls == before

    def test_a_map_that_the_driver_refuses_ends_with_the_reason(self, gpu: FakeGpu) -> None:
        device = Device(gpu=gpu)
        for call in ("enter", "open"):
            gpu.fail_next(call, "cudaIpcOpenMemHandle: invalid device context (201)")
            fd = os.memfd_create("allocation")
            os.ftruncate(fd, 4096)
            mapping = GpuMapping.by_fd(gpu, fd, 0, 4096)
            end = device.map([mapping])
            assert (end.outcome, mapping.mapped) == (Outcome.FAILED, False)
            assert "201" in end.what

    def test_memory_that_cannot_be_unmapped_is_reported_and_the_rest_unmapped(self, gpu: FakeGpu) -> None:
        device, l0, job = self.begin(gpu)
        other = L0(device, layered(9, 16, 1 * KiB))
        gpu.fail_next("close", "cudaIpcCloseMemHandle: invalid value")
        end = device.unmap([*other.mappings[:-1], *l0.mappings])
        assert (end.outcome, end.what) == (Outcome.FAILED, "cudaIpcCloseMemHandle: invalid value")
        assert [m.mapped for m in (*other.mappings[:-1], *l0.mappings)] == [False] * 3
        assert (gpu.open_memories, device.native.lost) == (1, "")
        assert device.store(L0(device, layered(9, 16, 1 * KiB)), job).outcome == Outcome.DONE

    @BOTH
    @pytest.mark.parametrize("call", ["record", "wait"])
    def test_an_event_that_fails_fails_its_copy_when_its_stream_has_ended(
        self, gpu: FakeGpu, direction: Direction, call: str
    ) -> None:
        """`record`: of the fifth batch, with four in flight."""
        device = Device(64, gpu=gpu, way=Way.STAGED, batch_bytes=16 * KiB, pinned=True)
        l0, job = L0(device, layered(9, 16, 1 * KiB)), Job(range(1, 9), range(32), 4, 1)
        assert device.wait(device.submit(direction, l0, job)).outcome == Outcome.DONE
        gpu.pause()
        recorded, waited = gpu.calls["record"], gpu.calls["wait"]
        ticket = device.submit_with_word(direction, l0, job)
        wait_until(lambda: gpu.calls["record"] == recorded + 5 and gpu.calls["wait"] > waited)
        gpu.fail_next(call, f"{call} failed")
        time.sleep(0.1)
        assert device.drain() == []
        gpu.resume()
        end = device.wait(ticket)
        assert (end.outcome, end.what, l0.words.state(0)) == (Outcome.FAILED, f"{call} failed", State.FAILED)
        assert (gpu.calls["finish"], device.native.lost) == (1, "")
        assert device.wait(device.submit(direction, l0, job)).outcome == Outcome.DONE

    def test_an_unknown_time_harms_no_copy(self, gpu: FakeGpu) -> None:
        device, l0, job = self.begin(gpu)
        gpu.fail_next("nanos_between", "cudaEventElapsedTime: invalid resource handle")
        assert device.store(l0, job).outcome == Outcome.DONE
        assert device.native.lost == ""

    def test_a_stream_that_never_reports_its_end_loses_the_gpu(self, gpu: FakeGpu) -> None:
        device, l0, job = self.begin(gpu)
        assert device.store(l0, job).outcome == Outcome.DONE
        gpu.fail_next("wait", "an odd error")
        gpu.fail_next("finish", "another one")
        ticket = device.submit(STORE, l0, job)
        wait_until(lambda: device.native.lost)
        assert "another one" in device.native.lost
        assert device.wait(ticket).outcome == Outcome.DEVICE_LOST, "asked again, it reported the loss"

    def test_memory_whose_size_the_driver_does_not_know_is_mapped(self, gpu: FakeGpu) -> None:
        device = Device(64, gpu=gpu)
        gpu.fail_next("address_range", "cuMemGetAddressRange: named symbol not found (500)")
        l0 = L0(device, flat(9, 4096))
        assert device.store(l0, Job(range(1, 9), range(8), 1, 1)).outcome == Outcome.DONE
        assert device.native.lost == ""

    def test_a_hung_gpu_holds_up_neither_calls_nor_the_other_gpu(self, gpu: FakeGpu) -> None:
        device, l0, job = self.begin(gpu)
        other_gpu = FakeGpu("GPU-1", seed=2)
        other = Device(64, gpu=other_gpu)
        theirs = L0(other, flat(9, 4096))
        gpu.pause()
        stuck = device.submit_with_word(STORE, l0, job)
        wait_until(lambda: l0.words.state(0) == State.RUNNING)
        device.native.cancel(stuck)
        assert other.store(theirs, Job(range(1, 9), range(8), 1, 1)).outcome == Outcome.DONE
        assert device.drain() == []
        gpu.resume()
        assert device.wait(stuck).outcome == Outcome.CANCELLED


def test_a_table_keeps_its_planes_in_slot_order(gpu: FakeGpu) -> None:
    """What the kernels rely on: `copy_blocks.h`."""
    device = Device(gpu=gpu)
    l0 = L0(device, awkward(24))
    rows = [(p.memory, p.offset, p.stride_bytes, p.run_bytes, p.group) for p in l0.geometry.planes]
    assert PlaneTable(l0.mappings[:-1], rows[::-1], 24).block_bytes == l0.table.block_bytes


def test_a_batch_must_hold_a_byte(gpu: FakeGpu) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        GpuDevice(HostRegion(4096), 4096, gpu, 0)
