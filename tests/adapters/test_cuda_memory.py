"""What is registered of CUDA memory, by a stand-in driver that takes CPU tensors' addresses for its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from mmap import mmap
from pathlib import Path

import pytest
import torch
from support.descriptors import descriptors_of

from kvserver.adapters.common.cuda_driver import FD_HANDLE, Driver
from kvserver.adapters.common.cuda_memory import CudaMemory
from kvserver.adapters.common.exporter import CannotShare
from kvserver.adapters.common.memory import SharedCaches, exporter_for, share
from kvserver.protocol import CudaIpc, CudaVmmFd

FABRIC_HANDLE = 0x8  # CU_MEM_HANDLE_TYPE_FABRIC
UUIDS = ["GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"]
BLOCKS, ROW = 8, 63
BELOW, ABOVE = 4096, 1 << 20  # how far an allocation reaches around the tensors in it


class StandIn:
    """The driver, and what a test scripts of it."""

    def __init__(self, library: Path) -> None:
        self.driver = Driver(str(library))
        self._script = ctypes.CDLL(str(library))
        self._script.standin_map.argtypes = [ctypes.c_uint64] * 5 + [ctypes.c_int] * 3
        self._script.standin_reset()

    @property
    def open_handles(self) -> int:
        return int(self._script.standin_open_handles())

    def fail(self, call: str, result: int = 1) -> None:
        self._script.standin_fail(call.encode(), result)

    def classic(self, base: int, size: int, ordinal: int = 0) -> None:
        """An allocation of cudaMalloc."""
        self._script.standin_map(base, size, base, size, 0, 0, ordinal, -1)

    def vmm(
        self, base: int, size: int, types: int, allocation: int = 7, fd: int = -1, within: tuple[int, int] | None = None
    ) -> None:
        """A mapping of an allocation of cuMemCreate, `within` a larger reservation."""
        self._script.standin_map(base, size, *(within or (base, size)), allocation, types, 0, fd)

    def share(self, *tensors: torch.Tensor) -> SharedCaches:
        caches = {f"layers.{i}": tensor for i, tensor in enumerate(tensors)}
        return share(caches, BLOCKS, make_exporter=partial(CudaMemory, driver=self.driver))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("standin") / "libcuda.so.1"
    source = Path(__file__).with_name("standin_libcuda.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", built, source], check=True)
    return built


@pytest.fixture
def standin(library: Path) -> Iterator[StandIn]:
    made = StandIn(library)
    yield made
    assert made.open_handles == 0, "allocation handles were not released"


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("vmm")
    os.truncate(fd, 4096)
    yield fd
    os.close(fd)


def layer(storage: torch.Tensor | None = None, first: int = 0) -> torch.Tensor:
    """A layer's KV cache, of its own storage or `first` rows into another one."""
    if storage is None:
        # With room for an allocation around it: a heap may put two layers into one page.
        room = mmap(-1, BELOW + BLOCKS * ROW * torch.float32.itemsize + ABOVE)
        storage = torch.frombuffer(room, dtype=torch.float32, offset=BELOW, count=BLOCKS * ROW).view(BLOCKS, ROW)
    return storage[first : first + BLOCKS]


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


# ---- what is shared ---------------------------------------------------------------------------


def test_an_allocation_goes_by_the_handle_of_its_base_and_the_window_in_use(standin):
    tensor = layer()
    start, size = span(tensor)
    standin.classic(start - BELOW, BELOW + size + ABOVE)
    shared = standin.share(tensor)
    base = (start - BELOW).to_bytes(8, "little")
    assert shared.memory == [
        CudaIpc(device=UUIDS[0], handle=bytes(8) + base + bytes(48), offset=BELOW, size_bytes=size)
    ]
    assert shared.fds == []
    assert [(plane.memory, plane.offset) for plane in shared.planes] == [(0, 0)]


def test_storages_of_one_allocation_are_one_memory(standin):
    """As torch's allocator cuts them from a segment; planes are placed in the window that covers them."""
    segment = torch.zeros(10 * BLOCKS, ROW)
    start, row = segment.data_ptr(), ROW * segment.element_size()
    tensors = []
    for first in (5 * BLOCKS, 2 * BLOCKS):
        raw = (ctypes.c_char * (BLOCKS * row)).from_address(start + first * row)
        tensors.append(torch.frombuffer(raw, dtype=torch.float32).view(BLOCKS, ROW))
    standin.classic(start, segment.nbytes)
    shared = standin.share(*tensors)
    (memory,) = shared.memory
    assert isinstance(memory, CudaIpc)
    assert (memory.offset, memory.size_bytes) == (2 * BLOCKS * row, 4 * BLOCKS * row)
    assert sorted((plane.memory, plane.offset) for plane in shared.planes) == [(0, 0), (0, 3 * BLOCKS * row)]


def test_every_allocation_is_a_memory_of_its_own(standin):
    tensors = [layer(), layer(), layer()]
    for tensor in tensors:
        standin.classic(*span(tensor), ordinal=1)
    shared = standin.share(*tensors)
    assert len({memory.handle for memory in shared.memory}) == 3
    assert {memory.device for memory in shared.memory} == {UUIDS[1]}
    assert [(plane.memory, plane.offset) for plane in shared.planes] == [(0, 0), (1, 0), (2, 0)]


def test_vmm_memory_goes_by_a_descriptor(standin, memfd):
    tensors = [layer(), layer()]
    for number, tensor in enumerate(tensors):
        standin.vmm(*span(tensor), FD_HANDLE | FABRIC_HANDLE, allocation=7 + number, fd=memfd)
    shared = standin.share(*tensors)
    size = span(tensors[0])[1]
    assert shared.memory == [CudaVmmFd(device=UUIDS[0], index=i, offset=0, size_bytes=size) for i in (0, 1)]
    assert [os.fstat(fd).st_ino for fd in shared.fds] == [os.fstat(memfd).st_ino] * 2
    assert not any(os.get_inheritable(fd) for fd in shared.fds)
    for fd in shared.fds:
        os.close(fd)


def test_ranks_on_different_gpus_have_the_same_layout(standin):
    """What goes into the namespace names neither addresses nor devices."""
    tensors = [layer(), layer()]
    for ordinal, tensor in enumerate(tensors):
        standin.classic(span(tensor)[0] - BELOW * ordinal, span(tensor)[1] + BELOW * ordinal, ordinal=ordinal)
    first, second = (standin.share(tensor) for tensor in tensors)
    assert first.memory[0].device != second.memory[0].device
    assert (first.layout, first.planes) == (second.layout, second.planes)


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("types", [0, FABRIC_HANDLE])
def test_the_refusal_of_memory_that_cannot_be_exported_names_its_setting(standin, types):
    tensor = layer()
    standin.vmm(*span(tensor), types=types)
    with pytest.raises(CannotShare, match="--enable-cumem-allocator"):
        standin.share(tensor)


@pytest.mark.parametrize("names", ["pieces", "reservation"])
def test_expandable_segments_are_refused(standin, names):
    """However the driver names a range that many allocations are mapped into."""
    tensor = layer()
    start, size = span(tensor)
    within = (start, size) if names == "reservation" else None
    for number in (0, 1):
        standin.vmm(start + number * size // 2, size // 2, FD_HANDLE, allocation=7 + number, within=within)
    with pytest.raises(CannotShare, match="expandable_segments:False"):
        standin.share(tensor)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_tensor_in_a_later_piece_of_a_reservation_is_refused(standin, mapped):
    """Its offset in the reservation is none in its allocation."""
    tensor = layer()
    start, size = span(tensor)
    within = (start - BELOW, BELOW + size)
    if mapped:
        standin.vmm(start - BELOW, BELOW, FD_HANDLE, allocation=6, within=within)
    standin.vmm(start, size, FD_HANDLE, allocation=7, within=within)
    with pytest.raises(CannotShare, match="expandable_segments:False"):
        standin.share(tensor)


def test_memory_without_any_handle_names_both_answers_of_the_driver(standin):
    tensor = layer()
    standin.classic(*span(tensor))
    standin.fail("cuIpcGetMemHandle", 801)
    with pytest.raises(CannotShare, match=r"backend:native.*cuIpcGetMemHandle: error 801; cuMemRetain.*INVALID_VALUE"):
        standin.share(tensor)


@pytest.mark.parametrize(
    "call", ["cuMemGetAddressRange_v2", "cuPointerGetAttribute", "cuDeviceGet", "cuDeviceGetUuid_v2"]
)
def test_a_call_that_fails_is_named(standin, call):
    tensor = layer()
    standin.classic(*span(tensor))
    standin.fail(call)
    with pytest.raises(CannotShare, match=f"{call}: CUDA_ERROR_INVALID_VALUE"):
        standin.share(tensor)


@pytest.mark.parametrize("call", ["cuMemGetAllocationPropertiesFromHandle", "cuMemExportToShareableHandle"])
def test_an_export_that_fails_is_named(standin, memfd, call):
    tensor = layer()
    standin.vmm(*span(tensor), FD_HANDLE, fd=memfd)
    standin.fail(call, 800)
    with pytest.raises(CannotShare, match=f"{call}: error 800"):
        standin.share(tensor)


def test_an_export_that_fails_half_way_leaves_no_descriptor(standin, memfd):
    tensors = [layer(), layer()]
    standin.vmm(*span(tensors[0]), FD_HANDLE, allocation=7, fd=memfd)
    standin.vmm(*span(tensors[1]), 0, allocation=8)
    with pytest.raises(CannotShare):
        standin.share(*tensors)
    assert descriptors_of(memfd) == 1


def test_one_worker_on_two_gpus_is_refused(standin):
    tensors = [layer(), layer()]
    for ordinal, tensor in enumerate(tensors):
        standin.classic(*span(tensor), ordinal=ordinal)
    with pytest.raises(CannotShare, match=f"several GPUs: {UUIDS[0]}, {UUIDS[1]}"):
        standin.share(*tensors)


@pytest.mark.parametrize("names", [("cpu", "cuda:0"), ("cuda:0", "cuda:1")])
def test_a_kv_cache_on_several_devices_is_refused(names):
    with pytest.raises(CannotShare, match=" and ".join(names)):
        exporter_for(torch.device(name) for name in names)


def test_a_kind_of_device_that_cannot_be_shared_is_refused():
    with pytest.raises(CannotShare, match="lies on xpu:0"):
        exporter_for([torch.device("xpu:0")])


def test_without_a_driver_cuda_memory_is_refused():
    make = exporter_for([torch.device("cuda:0"), torch.device("cuda:0")])
    with pytest.raises(CannotShare, match=r"libcuda\.so\.1"):
        make([torch.zeros(4).untyped_storage()])
