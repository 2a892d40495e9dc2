"""The KV cache's memory, in a form that another process can map.

Owns: moving CPU storages into shared memory in place, and the table of registered memories. Refuses
to know: sockets, and what the memory means.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
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
    kv_caches: dict[str, torch.Tensor],
    num_blocks: int,
    block_dims: Mapping[str, int | None] | None = None,
    groups: Sequence[Sequence[str]] = (),
) -> SharedCaches:
    """Share all layers' storages. CannotShare or UnsupportedLayout before anything was moved.

    `block_dims` says which dimension of a layer counts blocks, where the engine knows. `groups` are the
    layers of each KV cache group; those of several groups may lie in the same memory. None = all are of one.
    """
    known = block_dims or {}
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedLayout(f"layer {name} has no single KV cache tensor")
        if tensor.device.type != "cpu":
            raise CannotShare(f"layer {name} lives on {tensor.device}; this version serves CPU memory")
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in kv_caches.values():
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
    numbers = {base: number for number, base in enumerate(storages)}
    planes: list[Plane] = []
    texts: list[str] = []
    for group, layers in enumerate(_layers_of_groups(kv_caches, groups)):
        pieces = in_slot_order(
            tensor_planes(
                tensor,
                num_blocks,
                numbers[tensor.untyped_storage().data_ptr()],
                tensor.data_ptr() - tensor.untyped_storage().data_ptr(),
                known.get(name),
            )
            for name, tensor in layers.items()
        )
        planes += [msgspec.structs.replace(plane, group=group) for plane in merge(pieces, num_blocks)]
        texts += [describe(name, tensor, num_blocks, known.get(name)) for name, tensor in layers.items()]
        texts.append(describe_order(pieces))
    layout = hashlib.sha256(";".join(texts).encode()).hexdigest()
    _check_room(sum(s.nbytes() for s in storages.values() if not s.is_shared()))
    fds: list[int] = []
    memory: list[SharedFd] = []
    for storage in storages.values():
        fd, size = storage._share_fd_cpu_()
        memory.append(SharedFd(index=len(fds), size_bytes=size))
        fds.append(os.dup(fd))
    return SharedCaches(fds, memory, planes, layout)


def _layers_of_groups(
    kv_caches: dict[str, torch.Tensor], groups: Sequence[Sequence[str]]
) -> list[dict[str, torch.Tensor]]:
    """The layers of each group, every tensor once within it. UnsupportedLayout if a layer's group is not known."""
    if len(groups) < 2:
        return [_distinct(kv_caches)]
    found = [_distinct({name: kv_caches[name] for name in names if name in kv_caches}) for names in groups]
    tensors = {_place(tensor) for layers in found for tensor in layers.values()}
    for name, tensor in kv_caches.items():
        if _place(tensor) not in tensors:
            raise UnsupportedLayout(f"layer {name} is of no KV cache group")
    return found


def _distinct(layers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without those that are another one's tensor: layers may share their KV."""
    first = {_place(tensor): name for name, tensor in reversed(layers.items())}
    return {name: tensor for name, tensor in layers.items() if first[_place(tensor)] == name}


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _check_room(size: int) -> None:
    """Writing past the end of a full tmpfs kills the process, so look first."""
    stat = os.statvfs(SHM)
    free = stat.f_bavail * stat.f_frsize
    if size + _SPARE_BYTES > free:
        raise CannotShare(
            f"{SHM} has {free} bytes free and the KV cache needs {size}; enlarge it "
            "(docker: --shm-size or --ipc=host, Kubernetes: an emptyDir of medium Memory)"
        )
