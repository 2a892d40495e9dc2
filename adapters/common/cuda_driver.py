"""Calls of the CUDA driver for memory handles, by ctypes.

torch can share memory too, but only with a file of torch's that both sides share. The driver's handles need nothing beside them.

Owns: signatures and struct layouts (cuda.h), and the check of every result. Refuses to know: what is shared and why. REQUIRES:
called on a thread on which torch has made the memory's device current.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint64, c_void_p

LIBRARY = "libcuda.so.1"
FD_HANDLE = 0x1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_HANDLE_BYTES = 64  # CUipcMemHandle


class IpcMemHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * _HANDLE_BYTES),)


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location_type", c_int),
        ("location_id", c_int),
        ("win32_handle_meta_data", c_void_p),
        ("allocation_flags", c_char * 8),
    )


_SIGNATURES = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuIpcGetMemHandle": (POINTER(IpcMemHandle), c_uint64),
    "cuMemRetainAllocationHandle": (POINTER(c_uint64), c_void_p),
    "cuMemRelease": (c_uint64,),
    "cuMemGetAllocationPropertiesFromHandle": (POINTER(AllocationProperties), c_uint64),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
}


class DriverError(Exception):
    """A call that did not return CUDA_SUCCESS."""


class Driver:
    def __init__(self, library: str = LIBRARY) -> None:
        """OSError if there is no such library; AttributeError if it is too old."""
        self._cuda = ctypes.CDLL(library)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._cuda, name)
            function.argtypes, function.restype = arguments, c_int

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result != 0:
            raise DriverError(f"{name}: {self._error_name(result)}")

    def _error_name(self, result: int) -> str:
        name = c_char_p()
        known = self._cuda.cuGetErrorName(result, byref(name)) == 0 and name.value is not None
        return name.value.decode() if known and name.value is not None else f"error {result}"

    def address_range(self, address: int) -> tuple[int, int]:
        """(base, size) of the allocation, or of the reserved range, that the address lies in."""
        base, size = c_uint64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value, size.value

    def device_uuid(self, address: int) -> str:
        """UUID of the device, or MIG instance, that has the memory: "GPU-..." as nvidia-smi writes it."""
        ordinal, device, raw = c_int(), c_int(), (c_char * 16)()
        self._call("cuPointerGetAttribute", byref(ordinal), _DEVICE_ORDINAL, address)
        self._call("cuDeviceGet", byref(device), ordinal.value)
        self._call("cuDeviceGetUuid_v2", byref(raw), device.value)
        return f"GPU-{uuid.UUID(bytes=raw.raw)}"

    def ipc_handle(self, base: int) -> bytes:
        """DriverError unless it is cudaMalloc memory."""
        handle = IpcMemHandle()
        self._call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle)

    @contextmanager
    def allocation_at(self, address: int) -> Iterator[int]:
        """The handle of the VMM allocation mapped at the address, retained in the context; the same at all its addresses."""
        handle = c_uint64()
        self._call("cuMemRetainAllocationHandle", byref(handle), address)
        try:
            yield handle.value
        finally:
            self._call("cuMemRelease", handle.value)

    def handle_types(self, allocation: int) -> int:
        """The kinds of handle that the allocation may be exported as: FD_HANDLE and other bits."""
        properties = AllocationProperties()
        self._call("cuMemGetAllocationPropertiesFromHandle", byref(properties), allocation)
        return int(properties.requested_handle_types)

    def export_fd(self, allocation: int) -> int:
        """A descriptor that keeps the memory until it is closed."""
        fd = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(fd), allocation, FD_HANDLE, 0)
        os.set_inheritable(fd.value, False)
        return fd.value
