"""The NVIDIA driver by ctypes, as far as a test engine needs it: memory that another process can map.

Owns: the primary context of GPU 0, which torch and the native module share. Raises OSError where there is no driver.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any

_PINNED, _DEVICE, _POSIX_FD, _READ_WRITE = 1, 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", c_int)]


class _IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", c_char * 64)]


_ARGUMENTS: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGet": [c_void_p, c_int],
    "cuDevicePrimaryCtxRetain": [c_void_p, c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxSynchronize": [],
    "cuGetErrorName": [c_int, c_void_p],
    "cuMemGetAllocationGranularity": [c_void_p, c_void_p, c_int],
    "cuMemCreate": [c_void_p, c_size_t, c_void_p, c_uint64],
    "cuMemExportToShareableHandle": [c_void_p, c_uint64, c_int, c_uint64],
    "cuMemImportFromShareableHandle": [c_void_p, c_void_p, c_int],
    "cuMemAddressReserve": [c_void_p, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemSetAccess": [c_uint64, c_size_t, c_void_p, c_size_t],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemRelease": [c_uint64],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
    "cuMemGetInfo_v2": [c_void_p, c_void_p],
    "cuMemGetAddressRange_v2": [c_void_p, c_void_p, c_uint64],
    "cuIpcGetMemHandle": [c_void_p, c_uint64],
}


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


def call(name: str, *arguments: Any) -> None:
    """RuntimeError, with the error's name, if it fails."""
    result = getattr(_library(), name)(*arguments)
    if result != 0:
        text = ctypes.c_char_p()
        _library().cuGetErrorName(result, byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown').decode()} ({result})")


@functools.cache
def _context() -> int:
    call("cuInit", 0)
    device, context = c_int(), c_void_p()
    call("cuDeviceGet", byref(device), 0)
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    assert context.value is not None
    return context.value


def enter() -> None:
    """This thread works with GPU 0."""
    call("cuCtxSetCurrent", _context())


def free_bytes() -> int:
    """Free memory of the GPU; all processes count."""
    enter()
    free, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value


def read(address: int, size: int) -> bytes:
    """Waits for all work of this process."""
    enter()
    call("cuCtxSynchronize")
    content = ctypes.create_string_buffer(size)
    call("cuMemcpyDtoH_v2", content, address, size)
    return content.raw


def write(address: int, content: bytes) -> None:
    """Returns when the bytes are there: a small copy from pageable memory may return before."""
    enter()
    call("cuMemcpyHtoD_v2", address, content, len(content))
    call("cuCtxSynchronize")


def ipc_handle(address: int) -> tuple[bytes, int]:
    """(handle of the allocation that the address lies in, offset in it)."""
    enter()
    base, size, handle = c_uint64(), c_size_t(), _IpcHandle()
    call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
    call("cuIpcGetMemHandle", byref(handle), base)
    return bytes(bytearray(handle)), address - base.value


def export(size: int) -> int:
    """A descriptor of fresh memory of the GPU (cuMemCreate), which exists as long as it or a mapping does."""
    enter()
    handle, fd = c_uint64(), c_int(-1)
    call("cuMemCreate", byref(handle), _whole(size), byref(_properties()), 0)
    call("cuMemExportToShareableHandle", byref(fd), handle, _POSIX_FD, 0)
    call("cuMemRelease", handle)
    return fd.value


def _properties() -> _Properties:
    return _Properties(type=_PINNED, handle_types=_POSIX_FD, location=_Location(_DEVICE, 0))


def _whole(size: int) -> int:
    """A driver maps whole granules."""
    granularity = c_size_t()
    call("cuMemGetAllocationGranularity", byref(granularity), byref(_properties()), 0)
    return -(-size // granularity.value) * granularity.value


def _mapped(handle: c_uint64, size: int) -> int:
    """The address at which this process maps the memory from now on; the mapping keeps it."""
    address, access = c_uint64(), _Access(_Location(_DEVICE, 0), _READ_WRITE)
    call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
    call("cuMemMap", address, size, 0, handle, 0)
    call("cuMemSetAccess", address, size, byref(access), 1)
    call("cuMemRelease", handle)
    return address.value


def exportable(size: int) -> int:
    """The address of fresh memory that can be exported as a descriptor, as an engine has it: imported memory states that it cannot be.

    It is not freed before the process ends.
    """
    enter()
    handle = c_uint64()
    call("cuMemCreate", byref(handle), _whole(size), byref(_properties()), 0)
    return _mapped(handle, _whole(size))


class Allocation:
    """Memory of the GPU that a descriptor stands for, mapped here; takes the descriptor over. Who made it does not matter."""

    def __init__(self, size: int, fd: int) -> None:
        enter()
        handle = c_uint64()
        self._mapped = _whole(size)
        call("cuMemImportFromShareableHandle", byref(handle), fd, _POSIX_FD)
        self.address, self.fd, self.size = _mapped(handle, self._mapped), fd, size

    def close(self) -> None:
        enter()
        call("cuCtxSynchronize")
        call("cuMemUnmap", self.address, self._mapped)
        call("cuMemAddressFree", self.address, self._mapped)
        os.close(self.fd)
