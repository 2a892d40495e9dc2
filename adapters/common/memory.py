"""The KV cache as registered memories and planes.

Owns: the list of storages, the place of each layer in the registered memories, and the text of the layout. Refuses to know: how
memory is handed over (`exporter`), sockets, and what the memory means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from kvserver.adapters.common.cuda_memory import CudaMemory
from kvserver.adapters.common.exporter import CannotShare, MakeExporter, Window
from kvserver.adapters.common.host_memory import HostMemory
from kvserver.adapters.common.planes import (
    UnsupportedLayout,
    describe,
    describe_order,
    in_slot_order,
    merge,
    tensor_planes,
)
from kvserver.protocol import Memory, Plane


@dataclass(frozen=True)
class SharedCaches:
    """KV cache in shareable memory. `fds` are sent with Attach, in this order, and closed when the registration ends."""

    fds: list[int]
    memory: list[Memory]
    planes: list[Plane]
    layout: str


def exporter_for(devices: Iterable[torch.device], may_move: bool = True) -> MakeExporter:
    """The exporter of memory on these devices. CannotShare unless it is all of one kind. `may_move` CPU memory."""
    distinct = sorted({str(device) for device in devices})
    if len(distinct) != 1:
        raise CannotShare(f"the KV cache of one worker lies on several devices: {' and '.join(distinct)}")
    kind = distinct[0].split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise CannotShare(f"the KV cache lies on {distinct[0]}; memory of cpu and cuda devices can be shared")
    return CudaMemory if kind == "cuda" else partial(HostMemory, may_move=may_move)


def share(
    kv_caches: dict[str, torch.Tensor],
    num_blocks: int,
    block_dimension: int | None = None,
    groups: Sequence[Sequence[str]] = (),
    make_exporter: MakeExporter | None = None,
    may_move: bool = True,
    group_blocks: Sequence[int] = (),
) -> SharedCaches:
    """Share all layers' storages. CannotShare or UnsupportedLayout before anything was moved.

    `block_dimension` counts blocks in each layer's tensor; None where only shapes can show it. `groups` are the layers of
    each KV cache group; those of several groups may lie in the same memory. None = all are of one. `make_exporter`: by the tensors' device, unless given.
    `may_move`: the engine has captured no address of CPU memory. `group_blocks`: blocks of each group, where they differ.
    """
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedLayout(f"layer {name} has no single KV cache tensor")
    make = make_exporter or exporter_for((tensor.device for tensor in kv_caches.values()), may_move)
    storages = {s.data_ptr(): s for s in (tensor.untyped_storage() for tensor in kv_caches.values())}
    exporter = make(list(storages.values()))
    planes: list[Plane] = []
    texts: list[str] = []
    for group, layers in enumerate(_layers_of_groups(kv_caches, groups)):
        blocks = group_blocks[group] if group_blocks else num_blocks
        pieces = in_slot_order(
            tensor_planes(tensor, blocks, *_place_in(exporter.windows, tensor), block_dimension)
            for tensor in layers.values()
        )
        planes += [msgspec.structs.replace(plane, group=group) for plane in merge(pieces, blocks)]
        texts += [describe(name, tensor, blocks, block_dimension) for name, tensor in layers.items()]
        texts.append(describe_order(pieces))
    layout = hashlib.sha256(";".join(texts).encode()).hexdigest()
    exported = exporter.export()
    return SharedCaches(exported.fds, exported.memory, planes, layout)


def _place_in(windows: Sequence[Window], tensor: torch.Tensor) -> tuple[int, int]:
    """(memory number, offset there) of a tensor's first byte."""
    address = tensor.data_ptr()
    return next((i, address - window.start) for i, window in enumerate(windows) if window.contains(address))


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
    """Layers without those that have another layer's tensor: layers may share their KV."""
    first = {_place(tensor): name for name, tensor in reversed(layers.items())}
    return {name: tensor for name, tensor in layers.items() if first[_place(tensor)] == name}


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
