"""Engines that bring GPU memory: what only they can do, and what only a GPU does otherwise than the CPU.

The GPUs are simulated (csrc/fake_gpu.h). What both have in common is tested by the modules that are `on_each_device`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import GPUS, Daemon, pin_l1, wait_until
from support.worker import Geometry, Worker, awkward, gpu_handle, make_keys, wire_form

from kvserver._native import State
from kvserver.client import RequestFailed
from kvserver.config import GiB, KiB, MiB
from kvserver.planes import Plane
from kvserver.protocol import CudaIpc, CudaVmmFabric, CudaVmmFd, Error, Retrieved, SharedFd, Stored, encode
from support.raw import RawPeer

MakeDaemon = Callable[..., Daemon]
MakeWorker = Callable[..., Worker]
each_handle = pytest.mark.parametrize("handles", [CudaIpc, CudaVmmFd, CudaVmmFabric])
SLOW = 100_000  # microseconds an operation of a stream


@pytest.fixture(scope="module")
def device() -> str:
    return "gpu"


def on_gpu(daemon: Daemon, uuid: str = GPUS[0]) -> dict[str, Any]:
    """What /status says of a GPU; zeros before it was used."""
    nothing = {"mapped_bytes": 0, "store": {"dma_bytes": 0, "staged_bytes": 0}, "load": {"dma_bytes": 0, "staged_bytes": 0}}
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
    "a UUID that is none": (lambda w: [ipc(w, 0, gpu="GPU 0"), ipc(w, 1, gpu="GPU 0")], "no GPU GPU 0"),
    "no UUID": (lambda w: [ipc(w, 0, gpu=""), ipc(w, 1, gpu="")], "no GPU "),
    "memory of two GPUs": (lambda w: [ipc(w, 0), ipc(w, 1, gpu=GPUS[1])], "is of one device"),
    "memory of the CPU and of a GPU": (lambda w: [SharedFd(index=0, size_bytes=4096), ipc(w, 1)], "is of one device"),
    "a handle that opens nothing": (lambda w: [ipc(w, 0), CudaIpc(w.gpu, bytes(64), 0, 4096)], "cannot open"),
    "a descriptor that is not there": (lambda w: [CudaVmmFd(w.gpu, 7, 0, 4096), ipc(w, 1)], "descriptors came with"),
    "a descriptor that nobody names": (lambda w: [ipc(w, 0), ipc(w, 1)], "descriptors came with"),
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
    first = {"memory of the CPU and of a GPU", "a descriptor that nobody names"} & {name}
    worker.attach([*worker.memory.fds[: len(first)], worker.words.fd])
    error = worker.error_of(worker.registration(memory=make(worker)))
    assert error.code == "bad_memory"
    assert words in error.message
    daemon.wait_for_books(mappings=0)
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
