"""Engines that bring GPU memory: what only they can do, and what only a GPU does otherwise than the CPU.

The GPUs are simulated (csrc/testing/fake_gpu.h). What both have in common is tested by the modules that are `on_each_device`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import GPUS, WITH_SIMULATED, Daemon, pin_l1, wait_until
from support.engine_process import EngineProcess
from support.memory import Geometry, awkward, gpu_handle
from support.raw import RawPeer
from support.worker import Worker, make_keys

from kvserver._native import State
from kvserver.config.settings import GiB, KiB, MiB
from kvserver.protocol import (
    CudaIpc,
    CudaVmmFabric,
    CudaVmmFd,
    Error,
    Plane,
    Retrieved,
    SharedFd,
    Status,
    StatusReply,
    Stored,
    Unregistered,
    UnregisterWorker,
    encode,
)
from kvserver.protocol.client import RequestFailed

MakeDaemon = Callable[..., Daemon]
MakeWorker = Callable[..., Worker]
each_handle = pytest.mark.parametrize("handles", [CudaIpc, CudaVmmFd])


@pytest.fixture(scope="module")
def device() -> str:
    return "gpu"


def on_gpu(daemon: Daemon, uuid: str = GPUS[0]) -> dict[str, Any]:
    """What /status reports of a GPU; zeros before it was used."""
    nothing = {
        "mapped_bytes": 0,
        "store": {"dma_bytes": 0, "staged_bytes": 0},
        "load": {"dma_bytes": 0, "staged_bytes": 0},
    }
    return next((gpu for gpu in daemon.status()["gpus"] if gpu["device"] == uuid), nothing)


def engine_memories(daemon: Daemon) -> int:
    """How many allocations of engines are mapped."""
    return sum("memfd:test-kv" in line for line in daemon.mapped_memfds())


# ---- handles and windows ------------------------------------------------------------------------


@each_handle
def test_memory_of_each_kind_of_handle_is_mapped_copied_and_unmapped(
    daemon: Daemon, make_worker: MakeWorker, handles: type
) -> None:
    worker = make_worker(daemon, handles=handles)
    size = sum(worker.geometry.sizes)
    (instance,) = daemon.status()["instances"]
    (shown,) = instance["workers"]
    assert (shown["device"], shown["mapped_bytes"], on_gpu(daemon)["mapped_bytes"]) == (GPUS[0], size, size)
    worker.round_trip()
    worker.unregister()
    assert on_gpu(daemon)["mapped_bytes"] == engine_memories(daemon) == 0


WINDOW = Geometry(40, 16, sizes=(8192 + 40 * 512 + 999,), planes=(Plane(0, 8192 + 16, 512, 512),))


@each_handle
def test_a_window_with_an_offset_is_copied_and_nothing_around_it_is_written(
    daemon: Daemon, make_worker: MakeWorker, handles: type
) -> None:
    worker = make_worker(daemon, geometry=WINDOW, handles=handles, connect_now=False)
    worker.attach()
    memory, planes = [worker.window(0, 8192, 40 * 512 + 16)], [Plane(0, 16, 512, 512)]
    worker.register(memory=memory, planes=planes)
    assert on_gpu(daemon)["mapped_bytes"] == 40 * 512 + 16
    keys, target = make_keys(2), worker.blocks_for(2, first=20)
    content = worker.memory.blocks(worker.blocks_for(2))
    worker.store(keys, worker.blocks_for(2))
    expected = worker.memory.image_with(dict(zip(target, content, strict=True)))
    worker.load(keys, target)
    assert worker.memory.image() == expected


def test_two_windows_of_one_allocation_are_opened_once(daemon: Daemon, make_worker: MakeWorker) -> None:
    halves = Geometry(20, 16, sizes=(2 * 20480,), planes=(Plane(0, 0, 1024, 700), Plane(0, 20480, 1024, 900)))
    worker = make_worker(daemon, geometry=halves, handles=CudaIpc, connect_now=False)
    worker.attach()
    windows = [worker.window(0, offset, 20480) for offset in (0, 20480)]
    worker.register(memory=windows, planes=[Plane(0, 0, 1024, 700), Plane(1, 0, 1024, 900)])
    assert engine_memories(daemon) == 1
    (instance,) = daemon.status()["instances"]
    assert instance["workers"][0]["mapped_bytes"] == on_gpu(daemon)["mapped_bytes"] == 2 * 20480
    worker.round_trip()
    worker.unregister()
    assert engine_memories(daemon) == 0


# ---- refusals -----------------------------------------------------------------------------------

NOWHERE = "GPU-ffffffff-0000-0000-0000-000000000000"
BAD_MEMORY: dict[str, tuple[Callable[[Worker], list[Any]], str]] = {
    "a window beyond the allocation": (lambda w: [ipc(w, 0), ipc(w, 1, more=1)], "the GPU memory holds"),
    "a window that begins beyond the allocation": (lambda w: [ipc(w, 0), ipc(w, 1, offset=1 << 40)], "holds"),
    "a window beyond all numbers": (lambda w: [ipc(w, 0, offset=(1 << 62) - 1), ipc(w, 1)], "holds"),
    "a GPU that is not there": (lambda w: [ipc(w, 0, gpu=NOWHERE), ipc(w, 1, gpu=NOWHERE)], f"no GPU {NOWHERE}"),
    "memory of two GPUs": (lambda w: [ipc(w, 0), ipc(w, 1, gpu=GPUS[1])], "must be on one device"),
    "memory of the CPU and of a GPU": (
        lambda w: [SharedFd(index=0, size_bytes=4096), ipc(w, 1)],
        "must be on one device",
    ),
    "a handle that opens nothing": (lambda w: [ipc(w, 0), CudaIpc(w.gpu, bytes(64), 0, 4096)], "cannot open"),
    "a fabric handle": (lambda w: [CudaVmmFabric(w.gpu, bytes(64), 0, 4096), ipc(w, 1)], "fabric handle is not served"),
    "a descriptor that is not there": (lambda w: [CudaVmmFd(w.gpu, 7, 0, 4096), ipc(w, 1)], "with Attach"),
    "a descriptor that no memory names": (lambda w: [ipc(w, 0), ipc(w, 1)], "with Attach"),
}


def ipc(worker: Worker, number: int, offset: int = 0, more: int = 0, gpu: str = GPUS[0]) -> CudaIpc:
    size = worker.geometry.sizes[number] + more
    return CudaIpc(device=gpu, handle=gpu_handle(worker.memory.fds[number]), offset=offset, size_bytes=size)


@pytest.mark.parametrize("name", BAD_MEMORY)
def test_memory_that_cannot_be_mapped_is_refused_with_the_reason(
    daemon: Daemon, make_worker: MakeWorker, name: str
) -> None:
    make, words = BAD_MEMORY[name]
    worker = make_worker(daemon, handles=CudaIpc, connect_now=False)
    first = {"memory of the CPU and of a GPU", "a descriptor that no memory names"} & {name}
    worker.attach([*worker.memory.fds[: len(first)], worker.words.fd])
    error = worker.error_of(worker.registration(memory=make(worker)))
    assert error.code == "bad_memory"
    assert words in error.message
    daemon.wait_for_accounting(mappings=0)
    assert on_gpu(daemon)["mapped_bytes"] == engine_memories(daemon) == 0
    make_worker(daemon).round_trip()


@pytest.mark.parametrize("size", [0, 63, 65])
@pytest.mark.parametrize("kind", [CudaIpc, CudaVmmFabric])
def test_a_handle_has_64_bytes(daemon: Daemon, make_worker: MakeWorker, kind: type, size: int) -> None:
    worker = make_worker(daemon, handles=kind, connect_now=False)
    worker.attach()
    memory = kind(device=GPUS[0], handle=bytes(size), offset=0, size_bytes=4096)
    with RawPeer(daemon.endpoint) as raw:
        error = raw.error_of(encode(worker.registration(memory=[memory])))
    assert (error.code, "64" in error.message) == ("bad_message", True), error.message


@pytest.mark.parametrize("uuid", ["", "GPU 0", "GPU-0", "cpu", NOWHERE.upper(), NOWHERE + "0"])
def test_a_gpu_is_named_by_its_uuid(daemon: Daemon, make_worker: MakeWorker, uuid: str) -> None:
    worker = make_worker(daemon, handles=CudaIpc, connect_now=False)
    worker.attach([worker.words.fd])
    error = worker.error_of(worker.registration(memory=[ipc(worker, 0, gpu=uuid)]))
    assert (error.code, "device" in error.message) == ("bad_message", True), error.message


def test_gpus_that_are_not_there_leave_nothing_behind(daemon: Daemon, make_worker: MakeWorker) -> None:
    make_worker(daemon).round_trip()
    threads = len(os.listdir(f"/proc/{daemon.pid}/task"))
    for number in range(20):
        with pytest.raises(RequestFailed, match="this process has no GPU"):
            make_worker(daemon, gpu=f"GPU-00000000-0000-0000-0001-{number:012d}")
    daemon.wait_for_accounting(mappings=1 + len(awkward().sizes))
    assert [gpu["device"] for gpu in daemon.status()["gpus"]] == [GPUS[0]]
    assert len(os.listdir(f"/proc/{daemon.pid}/task")) <= threads + 1


@pytest.mark.parametrize(
    ("gpus", "words"), [("none", "give --gpus auto"), (GPUS[1], f"{GPUS[0]} is not one of --gpus {GPUS[1]}")]
)
def test_a_gpu_that_the_settings_leave_out_is_refused_and_others_are_served(
    make_daemon: MakeDaemon, make_worker: MakeWorker, gpus: str, words: str
) -> None:
    daemon = make_daemon(gpus=gpus)
    with pytest.raises(RequestFailed, match=words) as refused:
        make_worker(daemon)
    assert refused.value.code == "bad_memory"
    make_worker(daemon, gpu="" if gpus == "none" else gpus).round_trip()
    assert engine_memories(daemon) == 2


# ---- several engines, ranks and GPUs ------------------------------------------------------------


def test_ranks_on_two_gpus_have_their_slots_in_one_chunk(daemon: Daemon, make_worker: MakeWorker) -> None:
    same = {"instance_id": "two-gpus", "incarnation": "a", "world_size": 2}
    ranks = [make_worker(daemon, rank=rank, gpu=uuid, **same) for rank, uuid in enumerate(GPUS)]
    (instance,) = daemon.status()["instances"]
    assert [rank["device"] for rank in instance["workers"]] == GPUS
    keys, target = make_keys(2), ranks[0].blocks_for(2, first=30)
    contents = [rank.memory.blocks(rank.blocks_for(2)) for rank in ranks]
    for rank in ranks:
        assert rank.lookup(keys) == 0
        assert rank.store(keys, rank.blocks_for(2)).stored == 2
    for rank, content in zip(ranks, contents, strict=True):
        assert rank.lookup(keys) == 2
        rank.load(keys, target)
        assert rank.memory.blocks(target) == content
    assert daemon.status()["l1"]["chunks"] == 2
    assert all(on_gpu(daemon, uuid)["load"]["staged_bytes"] > 0 for uuid in GPUS)


@pytest.mark.parametrize(("first", "second"), [("", GPUS[0]), (GPUS[0], ""), (GPUS[0], GPUS[1])])
def test_engines_of_one_model_share_chunks_whatever_device_they_run_on(
    daemon: Daemon, make_worker: MakeWorker, first: str, second: str
) -> None:
    """A namespace is of what a slot holds; a layout that states how a device arranges its blocks keeps them apart."""
    one, other = make_worker(daemon, gpu=first), make_worker(daemon, gpu=second)
    apart = make_worker(daemon, gpu=second, layout="HND")
    keys, target = make_keys(3), list(reversed(other.blocks_for(3, first=30)))
    content = one.memory.blocks(one.blocks_for(3))
    one.store(keys, one.blocks_for(3))
    assert (other.lookup(keys), apart.lookup(keys)) == (3, 0)
    expected = other.memory.image_with(dict(zip(target, content, strict=True)))
    other.load(keys, target)
    assert other.memory.image() == expected


def test_a_hung_engine_holds_up_neither_copies_nor_unmaps_of_others(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    """Its process is stopped with a store and a load under way: what a GPU has opened needs nothing of it."""
    daemon = make_daemon(copy_delay_us=20_000)
    other = make_worker(daemon)
    with EngineProcess(daemon.endpoint, gpu=GPUS[0]) as hung:
        hung.ask("store", "stored", 1, 3)
        hung.ask("begin_store", "more", 20, 3)
        hung.ask("begin_load", "stored", 40, 3)
        hung.freeze()
        other.round_trip()
        size = on_gpu(daemon)["mapped_bytes"]
        other.unregister()
        assert on_gpu(daemon)["mapped_bytes"] == size - sum(other.geometry.sizes)
        other.connect().round_trip()
        daemon.wait_for_accounting(tickets=0, attachments=2)
    daemon.wait_for_accounting(attachments=1, pins=0)
    wait_until(lambda: on_gpu(daemon)["mapped_bytes"] == sum(other.geometry.sizes))


# ---- copies of many batches ---------------------------------------------------------------------

# Four chunks are 16 blocks of 4 MiB: 8 batches, of which 4 are in flight.
LARGE = Geometry(17, 16, sizes=(17 * 4 * MiB,), planes=(Plane(0, 0, 4 * MiB, 4 * MiB),))


@pytest.fixture(scope="module")
def slow_module_daemon() -> Iterator[Daemon]:
    daemon = Daemon(l1_size="128MiB", simulated_gpus=2, gpus=GPUS[0], pauses=True).start()
    pin_l1(daemon)
    yield daemon
    daemon.close()


@pytest.fixture
def slow(slow_module_daemon: Daemon) -> Iterator[Daemon]:
    yield slow_module_daemon
    slow_module_daemon.clear_and_check()


@pytest.fixture
def large(slow: Daemon, make_worker: MakeWorker) -> Worker:
    return make_worker(slow, geometry=LARGE)


def test_a_running_store_that_is_cancelled_reads_on_for_some_batches_and_is_never_found(
    slow: Daemon, large: Worker
) -> None:
    keys = make_keys(4)
    with slow.paused_copies():
        store = large.begin_store(keys, large.blocks_for(4))
        wait_until(lambda: store.state == State.RUNNING)
        assert store.move(State.RUNNING, State.CANCELLED)
        large.memory.write(1, bytes(4 * MiB))  # at once: whatever was read of it goes nowhere
    assert code_of(store.reply()) == "cancelled"
    assert large.lookup(keys) == 0
    moved = on_gpu(slow)["store"]["dma_bytes"]
    assert 0 < moved < 64 * MiB, "the batches after those in flight are left out"
    slow.wait_for_accounting(tickets=0, pins=0, used_pages=0)


def test_a_running_load_that_is_cancelled_writes_on_for_some_batches_until_it_reads_cancelled(
    slow: Daemon, large: Worker
) -> None:
    keys = make_keys(4)
    large.store(keys, large.blocks_for(4))
    large.memory.fill()
    untouched = large.memory.read(16)
    with slow.paused_copies():
        load = large.begin_load(keys, large.blocks_for(4))
        wait_until(lambda: load.state == State.RUNNING)
        assert load.move(State.RUNNING, State.CANCELLING)
    wait_until(lambda: load.state == State.CANCELLED)
    image = large.memory.image()  # every block is the engine's again
    assert large.memory.read(16) == untouched, "the batches after those in flight are left out"
    assert code_of(load.reply()) == "cancelled"
    slow.wait_for_accounting(tickets=0, pins=0)
    assert large.memory.image() == image
    assert large.lookup(keys) == 4


def test_a_running_load_whose_deadline_passes_goes_on_until_its_word_reads_done(slow: Daemon, large: Worker) -> None:
    keys = make_keys(4)
    content = large.memory.blocks(large.blocks_for(4))
    large.store(keys, large.blocks_for(4))
    large.memory.fill()
    with slow.paused_copies():
        deadline = time.monotonic_ns() + 10**9
        load = large.begin_load(keys, large.blocks_for(4), deadline_ns=deadline)
        wait_until(lambda: load.state == State.RUNNING)
        wait_until(lambda: time.monotonic_ns() > deadline)
    assert load.reply() == Retrieved(chunks=4)
    assert load.state == State.DONE
    assert large.memory.blocks(large.blocks_for(4)) == content


def test_loads_that_a_daemon_stopped_past_their_deadline_holds_are_whole_or_given_up(
    slow: Daemon, make_worker: MakeWorker
) -> None:
    """RUNNING means that blocks may be written at any time, whatever the clock shows."""
    worker, keys = make_worker(slow), make_keys(3)
    worker.round_trip()  # a lane's first copy of a registration takes longer
    content = worker.memory.blocks(worker.blocks_for(3))
    worker.store(keys, worker.blocks_for(3))
    kept, given_up = worker.blocks_for(3, first=20), worker.blocks_for(3, first=40)
    with slow.paused_copies():
        deadline = time.monotonic_ns() + 10**9
        loads = [worker.begin_load(keys, blocks, deadline_ns=deadline) for blocks in (kept, given_up)]
        for load in loads:
            wait_until(lambda load=load: load.state == State.RUNNING)
        slow.freeze()
        try:
            wait_until(lambda: time.monotonic_ns() > deadline)
            assert [load.state for load in loads] == [State.RUNNING] * 2
            assert loads[1].move(State.RUNNING, State.CANCELLING)
        finally:
            slow.thaw()
    assert loads[0].reply() == Retrieved(chunks=3)
    assert loads[0].state == State.DONE
    wait_until(lambda: loads[1].state == State.CANCELLED)
    image = worker.memory.image()
    assert worker.memory.blocks(kept) == content
    assert code_of(loads[1].reply()) == "cancelled"
    slow.wait_for_accounting(tickets=0, pins=0)
    assert worker.memory.image() == image


def test_unregister_is_answered_when_the_gpu_memory_is_closed(slow: Daemon, large: Worker) -> None:
    keys = make_keys(8)
    with slow.paused_copies():
        copies = [large.begin_store(keys[at : at + 4], large.blocks_for(4)) for at in (0, 4)]
        wait_until(lambda: copies[0].state == State.RUNNING)
        number = large.send(UnregisterWorker(boot_id=large.hello.boot_id, registration=large.number))
        large.ask(Status(), StatusReply)  # it has been read
    assert large.reply_to(number) == Unregistered()
    image = large.memory.image()
    assert on_gpu(slow)["mapped_bytes"] == engine_memories(slow) == 0
    assert [code_of(copy.reply()) for copy in copies] == ["cancelled"] * 2
    assert [copy.state for copy in copies] == [State.FAILED] * 2
    assert large.memory.image() == image
    assert large.connect().lookup(keys) == 0


def code_of(reply: object) -> str:
    assert isinstance(reply, Error), reply
    return reply.code


# ---- L1 is pinned -------------------------------------------------------------------------------


def test_l1_is_pinned_in_the_background_once_a_gpu_is_in_use(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    make_worker(daemon, gpu="").round_trip()
    assert daemon.status()["gpus"] == []
    worker = make_worker(daemon)
    pin_l1(daemon)
    before = on_gpu(daemon)
    worker.round_trip()
    assert on_gpu(daemon)["store"]["unpinned_bytes"] == before["store"]["unpinned_bytes"] == 0
    assert "L1 is pinned: " in daemon.log


def test_without_pinning_copies_are_served_from_memory_that_is_not(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon(pin="off")
    worker = make_worker(daemon)
    worker.round_trip()
    gpu = on_gpu(daemon)
    assert [gpu[way]["unpinned_bytes"] for way in ("store", "load")] == [worker.chunk_bytes] * 2
    ticks = daemon.status()["uptime_seconds"] + 2.5  # what is pinned is looked at once a second
    wait_until(lambda: daemon.status()["uptime_seconds"] > ticks)
    assert daemon.status()["l1"]["pinned_bytes"] == 0


def test_a_large_l1_serves_while_it_is_being_pinned(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon(l1_size=2 * GiB, l1_huge_pages="off")
    worker = make_worker(daemon, geometry=WIDE)
    worker.round_trip()
    pinned: list[int] = []  # after each round trip

    def served() -> bool:
        worker.round_trip()
        pinned.append(daemon.status()["l1"]["pinned_bytes"])
        return pinned[-1] == 2 * GiB

    wait_until(served, 60, "L1 is pinned")
    assert pinned[0] < 2 * GiB, "no round trip was made before L1 was pinned"
    before = on_gpu(daemon)
    worker.round_trip()
    assert on_gpu(daemon)["load"]["unpinned_bytes"] == before["load"]["unpinned_bytes"]


END_OF_INTERPRETER = (
    "import atexit, runpy, sys; atexit.register(print, 'unpinned', file=sys.stderr); "
    f"runpy.run_path({WITH_SIMULATED[1]!r}, run_name='__main__')"
)


@pytest.mark.parametrize("pin", ["auto", "off"])
def test_the_end_of_the_process_unpins_l1_not_the_interpreter(
    make_daemon: MakeDaemon, make_worker: MakeWorker, pin: str
) -> None:
    """Which would unpin one registration after the other, for seconds per hundred GiB."""
    daemon = make_daemon(program=(sys.executable, "-c", END_OF_INTERPRETER), pin=pin)
    make_worker(daemon, gpu=GPUS[0]).round_trip()
    if pin == "auto":
        pin_l1(daemon)
    assert daemon.terminate() == 0
    assert daemon.log.rstrip().endswith("stopped")
    assert not Path(daemon.endpoint.removeprefix("ipc://")).exists()


def test_gpus_that_the_settings_name_are_ready_at_the_start(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon(gpus=",".join(GPUS))
    assert [gpu["device"] for gpu in daemon.status()["gpus"]] == GPUS
    pin_l1(daemon)
    make_worker(daemon, gpu=GPUS[1]).round_trip()


def test_a_gpu_that_is_not_there_refuses_the_start(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(start=False, gpus=f"{GPUS[0]},{NOWHERE}")
    ended = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.strip().splitlines()
    assert line.endswith(f"--gpus: this process has no GPU {NOWHERE}, it has {', '.join(GPUS)}")


# ---- which way the bytes go ---------------------------------------------------------------------

WIDE = Geometry(
    40,
    16,
    sizes=(3 * 40 * 64 * KiB,),
    planes=tuple(Plane(0, i, 3 * 64 * KiB, 64 * KiB) for i in range(0, 3 * 64 * KiB, 64 * KiB)),
)


@pytest.mark.parametrize(("geometry", "way"), [(awkward(), "staged_bytes"), (WIDE, "dma_bytes")], ids=["short", "wide"])
def test_status_shows_which_way_the_bytes_went(
    make_daemon: MakeDaemon, make_worker: MakeWorker, geometry: Geometry, way: str
) -> None:
    """Short runs are staged; runs of 64 KiB go by DMA."""
    daemon = make_daemon()
    worker, keys = make_worker(daemon, geometry=geometry), make_keys(2)
    assert worker.store(keys, worker.blocks_for(2)) == Stored(stored=2, skipped=0)
    worker.load(keys, list(reversed(worker.blocks_for(2, first=20))))
    gpu, size = on_gpu(daemon), 2 * worker.chunk_bytes
    for direction in ("store", "load"):
        ways = {name: gpu[direction][name] for name in ("dma_bytes", "staged_bytes")}
        assert ways == {"dma_bytes": 0, "staged_bytes": 0, way: size}
        assert (gpu[direction]["staging_bytes"] > 0) == (way == "staged_bytes")
