"""CPU memory: storages in shared memory, handed over by descriptors.

Model runners capture the addresses of the KV cache before it is registered. So `shared_allocation` shares the memory as it is
allocated. Other storage is moved only where the engine is known to capture nothing.

Owns: the allocation, and the check that /dev/shm has space. Refuses to know: planes, sockets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvserver.adapters.common.exporter import CannotShare, Exported, Window
from kvserver.adapters.common.log import log
from kvserver.protocol import SharedFd

SHM = "/dev/shm"
_SPARE_BYTES = 1 << 20


class HostMemory:
    def __init__(self, storages: Sequence[torch.UntypedStorage], may_move: bool = True) -> None:
        self.windows = [Window(s.data_ptr(), s.data_ptr(), s.nbytes()) for s in storages]
        self._storages, self._may_move = storages, may_move

    def export(self) -> Exported:
        missing = sum(s.nbytes() for s in self._storages if not s.is_shared())
        if missing and not self._may_move:
            raise CannotShare(
                "the KV cache was not allocated in shared memory, and the engine knows its addresses already: "
                "another connector allocates it, or " + _no_room(missing)
            )
        if not _has_room(missing):
            raise CannotShare(_no_room(missing))
        exported = Exported([], [])
        for index, storage in enumerate(self._storages):
            fd, size = storage._share_fd_cpu_()
            exported.memory.append(SharedFd(index=index, size_bytes=size))
            exported.fds.append(os.dup(fd))
        return exported


class shared_allocation(TorchFunctionMode):  # type: ignore[misc]  # named as torch names its own
    """Context in which `torch.zeros(bytes, dtype=torch.int8, device="cpu")` allocates shared memory, while /dev/shm has space."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.zeros
            and kwargs.get("dtype") is torch.int8
            and torch.device(kwargs.get("device") or "cpu").type == "cpu"
            and len(args) == 1
            and isinstance(args[0], int)
        ):
            try:
                return _shared_zeros(args[0])
            except Exception:  # the engine has its memory all the same; registration states why it cannot be shared
                log.exception("kvserver: no shared memory for the KV cache")
        return func(*args, **kwargs)


def _shared_zeros(size: int) -> torch.Tensor:
    """OSError if /dev/shm has no space: writing past the end of a full tmpfs would kill the process later."""
    storage = torch.UntypedStorage._new_shared(size, device="cpu")
    fd, _ = storage._share_fd_cpu_()
    os.posix_fallocate(fd, 0, size)
    with torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=torch.int8).set_(storage, 0, (size,), (1,))


def _has_room(size: int) -> bool:
    """Writing past the end of a full tmpfs kills the process, so look first."""
    stat = os.statvfs(SHM)
    return size + _SPARE_BYTES <= stat.f_bavail * stat.f_frsize


def _no_room(size: int) -> str:
    stat = os.statvfs(SHM)
    return (
        f"{SHM} has {stat.f_bavail * stat.f_frsize} bytes free and the KV cache needs {size}; enlarge it "
        "(docker: --shm-size or --ipc=host, Kubernetes: an emptyDir of medium Memory)"
    )
