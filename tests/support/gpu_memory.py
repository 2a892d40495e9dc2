"""Memory of a test engine on a GPU, and the GPU itself: a real one, or the simulated one.

`KVSERVER_SIMULATED_GPU=1` chooses the simulated one, whose memory is the host's. Without it and without a GPU there is
none, and `why_not` states so. With `KVSERVER_VMM=child` another process makes the memory that is handed over by descriptor.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from kvserver._native import Gpu, cuda_gpu, cuda_gpus
from kvserver.protocol import CudaIpc, CudaVmmFd
from kvserver.protocol import messages as protocol

from . import cuda_driver, vmm_child
from .memory import SharedMemory
from .simulators import FakeGpu

SIMULATED = os.environ.get("KVSERVER_SIMULATED_GPU") == "1"
BY_CHILD = os.environ.get("KVSERVER_VMM", "self") == "child"
FAKE_UUID = "GPU-00000000-0000-0000-0000-000000000000"  # as `--simulated-gpus 1` has it


@functools.cache
def real_gpu() -> str:
    """Its UUID; "" where there is none."""
    try:
        return cuda_gpus()[0][0]
    except (RuntimeError, IndexError):
        return ""


@functools.cache
def found() -> tuple[str, str]:
    """(UUID of the GPU under test, ""), or ("", why there is none)."""
    if SIMULATED:
        return FAKE_UUID, ""
    try:
        return cuda_gpus()[0][0], ""
    except (RuntimeError, IndexError) as error:
        return "", f"no GPU: {error}"


def open_gpu(delay_micros: int = 0) -> Gpu:
    """A real GPU knows no delay. REQUIRES: found() one."""
    return FakeGpu(FAKE_UUID, 0 if delay_micros else 4711, delay_micros) if SIMULATED else cuda_gpu(found()[0])


def daemon_flags() -> dict[str, object]:
    return {"simulated_gpus": 1} if SIMULATED else {}


class _View:
    """GPU memory by slices, as an mmap has them."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        first, last, _ = part.indices(self._size)
        return cuda_driver.read(self._address + first, last - first)

    def __setitem__(self, part: slice, content: bytes) -> None:
        first, last, _ = part.indices(self._size)
        assert last - first == len(content)
        cuda_driver.write(self._address + first, bytes(content))


def _descriptor(size: int, simulated: bool) -> int:
    return (vmm_child.of_child if BY_CHILD else vmm_child.make)(size, simulated)


class VmmMemory:
    """Memory that a descriptor stands for. It can be mapped by the process that made it, too."""

    def __init__(self, size: int) -> None:
        self._allocation = cuda_driver.Allocation(size, _descriptor(size, simulated=False))
        self.fds = [self._allocation.fd]
        self.address = self._allocation.address
        self.view: Any = _View(self.address, size)

    def described(self, index: int) -> protocol.Memory:
        return CudaVmmFd(device=real_gpu(), index=index, offset=0, size_bytes=len(self.view))

    def fill(self) -> None:
        self.view[:] = os.urandom(len(self.view))  # randbytes() makes 256 MiB at most

    def close(self) -> None:
        if self.fds:
            self.fds.clear()
            self._allocation.close()


class TorchMemory:
    """A tensor on cuda:0, shared by its legacy IPC handle. Two tensors may share one allocation of torch."""

    def __init__(self, size: int) -> None:
        import torch

        self.fds: list[int] = []
        self.tensor = torch.empty(size, dtype=torch.uint8, device="cuda:0")
        self.view: Any = _View(self.tensor.data_ptr(), size)

    def described(self, index: int) -> protocol.Memory:
        handle, offset = cuda_driver.ipc_handle(self.tensor.data_ptr())
        return CudaIpc(device=found()[0], handle=handle, offset=offset, size_bytes=len(self.view))

    def fill(self) -> None:
        import torch

        self.tensor.random_(0, 256)
        torch.cuda.synchronize()

    def close(self) -> None: ...


class SimulatedVmmMemory(SharedMemory):
    def __init__(self, size: int) -> None:
        super().__init__(size, _descriptor(size, simulated=True))

    def described(self, index: int) -> protocol.Memory:
        return CudaVmmFd(device=FAKE_UUID, index=index, offset=0, size_bytes=len(self.view))


class SimulatedIpcMemory(SharedMemory):
    """The handle is the path of a memfd of this process."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._fd = self.fds.pop()

    def described(self, index: int) -> protocol.Memory:
        path = f"/proc/{os.getpid()}/fd/{self._fd}".encode()
        return CudaIpc(device=FAKE_UUID, handle=path.ljust(64, b"\0"), offset=0, size_bytes=len(self.view))

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


by_fd = SimulatedVmmMemory if SIMULATED else VmmMemory
by_ipc = SimulatedIpcMemory if SIMULATED else TorchMemory
