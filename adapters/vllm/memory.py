"""The KV cache's memory, in a form that another process can map.

Owns: moving CPU storages into shared memory in place, and the table of registered memories. Refuses
to know: sockets, and what the memory means.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from kvserver.adapters.vllm.planes import (
    UnsupportedLayout,
    describe,
    describe_order,
    in_slot_order,
    merge,
    tensor_planes,
)

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


def share(
    kv_caches: dict[str, torch.Tensor], num_blocks: int, block_dims: Mapping[str, int | None] | None = None
) -> SharedCaches:
    """Share all layers' storages. CannotShare or UnsupportedLayout before anything was moved.

    `block_dims` says which dimension of a layer counts blocks, where the engine knows.
    """
    known = block_dims or {}
    layers: dict[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], tuple[str, torch.Tensor]] = {}
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedLayout(f"layer {name} has no single KV cache tensor")
        if tensor.device.type != "cpu":
            raise CannotShare(f"layer {name} lives on {tensor.device}; this version serves CPU memory")
        layers.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), (name, tensor))
    storages: dict[int, torch.UntypedStorage] = {}
    for _, tensor in layers.values():
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
    numbers = {base: number for number, base in enumerate(storages)}
    planes: list[list[Plane]] = []
    for name, tensor in layers.values():
        base = tensor.untyped_storage().data_ptr()
        planes.append(tensor_planes(tensor, num_blocks, numbers[base], tensor.data_ptr() - base, known.get(name)))
    pieces = in_slot_order(planes)
    merged = merge(pieces, num_blocks)
    texts = [describe(name, tensor, num_blocks, known.get(name)) for name, tensor in layers.values()]
    layout = hashlib.sha256(";".join([*texts, describe_order(pieces)]).encode()).hexdigest()
    _check_room(sum(s.nbytes() for s in storages.values() if not s.is_shared()))
    fds: list[int] = []
    memory: list[SharedFd] = []
    for storage in storages.values():
        fd, size = storage._share_fd_cpu_()
        memory.append(SharedFd(index=len(fds), size_bytes=size))
        fds.append(os.dup(fd))
    return SharedCaches(fds, memory, merged, layout)


def _check_room(size: int) -> None:
    """Writing past the end of a full tmpfs kills the process, so look first."""
    stat = os.statvfs(SHM)
    free = stat.f_bavail * stat.f_frsize
    if size + _SPARE_BYTES > free:
        raise CannotShare(
            f"{SHM} has {free} bytes free and the KV cache needs {size}; enlarge it "
            "(docker: --shm-size or --ipc=host, Kubernetes: an emptyDir of medium Memory)"
        )
