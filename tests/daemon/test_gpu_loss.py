"""A GPU is lost, whichever call reports it: all that is open ends at once, with the reason, and it is left alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import mortal_gpus
from support.daemon import GPUS, Daemon, fetch, wait_until
from support.server import L1_BYTES, PAGE_BYTES, Running, running_server
from support.simulators import FakeGpu
from support.worker import Worker, make_keys

from kvserver._native import CpuDevice, HostRegion, State
from kvserver.config.settings import MiB
from kvserver.copy import Devices, GpuRules
from kvserver.protocol import Error, Reply, Stored
from kvserver.protocol.client import RequestFailed

REASON = mortal_gpus.REASON


class Machine:
    """A server over a simulated GPU."""

    def __init__(self, gpu: FakeGpu, running: Running) -> None:
        self.gpu = gpu
        self.port = running.pages.port
        self.endpoint = running.endpoint

    def worker(self, gpu: str = GPUS[0]) -> Worker:
        return Worker(self.endpoint, gpu=gpu)

    def get(self, path: str) -> tuple[int, str]:
        return fetch(f"http://127.0.0.1:{self.port}{path}")

    @property
    def status(self) -> dict:
        return json.loads(self.get("/status")[1])


@contextlib.contextmanager
def serving(gpu: FakeGpu, pin: bool) -> Iterator[Machine]:
    region = HostRegion(L1_BYTES)
    rules = GpuRules(lambda _: gpu, pin=pin)
    with running_server(Devices(CpuDevice(region, PAGE_BYTES, 2), region, PAGE_BYTES, rules)) as running:
        try:
            yield Machine(gpu, running)
        finally:
            gpu.resume()
    assert gpu.faults == []


@pytest.fixture
def machine() -> Iterator[Machine]:
    """L1 is pinned for the GPU."""
    with serving(FakeGpu(GPUS[0]), pin=True) as machine:
        yield machine


@pytest.fixture
def unpinned() -> Iterator[Machine]:
    """Only maps and copies call the GPU."""
    with serving(FakeGpu(GPUS[0]), pin=False) as machine:
        yield machine


class Open:
    """An engine with a chunk in L1, and all that can be under way: copies that run and copies that wait."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.worker = worker = machine.worker()
        self.stored = make_keys(1)
        worker.store(self.stored, worker.blocks_for(1))
        worker.load(self.stored, worker.blocks_for(1, first=9))  # both lanes have what they need
        wait_until(lambda: machine.status["l1"]["pinned_bytes"] == L1_BYTES)
        machine.gpu.pause()
        self.fresh = make_keys(6)
        self.copies = [
            worker.begin_store([key], worker.blocks_for(1, first=1 + 4 * i)) for i, key in enumerate(self.fresh)
        ]
        self.copies += [worker.begin_load(self.stored, worker.blocks_for(1, first=30 + 4 * i)) for i in range(6)]
        wait_until(lambda: [copy.state for copy in self.copies].count(State.RUNNING) == 8)
        assert machine.status["books"]["tickets"] == 12

    def check_all_ended(self) -> None:
        machine, worker = self.machine, self.worker
        for copy in self.copies:
            assert_lost(copy.reply())
            assert copy.state == State.FAILED
        wait_until(lambda: machine.status["books"]["tickets"] == 0)
        assert machine.status["books"]["pins"] == machine.status["books"]["unbalanced"] == 0
        assert machine.status["l1"]["chunks"] == 1, "nothing half-written is kept"
        assert [worker.lookup([key]) for key in (*self.fresh, *self.stored)] == [0] * 7
        code, body = machine.get("/readyz")
        assert (code, REASON in body) == (503, True)
        assert REASON in machine.status["gpus"][0]["lost"]

    def check_left_alone(self) -> None:
        """Whatever is asked now is answered, and the GPU not called."""
        machine, worker = self.machine, self.worker
        calls = machine.gpu.calls
        for message in (
            worker.load_message(self.stored, worker.blocks_for(1)),
            worker.store_message(make_keys(1), worker.blocks_for(1)),
        ):
            assert_lost(worker.reply_to(worker.send(message)))
            assert worker.words.state(message.word) == State.FAILED
        with pytest.raises(RequestFailed, match=REASON) as refused:
            machine.worker()
        assert refused.value.code == "device_lost"
        worker.unregister()
        worker.close()
        wait_until(lambda: machine.status["books"]["mappings"] == machine.status["books"]["attachments"] == 0)
        assert machine.status["gpus"][0]["mapped_bytes"] == 0
        assert machine.gpu.calls == calls


def assert_lost(reply: Reply) -> None:
    assert isinstance(reply, Error), reply
    assert reply.code == "device_lost"
    assert REASON in reply.message


def test_a_gpu_that_dies_between_calls_ends_all_that_is_open(machine: Machine) -> None:
    under_way = Open(machine)
    machine.gpu.die(REASON)
    under_way.check_all_ended()
    under_way.check_left_alone()


def test_a_gpu_that_is_lost_by_a_map_ends_all_that_is_open(machine: Machine) -> None:
    under_way = Open(machine)
    workers = [Worker(machine.endpoint, gpu=GPUS[0], connect_now=False) for _ in range(3)]
    for worker in workers:
        worker.attach()
    machine.gpu.fail_next("open", REASON, lost=True)
    sent = [worker.send(worker.registration()) for worker in workers]
    for worker, number in zip(workers, sent, strict=True):
        assert_lost(worker.reply_to(number))
    for worker in workers:
        worker.close()
    under_way.check_all_ended()
    under_way.check_left_alone()


def test_a_gpu_that_is_lost_by_an_unmap_ends_all_that_is_open(machine: Machine) -> None:
    other = machine.worker()
    under_way = Open(machine)
    machine.gpu.fail_next("close", REASON, lost=True)
    other.unregister()  # it is answered all the same: nothing of its memory is used any more
    other.close()
    under_way.check_all_ended()
    under_way.check_left_alone()


TO_PREPARE = ["enter", "make_stream", "allocate", "allocate_pinned", "make_event", "record", "copy"]


@pytest.mark.parametrize("call", [*TO_PREPARE, "wait", "nanos_between"])
def test_a_gpu_that_is_lost_by_any_call_of_a_store_publishes_nothing(unpinned: Machine, call: str) -> None:
    with unpinned.worker() as worker, unpinned.worker(gpu="") as on_cpu:
        unpinned.gpu.fail_next(call, REASON, lost=True)
        store = worker.begin_store(keys := make_keys(1), worker.blocks_for(1))
        assert_lost(store.reply())
        assert store.state == State.FAILED
        assert worker.lookup(keys) == 0
        books = unpinned.status["books"]
        assert books["tickets"] == books["pins"] == books["used_pages"] == books["unbalanced"] == 0
        assert on_cpu.store(make_keys(1), on_cpu.blocks_for(1)) == Stored(stored=1, skipped=0), "the CPU copies on"


@pytest.mark.parametrize("call", TO_PREPARE)
def test_a_gpu_that_is_lost_by_a_call_of_a_store_ends_a_load_as_well(unpinned: Machine, call: str) -> None:
    """The other lane sits in a call of its own, and must not wait for it to return."""
    with unpinned.worker() as worker, unpinned.worker(gpu="") as on_cpu:
        on_cpu.store(keys := make_keys(1), on_cpu.blocks_for(1))
        worker.load(keys, worker.blocks_for(1, first=9))
        unpinned.gpu.pause()
        load = worker.begin_load(keys, worker.blocks_for(1, first=30))
        wait_until(lambda: load.state == State.RUNNING)
        wait_until(lambda: unpinned.gpu.calls["copy"] >= 4, what="the load's second copy is queued")
        unpinned.gpu.fail_next(call, REASON, lost=True)
        store = worker.begin_store(make_keys(1), worker.blocks_for(1))
        for copy in (store, load):
            assert_lost(copy.reply())
            assert copy.state == State.FAILED
        wait_until(lambda: unpinned.status["books"]["tickets"] == 0)
        assert worker.lookup(keys) == 0


@pytest.mark.parametrize("call", ["make_stream", "allocate_pinned", "copy"])
def test_a_call_that_fails_for_once_fails_its_copy_only(unpinned: Machine, call: str) -> None:
    with unpinned.worker() as worker:
        unpinned.gpu.fail_next(call, "no luck this time")
        reply = worker.begin_store(keys := make_keys(1), worker.blocks_for(1)).reply()
        assert isinstance(reply, Error)
        assert (reply.code, reply.message) == ("internal", "no luck this time")
        assert worker.lookup(keys) == 0
        assert unpinned.status["books"]["used_pages"] == 0
        worker.round_trip()
        assert unpinned.get("/readyz")[0] == 200


def test_a_map_that_fails_for_once_is_refused_and_may_be_tried_again(unpinned: Machine) -> None:
    unpinned.gpu.fail_next("open", "out of memory")
    with pytest.raises(RequestFailed, match="out of memory") as refused:
        unpinned.worker()
    assert refused.value.code == "bad_memory"
    with unpinned.worker() as worker:
        worker.round_trip()


def test_a_gpu_without_room_for_staging_is_served_by_dma() -> None:
    with serving(FakeGpu(GPUS[0], memory_bytes=2 * MiB), pin=True) as machine, machine.worker() as worker:
        worker.round_trip()
        shown = machine.status["gpus"][0]["store"]
        assert (shown["dma_bytes"], shown["staged_bytes"]) == (worker.chunk_bytes, 0)


# ---- a daemon process ---------------------------------------------------------------------------


MORTAL = {"simulated_gpus": 1, "copy_delay_us": 50_000}


def test_a_daemon_whose_gpu_dies_answers_what_is_open_and_ends_with_code_3(
    make_daemon: Callable[..., Daemon], tmp_path: Path, make_worker: Callable[..., Worker]
) -> None:
    mortal = make_daemon(gpu_orders=tmp_path / "die", **MORTAL)
    worker = make_worker(mortal, gpu=GPUS[0])
    worker.store(keys := make_keys(1), worker.blocks_for(1))
    copies = [worker.begin_store([key], worker.blocks_for(1)) for key in make_keys(6)]
    copies += [worker.begin_load(keys, worker.blocks_for(1, first=1 + 4 * i)) for i in range(6)]
    wait_until(lambda: State.RUNNING in [copy.state for copy in copies])
    mortal_gpus.order(tmp_path / "die", "die")
    replies = [copy.reply() for copy in copies]
    assert mortal.process is not None
    assert mortal.process.wait(60) == 3
    assert {reply.code for reply in replies if isinstance(reply, Error)} == {"device_lost"}
    for copy, reply in zip(copies, replies, strict=True):
        assert copy.state == (State.FAILED if isinstance(reply, Error) else State.DONE)
    assert worker.attachment is not None
    assert not worker.attachment.alive()
    assert f"exit code 3: the device is lost: {REASON}" in mortal.log
    assert "Traceback" not in mortal.log
    image = worker.memory.image()

    (tmp_path / "die").unlink(missing_ok=True)
    mortal.start()
    worker.hang_up()
    assert worker.connect().lookup(keys) == 0
    assert worker.memory.image() == image
    worker.round_trip()


def test_copies_that_hang_in_a_lost_gpu_stay_open_until_the_daemon_has_ended(
    make_daemon: Callable[..., Daemon], tmp_path: Path, make_worker: Callable[..., Worker]
) -> None:
    """They may still be written; engines see the end of the process."""
    mortal = make_daemon(gpu_orders=tmp_path / "die", drain_seconds=1, simulated_gpus=1, pauses=True)
    worker = make_worker(mortal, gpu=GPUS[0])
    worker.store(keys := make_keys(1), worker.blocks_for(1))
    with mortal.paused_copies():
        load = worker.begin_load(keys, worker.blocks_for(1, first=1))
        wait_until(lambda: load.state == State.RUNNING)
        mortal_gpus.order(tmp_path / "die", "hang")
        wait_until(lambda: not (tmp_path / "die").exists(), what="the order was carried out")
    assert worker.attachment is not None
    assert mortal.process is not None
    assert mortal.process.wait(60) == 3
    assert load.state == State.RUNNING
    assert not worker.attachment.alive()
    assert "1 copies did not end within 1 s" in mortal.log
    assert f"exit code 3: the device is lost: {REASON}" in mortal.log
