"""CUDA memory: one handle for each allocation that contains KV cache, with the window in use.

cudaMalloc's memory is shared by its IPC handle. cuMemCreate's (VMM) is shared by a descriptor, if it was created as exportable. A
descriptor keeps the memory alive even when the engine has freed it, so it is closed when the registration ends. Allocation
handles are retained only while they are inspected.

Owns: the choice of the handle, and the errors for memory that has none. Refuses to know: the driver's calls, planes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from kvserver.adapters.common.cuda_driver import FD_HANDLE, Driver, DriverError
from kvserver.adapters.common.exporter import CannotShare, Exported, Window
from kvserver.protocol import CudaIpc, CudaVmmFd, Memory

_PIECEWISE = (
    "the KV cache is mapped from several pieces of GPU memory, as expandable segments are: "
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
)
_NOT_EXPORTABLE = (
    "the KV cache lies in GPU memory that was not made to be exported by a file descriptor. vLLM's cumem allocator makes "
    "such memory: leave out --enable-sleep-mode and --enable-cumem-allocator"
)
_NO_HANDLE = (
    "the CUDA driver gives no handle for the KV cache's memory; set PYTORCH_CUDA_ALLOC_CONF=backend:native "
    "if it names another allocator"
)


class CudaMemory:
    def __init__(self, storages: Sequence[torch.UntypedStorage], driver: Driver | None = None) -> None:
        try:
            self._driver = driver or Driver()
            self.windows = self._find_windows([(s.data_ptr(), s.nbytes()) for s in storages])
            devices = {self._driver.device_uuid(window.start) for window in self.windows}
        except (DriverError, OSError, AttributeError) as error:
            raise CannotShare(f"the CUDA driver does not report where the KV cache is: {error}") from None
        if len(devices) > 1:
            raise CannotShare(f"the KV cache of one worker lies on several GPUs: {', '.join(sorted(devices))}")
        self._device = devices.pop()

    def _find_windows(self, spans: list[tuple[int, int]]) -> list[Window]:
        """One window for each allocation, from the first to the last byte in use."""
        found: dict[int, Window] = {}
        for start, size in spans:
            base, length = self._driver.address_range(start)
            if start + size > base + length:
                raise CannotShare(_PIECEWISE)
            known = found.get(base, Window(base, start, size))
            first, end = min(known.start, start), max(known.end, start + size)
            found[base] = Window(base, first, end - first)
        return list(found.values())

    def export(self) -> Exported:
        exported = Exported([], [])
        try:
            for window in self.windows:
                exported.memory.append(self._export(window, exported.fds))
        except BaseException:
            for fd in exported.fds:
                os.close(fd)
            raise
        return exported

    def _export(self, window: Window, fds: list[int]) -> Memory:
        offset = window.start - window.base
        try:
            handle = self._driver.ipc_handle(window.base)
        except DriverError as not_classic:
            return self._export_vmm(window, fds, not_classic)
        return CudaIpc(device=self._device, handle=handle, offset=offset, size_bytes=window.size)

    def _export_vmm(self, window: Window, fds: list[int], not_classic: DriverError) -> Memory:
        offset = window.start - window.base
        try:
            with self._driver.allocation_at(window.start) as allocation:
                # The range may be a reservation of many pieces: one must begin it and reach the window's end.
                if not all(self._is_of(allocation, address) for address in (window.base, window.end - 1)):
                    raise CannotShare(_PIECEWISE)
                if self._driver.handle_types(allocation) & FD_HANDLE:
                    fds.append(self._driver.export_fd(allocation))
                    return CudaVmmFd(device=self._device, index=len(fds) - 1, offset=offset, size_bytes=window.size)
        except DriverError as not_vmm:
            raise CannotShare(f"{_NO_HANDLE} ({not_classic}; {not_vmm})") from None
        raise CannotShare(_NOT_EXPORTABLE)

    def _is_of(self, allocation: int, address: int) -> bool:
        try:
            with self._driver.allocation_at(address) as found:
                return found == allocation
        except DriverError:
            return False
