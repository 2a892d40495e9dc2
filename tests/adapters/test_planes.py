"""Planes from tensors: gathered through them, a block has all its bytes, whatever the layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvserver.adapters.common.memory import share
from kvserver.adapters.common.planes import UnsupportedLayout, block_dimension, in_slot_order, merge, tensor_planes
from kvserver.protocol import Plane

L, B, H, N, C = 3, 7, 2, 16, 8  # layers, blocks, heads, tokens of a block, content of a token and head


def physical(order: str) -> list[torch.Tensor]:
    """Logical [B, H, N, C] views, one per layer, of one allocation whose dimensions lie in this order."""
    sizes = {"L": L, "B": B, "H": H, "N": N, "C": C}
    whole = torch.zeros([sizes[name] for name in order], dtype=torch.bfloat16)
    return list(whole.permute([order.index(name) for name in "LBHNC"]).unbind(0))


def separate(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(L)]


def padded() -> list[torch.Tensor]:
    """Pages with unused room at their end."""
    whole = torch.zeros(L, B, H * N * C + 24, dtype=torch.bfloat16)
    return [layer[:, : H * N * C].view(B, H, N, C) for layer in whole.unbind(0)]


LAYOUTS = {
    # name: (layers' tensors, planes, which dimension counts blocks)
    "LBHNC": (lambda: physical("LBHNC"), L, 0),
    "LBNHC": (lambda: physical("LBNHC"), L, 0),
    "LHBNC": (lambda: physical("LHBNC"), L * H, 0),
    "BLHNC": (lambda: physical("BLHNC"), 1, 0),
    "BLNHC": (lambda: physical("BLNHC"), 1, 0),
    "BHLNC": (lambda: physical("BHLNC"), 1, 0),
    "FlashAttention until 0.20": (lambda: separate(2, B, N, H, C), 2 * L, 1),
    "FlashInfer until 0.24": (lambda: separate(B, 2, N, H, C), L, 0),
    "[NB, NH, BS, 2*HS]": (lambda: separate(B, H, N, 2 * C), L, 0),
    "MLA": (lambda: separate(B, N, 9 * C), L, 0),
    "bytes": (lambda: separate(B, N, 132, dtype=torch.uint8), L, 0),
    "MLA with an indexer's own layers": (
        lambda: [*separate(B, N, 9 * C), *separate(B, N, 132, dtype=torch.uint8)],
        2 * L,
        0,
    ),
    "padded pages": (padded, L, 0),
}


def named(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"layers.{i}": tensor for i, tensor in enumerate(tensors)}


def fill(tensors: list[torch.Tensor]) -> None:
    """Every element of every layer another number, as far as its bytes allow."""
    for i, tensor in enumerate(tensors):
        numbers = torch.arange(tensor.numel(), dtype=torch.int64) * (2 * i + 1) + i
        size = tensor.element_size()
        values = (numbers % (1 << 8 * size)).to({1: torch.uint8, 2: torch.uint16}[size])
        tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


def planes_of(tensors: list[torch.Tensor]) -> tuple[list[Plane], list[torch.UntypedStorage]]:
    """As memory.share makes them, without sharing."""
    storages = list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())
    numbers = {storage.data_ptr(): i for i, storage in enumerate(storages)}
    planes: list[list[Plane]] = []
    for tensor in tensors:
        base = tensor.untyped_storage().data_ptr()
        planes.append(tensor_planes(tensor, B, numbers[base], tensor.data_ptr() - base))
    return merge(in_slot_order(planes), B), storages


def memory(storage: torch.UntypedStorage) -> bytes:
    return bytes(torch.tensor([], dtype=torch.uint8).set_(storage).numpy())


def gather(planes: list[Plane], storages: list[torch.UntypedStorage], block: int) -> bytes:
    memories = [memory(storage) for storage in storages]
    starts = [(p, p.offset + block * p.stride_bytes) for p in planes]
    return b"".join(memories[p.memory][start : start + p.run_bytes] for p, start in starts)


def in_address_order(views: list[torch.Tensor], storages: list[torch.UntypedStorage]) -> bytes:
    """Their elements as they lie in memory: storage by storage, by address."""
    order = {storage.data_ptr(): number for number, storage in enumerate(storages)}
    elements: list[tuple[int, int, bytes]] = []
    for view in views:
        places = torch.arange(view.untyped_storage().nbytes() // view.element_size())
        places = places.as_strided(view.shape, view.stride(), view.storage_offset())
        raw, size = view.contiguous().view(torch.uint8).numpy().tobytes(), view.element_size()
        number = order[view.untyped_storage().data_ptr()]
        elements += [
            (number, place, raw[at * size : (at + 1) * size]) for at, place in enumerate(places.flatten().tolist())
        ]
    return b"".join(content for _, _, content in sorted(elements))


@pytest.mark.parametrize("name", LAYOUTS)
def test_gathered_through_planes_a_block_is_the_tensors_block(name):
    make, count, dim = LAYOUTS[name]
    tensors = make()
    fill(tensors)
    planes, storages = planes_of(tensors)
    assert len(planes) == count
    for block in range(B):
        assert gather(planes, storages, block) == in_address_order([t.select(dim, block) for t in tensors], storages)


@pytest.mark.parametrize("name", LAYOUTS)
def test_scattered_through_planes_a_block_is_whole_and_no_other_is_touched(name):
    make, _, dim = LAYOUTS[name]
    source, target = make(), make()
    fill(source)
    planes, storages = planes_of(source)
    _, targets = planes_of(target)
    for block in (2, 5):
        views = [torch.tensor([], dtype=torch.uint8).set_(storage) for storage in targets]
        content, at = gather(planes, storages, block), 0
        for plane in planes:
            start = plane.offset + block * plane.stride_bytes
            piece = torch.frombuffer(bytearray(content[at : at + plane.run_bytes]), dtype=torch.uint8)
            views[plane.memory][start : start + plane.run_bytes] = piece
            at += plane.run_bytes
    for one, other in zip(source, target, strict=True):
        for block in range(B):
            found = other.select(dim, block)
            expected = one.select(dim, block) if block in (2, 5) else torch.zeros_like(found)
            assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", LAYOUTS)
def test_planes_of_two_blocks_never_overlap(name):
    make, _, _ = LAYOUTS[name]
    planes, storages = planes_of(make())
    marks = [bytearray(storage.nbytes()) for storage in storages]
    for plane in planes:
        for block in range(B):
            start = plane.offset + block * plane.stride_bytes
            assert not any(marks[plane.memory][start : start + plane.run_bytes])
            marks[plane.memory][start : start + plane.run_bytes] = b"\1" * plane.run_bytes
    if name != "padded pages":
        assert all(all(mark) for mark in marks), "bytes that no plane covers"


@pytest.mark.parametrize("shape", [(B + 1, H, N, C), (4, H, N, C), (H, N, C, B - 1)])
def test_a_tensor_without_a_block_dimension_is_refused(shape):
    with pytest.raises(UnsupportedLayout, match="has no dimension of 7 blocks"):
        tensor_planes(torch.zeros(shape), B, 0, 0)


@pytest.mark.parametrize("shape", [(B, H, 2 * B, C), (2 * B, B, N, C), (2, B, N, B)])
def test_a_tensor_with_two_dimensions_that_may_count_blocks_is_refused(shape):
    """A multiple of the blocks may be kernel blocks or tokens: neither candidate is likelier."""
    with pytest.raises(UnsupportedLayout, match="could all count 7 blocks"):
        tensor_planes(torch.zeros(shape), B, 0, 0)


@pytest.mark.parametrize("dim", [0, 2])
def test_where_the_engine_knows_the_block_dimension_nothing_is_ambiguous(dim):
    planes = tensor_planes(torch.zeros(B, H, B, C), B, 0, 0, known=dim)
    assert {plane.stride_bytes for plane in planes} == {4 * (H * B * C if dim == 0 else C)}


def test_a_dimension_that_cannot_be_what_the_engine_states_is_refused():
    with pytest.raises(UnsupportedLayout, match="has no dimension of 7 blocks in place 1"):
        tensor_planes(torch.zeros(B, H, N, C), B, 0, 0, known=1)


def test_a_tensor_that_repeats_elements_is_refused():
    with pytest.raises(UnsupportedLayout, match="repeat elements"):
        tensor_planes(torch.zeros(B, 1, N, C).expand(B, H, N, C), B, 0, 0)


def test_a_layer_that_is_no_tensor_is_refused():
    with pytest.raises(UnsupportedLayout, match=r"layer layers\.0 has no single KV cache tensor"):
        share({"layers.0": [torch.zeros(B, N)]}, B)


def test_ambiguous_block_dimension_of_two_blocks_is_refused_unless_it_is_known():
    with pytest.raises(UnsupportedLayout, match=r"dimensions \[0, 1"):
        block_dimension((2, 2, N, H, C), 2)
    assert block_dimension((2, 2, N, H, C), 2, known=1) == 1


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((B, H, N, C), (H * N * C, N * C, C // 2, 1)),  # the tokens of a head
        ((B, N, C), (N * C // 2, C, 1)),  # blocks
        ((B, H, N, C), (0, N * C, C, 1)),
    ],
)
def test_a_tensor_whose_parts_overlap_is_refused(shape, stride):
    tensor = torch.zeros(B * H * N * C).as_strided(shape, stride)
    with pytest.raises(UnsupportedLayout, match="repeat elements"):
        tensor_planes(tensor, B, 0, 0)


def test_layers_whose_blocks_lie_across_each_other_are_refused():
    """A store of one layer's block 3 would hold the other one's block 2."""
    whole = torch.zeros((B + 1) * N * C)
    one, other = whole[: B * N * C].view(B, N, C), whole[N * C :].view(B, N, C)
    wide = whole[: B * N * C].view(B, N, C)[:, : N // 2]
    narrow = whole[: B * N * C // 2].view(B, N, C // 2)
    for caches in ({"a": one, "b": other}, {"a": wide, "b": narrow}):
        with pytest.raises(UnsupportedLayout, match="layers overlap in memory"):
            share(caches, B)
    assert not whole.is_shared(), "it was refused before anything was moved"


def test_layers_that_see_the_same_bytes_differently_are_registered_once():
    whole = torch.zeros(B, N, 2 * C, dtype=torch.bfloat16)
    caches = {"both": whole, "keys": whole[:, :, :C], "bytes": whole.view(torch.uint8)}
    shared = share(caches, B, 0)
    assert shared.planes == [Plane(0, 0, 4 * N * C, 4 * N * C)]
    assert shared.layout != share({"both": whole}, B).layout


def test_layers_that_share_memory_are_registered_once():
    tensor = torch.zeros(B, H, N, C)
    caches = share({"layers.0": tensor, "layers.1": tensor}, B)
    assert len(caches.memory) == 1
    assert sum(plane.run_bytes for plane in caches.planes) == H * N * C * 4


SCRIPT = """
import json, sys
import torch
sys.path[:0] = json.loads(sys.argv[1])
from test_planes import describe_all
ballast = [torch.zeros(1000 + i) for i in range(1000)]
print(json.dumps(describe_all()))
"""


def describe_all() -> dict[str, list]:
    """For every layout its text and planes."""
    found = {}
    for name, (make, _, _) in LAYOUTS.items():
        caches = share(named(make()), B)
        planes = [[p.memory, p.offset, p.stride_bytes, p.run_bytes] for p in caches.planes]
        found[name] = [caches.layout, planes]
    return found


def test_two_processes_describe_the_same_layout_alike():
    """Wherever their allocations lie: order and text come from the layers."""
    folders = json.dumps([__file__.rsplit("/", 1)[0], __file__.rsplit("/", 2)[0]])
    other = subprocess.run(
        [sys.executable, "-c", SCRIPT, folders],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(other.stdout.splitlines()[-1]) == describe_all()


LOGICAL = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC", "padded pages"]


@pytest.mark.parametrize("one", LOGICAL)
@pytest.mark.parametrize("other", LOGICAL)
def test_texts_are_equal_exactly_when_slots_are(one, other):
    texts, slots = [], []
    for name in (one, other):
        tensors = LAYOUTS[name][0]()
        fill(tensors)
        slots.append(gather(*planes_of(tensors), 3))
        texts.append(share(named(tensors), B).layout)
    assert (texts[0] == texts[1]) == (slots[0] == slots[1])


@pytest.mark.parametrize("make", [lambda b: separate(b, H, N, C), lambda b: separate(2, b, N, H, C)])
def test_the_number_of_blocks_stays_out_of_the_text(make):
    """Engines with more and with less memory share."""
    assert share(named(make(B)), B).layout == share(named(make(2 * B)), 2 * B).layout


def test_layers_dtypes_and_shapes_are_in_the_text():
    tensors = separate(B, H, N, C)
    texts = [
        share(caches, B).layout
        for caches in (
            named(tensors),
            named(tensors[:2]),
            {f"other.{i}": tensor for i, tensor in enumerate(tensors)},
            named(separate(B, H, N, C, dtype=torch.float16)),
            named(separate(B, H, 2 * N, C)),
        )
    ]
    assert len(set(texts)) == len(texts)


def test_sharing_keeps_what_the_tensors_hold():
    tensors = separate(B, H, N, C)
    fill(tensors)
    before = [tensor.clone() for tensor in tensors]
    caches = share(named(tensors), B)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert all(tensor.is_shared() for tensor in tensors)
    assert [m.size_bytes for m in caches.memory] == [tensor.untyped_storage().nbytes() for tensor in tensors]
