"""The KV cache's memory, in a form that another process can map.

Owns: moving CPU storages into shared memory in place, and the table of registered memories. Refuses
to know: sockets, and what the memory means.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import torch
from kvserver.adapters.vllm.planes import UnsupportedLayout, describe, merge, tensor_planes

from kvserver.planes import Plane
from kvserver.protocol import SharedFd

SHM = "/dev/shm"
_SPARE_BYTES = 1 << 20


class CannotShare(Exception):
    """The memory cannot be handed to the daemon; the message says what to change."""


@dataclass(frozen=True)
class SharedCaches:
    """`fds[i]` is memory number i. The descriptors stay open as long as this object is used."""

    fds: list[int]
    memory: list[SharedFd]
    planes: list[Plane]
    layout: str


def share(kv_caches: dict[str, torch.Tensor], num_blocks: int) -> SharedCaches:
    """Share all layers' storages. CannotShare or UnsupportedLayout before anything was moved."""
    layers: dict[tuple[int, torch.Size, tuple[int, ...]], tuple[str, torch.Tensor]] = {}
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedLayout(f"layer {name} has no single KV cache tensor")
        layers.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), (name, tensor))
    storages: dict[int, torch.UntypedStorage] = {}
    for name, tensor in layers.values():
        if tensor.device.type != "cpu":
            raise CannotShare(f"layer {name} lives on {tensor.device}; this version serves CPU memory")
        describe(name, tensor, num_blocks)
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
    _check_room(sum(s.nbytes() for s in storages.values() if not s.is_shared()))
    fds: list[int] = []
    memory: list[SharedFd] = []
    numbers: dict[int, int] = {}
    for storage in storages.values():
        fd, size = storage._share_fd_cpu_()
        numbers[storage.data_ptr()] = len(fds)
        memory.append(SharedFd(index=len(fds), size_bytes=size))
        fds.append(os.dup(fd))
    planes: list[Plane] = []
    for _, tensor in layers.values():
        base = tensor.untyped_storage().data_ptr()
        planes += tensor_planes(tensor, num_blocks, numbers[base], tensor.data_ptr() - base)
    text = ";".join(describe(name, tensor, num_blocks) for name, tensor in layers.values())
    return SharedCaches(fds, memory, merge(planes), hashlib.sha256(text.encode()).hexdigest())


def _check_room(size: int) -> None:
    """Writing past the end of a full tmpfs kills the process, so look first."""
    stat = os.statvfs(SHM)
    free = stat.f_bavail * stat.f_frsize
    if size + _SPARE_BYTES > free:
        raise CannotShare(
            f"{SHM} has {free} bytes free and the KV cache needs {size}; enlarge it "
            "(docker: --shm-size or --ipc=host, Kubernetes: an emptyDir of medium Memory)"
        )
