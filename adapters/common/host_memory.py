"""CPU memory: storages move into shared memory in place, and are shared by descriptors.

Owns: the check that /dev/shm has space for them. Refuses to know: planes, sockets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from kvserver.adapters.common.exporter import CannotShare, Exported, Window

from kvserver.protocol import SharedFd

SHM = "/dev/shm"
_SPARE_BYTES = 1 << 20


class HostMemory:
    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self.windows = [Window(s.data_ptr(), s.data_ptr(), s.nbytes()) for s in storages]
        self._storages = storages

    def export(self) -> Exported:
        _check_room(sum(s.nbytes() for s in self._storages if not s.is_shared()))
        exported = Exported([], [])
        for index, storage in enumerate(self._storages):
            fd, size = storage._share_fd_cpu_()
            exported.memory.append(SharedFd(index=index, size_bytes=size))
            exported.fds.append(os.dup(fd))
        return exported


def _check_room(size: int) -> None:
    """Writing past the end of a full tmpfs kills the process, so look first."""
    stat = os.statvfs(SHM)
    free = stat.f_bavail * stat.f_frsize
    if size + _SPARE_BYTES > free:
        raise CannotShare(
            f"{SHM} has {free} bytes free and the KV cache needs {size}; enlarge it "
            "(docker: --shm-size or --ipc=host, Kubernetes: an emptyDir of medium Memory)"
        )
