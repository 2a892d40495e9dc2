"""Every known layout through a real daemon, bitwise: the adapter's own sharing and planes on both sides.

What a block is, `Layout.block` defines by plain indexing, apart from all that is tested.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from support.daemon import Daemon
from support.memory import Geometry, SharedMemory
from support.worker import Worker, make_keys

from kvserver.adapters.common.memory import share
from kvserver.protocol import Retrieved, Stored

L, H, N, C = 3, 2, 16, 8  # layers, heads, tokens of a block, content of a token and head
SOURCE_BLOCKS, TARGET_BLOCKS = 43, 29  # more than all other sizes, and none is a multiple
DTYPES = [torch.bfloat16, torch.float8_e4m3fn]


@dataclass(frozen=True)
class Layout:
    """`make(blocks, dtype)` gives the layers' tensors; `dim` counts blocks times `per_block`; so many planes."""

    make: Callable[[int, torch.dtype], list[torch.Tensor]]
    planes: int
    dim: int = 0
    per_block: int = 1
    known: int | None = None  # what the engine states of it

    def block(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor.narrow(self.dim, number * self.per_block, self.per_block)


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bytes, NaNs of every kind among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(bytearray(os.urandom(size)), dtype=torch.uint8).view(dtype).view(shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def logical(order: str) -> Callable[[int, torch.dtype], list[torch.Tensor]]:
    """vLLM 0.29+: [B, H, N, C] views of one allocation whose dimensions lie in this order."""

    def make(blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
        sizes = {"L": L, "B": blocks, "H": H, "N": N, "C": 2 * C}
        whole = filled(dtype, *(sizes[name] for name in order))
        return list(whole.permute([order.index(name) for name in "LBHNC"]).unbind(0))

    return make


def separate(*shape: object, layers: int = L, order: list[int] | None = None) -> Callable[..., list[torch.Tensor]]:
    """One allocation per tensor. In `shape` "B" stands for the blocks, ("B", k) for k times as many."""

    def make(blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
        sizes = [blocks if n == "B" else blocks * n[1] if isinstance(n, tuple) else n for n in shape]
        tensors = [filled(dtype, *sizes) for _ in range(layers)]  # type: ignore[arg-type]
        return [t.permute(order) for t in tensors] if order else tensors

    return make


def padded(blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Pages with unused room at their end, in one allocation."""
    whole = filled(dtype, L, blocks, H * N * C + 24)
    return [layer[:, : H * N * C].unflatten(1, (H, N, C)) for layer in whole.unbind(0)]


def mla_with_indexer(blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """DeepSeek V3.2: 656 bytes per token for MLA in fp8, 132 for the indexer."""
    tensors: list[torch.Tensor] = []
    for _ in range(L):
        tensors += [filled(torch.uint8, blocks, N, 656), filled(torch.uint8, blocks, N, 132)]
    return tensors


def mla_with_indexer_in_pages(blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same in one allocation, block outermost, each page padded: runs of two lengths that alternate."""
    page = N * 656 + 64, N * 132 + 32
    whole = filled(torch.uint8, blocks, L * sum(page))
    tensors: list[torch.Tensor] = []
    for i in range(L):
        start = i * sum(page)
        tensors.append(whole[:, start : start + N * 656].unflatten(1, (N, 656)))
        start += page[0]
        tensors.append(whole[:, start : start + N * 132].unflatten(1, (N, 132)))
    return tensors


def shared(blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Layers that use the KV of earlier ones."""
    first, second = separate("B", H, N, 2 * C, layers=2)(blocks, dtype)
    return [first, second, first, second.view(second.shape), first[:, :, :, :C]]


def strided(blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every second token and a part of each: nothing is contiguous but C - 3 elements."""
    return [filled(dtype, blocks, H, 2 * N, C + 2)[:, :, ::2, 1 : C - 2] for _ in range(L)]


LAYOUTS = {
    "LBHNC": Layout(logical("LBHNC"), L),
    "LBNHC": Layout(logical("LBNHC"), L),
    "LHBNC": Layout(logical("LHBNC"), L * H),
    "BLHNC": Layout(logical("BLHNC"), 1),
    "BLNHC": Layout(logical("BLNHC"), 1),
    "BHLNC": Layout(logical("BHLNC"), 1),
    "FlashAttention, keys and values apart": Layout(separate(2, "B", N, H, C), 2 * L, 1),
    "FlashAttention, keys and values apart, heads first": Layout(
        separate(2, "B", H, N, C, order=[0, 1, 3, 2, 4]), 2 * L, 1
    ),
    "FlashInfer": Layout(separate("B", 2, N, H, C), L),
    "FlashInfer, heads first": Layout(separate("B", 2, H, N, C, order=[0, 1, 3, 2, 4]), L),
    "[NB, NH, BS, 2*HS]": Layout(separate("B", H, N, 2 * C), L),
    "MLA": Layout(separate("B", N, 9 * C), L),
    "fp8 MLA and indexer": Layout(mla_with_indexer, 2 * L),
    "fp8 MLA and indexer in padded pages": Layout(mla_with_indexer_in_pages, 2 * L),
    "cross-layer": Layout(separate("B", L, 2, N, H, C, layers=1), 1),
    "SGLang MHA": Layout(separate(("B", N), H, C, layers=2 * L), 2 * L, 0, N),
    "SGLang MLA": Layout(separate(("B", N), 1, 9 * C), L, 0, N),
    "SGLang page_first": Layout(separate(2, ("B", N), L, H, C, layers=1), 2, 1, N),
    "SGLang page_first_direct": Layout(separate(2, "B", L, N, H, C, layers=1), 2, 1),
    "head-major": Layout(separate(2 * H, "B", N, C), 2 * L * H, 1),
    "padded pages": Layout(padded, L),
    "kernel blocks of a quarter": Layout(separate(("B", 4), H, N // 4, 2 * C), L, 0, 4),
    "kernel blocks of a half, keys apart": Layout(separate(2, ("B", 2), N // 2, H, C), 2 * L, 1, 2),
    "layers that share memory": Layout(shared, 2, known=0),
    "strided": Layout(strided, L * H * N),
}


class Tensors:
    """KV caches of one layout, shared and cut into planes by the adapter, and the worker whose memory they are."""

    def __init__(self, endpoint: str, layout: Layout, blocks: int, dtype: torch.dtype) -> None:
        self.form, self.tensors = layout, layout.make(blocks, dtype)
        self.caches = share({f"layers.{i}": tensor for i, tensor in enumerate(self.tensors)}, blocks, layout.known)
        geometry = Geometry(blocks, N, tuple(m.size_bytes for m in self.caches.memory), tuple(self.caches.planes))
        fds = iter(self.caches.fds)
        self.worker = Worker(
            endpoint, geometry, layout=self.caches.layout, allocate=lambda size: SharedMemory(size, next(fds))
        )

    @property
    def storages(self) -> list[torch.Tensor]:
        """Every byte, padding too."""
        bases = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.tensors}
        return [torch.tensor([], dtype=torch.uint8).set_(storage) for storage in bases.values()]

    def image(self) -> list[torch.Tensor]:
        return [storage.clone() for storage in self.storages]

    def blocks(self, numbers: list[int]) -> list[list[torch.Tensor]]:
        """The bytes of these blocks, layer by layer."""
        return [[as_bytes(self.form.block(t, number)) for t in self.tensors] for number in numbers]

    def put(self, numbers: list[int], contents: list[list[torch.Tensor]]) -> None:
        """Write them by plain indexing."""
        for number, layers in zip(numbers, contents, strict=True):
            for tensor, content in zip(self.tensors, layers, strict=True):
                block = self.form.block(tensor, number)
                block.copy_(content.view(tensor.dtype).view(block.shape))


def same(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    daemon = Daemon(l1_size="32MiB", chunk_tokens=4 * N).start()
    yield daemon
    daemon.close()


@pytest.fixture
def start(daemon: Daemon) -> Iterator[Callable[[Layout, int, torch.dtype], Tensors]]:
    made: list[Tensors] = []

    def make(layout: Layout, blocks: int, dtype: torch.dtype) -> Tensors:
        made.append(Tensors(daemon.endpoint, layout, blocks, dtype))
        return made[-1]

    yield make
    for each in made:
        each.worker.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_bitwise_in_an_engine_with_other_memory_and_no_other_byte_moves(daemon, start, name, dtype):
    layout = LAYOUTS[name]
    source, target = start(layout, SOURCE_BLOCKS, dtype), start(layout, TARGET_BLOCKS, dtype)
    workers = [w for i in daemon.status()["instances"] for w in i["workers"]]
    assert [worker["planes"] for worker in workers] == [layout.planes] * 2
    keys, before = make_keys(2), source.image()
    blocks, places = [40, 3, 17, 9, 1, 38, 22, 5], [2, 28, 7, 14, 27, 3, 1, 21]
    contents = source.blocks(blocks)
    assert source.worker.store(keys, blocks) == Stored(stored=2, skipped=0)
    assert all(torch.equal(a, b) for a, b in zip(source.image(), before, strict=True)), "a store wrote to the engine"
    assert target.worker.lookup(keys) == 2
    expected = target.image()
    assert target.worker.load(keys, places[3:-1], skip=3) == Retrieved(chunks=2)
    assert same(target.blocks(places[3:-1]), contents[3:-1])
    # The same by plain indexing on what was there before gives the same memory: no other byte was touched.
    loaded = target.image()
    for storage, image in zip(target.storages, expected, strict=True):
        storage.copy_(image)
    target.put(places[3:-1], contents[3:-1])
    assert all(torch.equal(a, b) for a, b in zip(target.image(), loaded, strict=True)), "a load touched other bytes"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_has_as_many_bytes_as_its_tensors_hold(daemon, start, name):
    engine = start(LAYOUTS[name], SOURCE_BLOCKS, torch.bfloat16)
    own = 2 if name == "layers that share memory" else len(engine.tensors)
    worker = daemon.status()["instances"][0]["workers"][0]
    assert worker["block_bytes"] == sum(content.numel() for content in engine.blocks([1])[0][:own])


def test_run_lengths_of_mla_and_its_indexer_differ(start):
    engine = start(LAYOUTS["fp8 MLA and indexer in padded pages"], SOURCE_BLOCKS, torch.uint8)
    assert [plane.run_bytes for plane in engine.caches.planes] == [N * 656, N * 132] * L
    assert len({plane.stride_bytes for plane in engine.caches.planes}) == 1


def test_padding_between_pages_is_not_copied(start):
    engine = start(LAYOUTS["padded pages"], SOURCE_BLOCKS, torch.bfloat16)
    assert all(plane.run_bytes < plane.stride_bytes for plane in engine.caches.planes)


@pytest.mark.parametrize("other", ["LBNHC", "BHLNC", "kernel blocks of a quarter", "FlashInfer"])
def test_engines_whose_bytes_lie_otherwise_in_a_slot_do_not_share(daemon, start, other):
    source = start(LAYOUTS["[NB, NH, BS, 2*HS]"], SOURCE_BLOCKS, torch.bfloat16)
    target = start(LAYOUTS[other], TARGET_BLOCKS, torch.bfloat16)
    keys = make_keys(1)
    source.worker.store(keys, [1, 2, 3, 4])
    assert (source.worker.lookup(keys), target.worker.lookup(keys)) == (1, 0)
