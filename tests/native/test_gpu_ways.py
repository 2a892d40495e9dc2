"""The ways that the GPU benchmark compares with (`bench/native/gpu_ways.cu`): their addresses, on the host, and that nvcc takes them.

A comparison that moved other bytes than ours would compare nothing.
"""

from __future__ import annotations

import ctypes
import random
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent.parent / "bench"))

from gpu_ways import BY_CHUNKS, WAYS, OtherWays, WayFailed, build, find_nvcc

from .test_cuda_build import cuobjdump

NUM_BLOCKS, PLANES, BLOCK_TOKENS, GUARD = 29, 6, 16, 64


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("ways"), on_host=True)


class Memory:
    """Noise with a guard on either side, and where it lies: as aligned as the GPU's."""

    def __init__(self, size: int) -> None:
        self._raw = ctypes.create_string_buffer(size + 2 * GUARD + 256)
        start = -(-(ctypes.addressof(self._raw) + GUARD) // 256) * 256
        self.address, self.size = start, size
        self.all = (ctypes.c_ubyte * (size + 2 * GUARD)).from_address(start - GUARD)
        ctypes.memmove(self.all, random.randbytes(size + 2 * GUARD), size + 2 * GUARD)

    def image(self) -> bytearray:
        return bytearray(self.all)


def places(way: str, blocks: list[int], chunk_blocks: int, run: int) -> list[tuple[int, int]]:
    """For each run of the request: (its place in the KV, its place in host memory), guards included."""
    found = []
    for index, block in enumerate(blocks):
        chunk, inner = divmod(index, chunk_blocks)
        for plane in range(PLANES):
            row = (chunk * PLANES + plane) * chunk_blocks + inner if way in BY_CHUNKS else index * PLANES + plane
            found.append((GUARD + (plane * NUM_BLOCKS + block) * run, GUARD + row * run))
    return found


@pytest.mark.parametrize("load", [False, True], ids=["store", "load"])
@pytest.mark.parametrize("run", [256, 4096, 4096 + 256])
@pytest.mark.parametrize(("chunks", "chunk_blocks"), [(1, 4), (4, 4), (7, 3), (9, 1)])
@pytest.mark.parametrize("way", WAYS)
def test_a_way_moves_every_byte_of_the_request_and_no_other(
    library: Path, way: str, chunks: int, chunk_blocks: int, run: int, load: bool
) -> None:
    blocks = random.sample(range(NUM_BLOCKS), chunks * chunk_blocks)
    kv, host = Memory(PLANES * NUM_BLOCKS * run), Memory(len(blocks) * PLANES * run)
    expected_kv, expected_host = kv.image(), host.image()
    for in_kv, in_host in places(way, blocks, chunk_blocks, run):
        if load:
            expected_kv[in_kv : in_kv + run] = host.all[in_host : in_host + run]
        else:
            expected_host[in_host : in_host + run] = kv.all[in_kv : in_kv + run]
    ways = OtherWays(
        library,
        bases=[kv.address + plane * NUM_BLOCKS * run for plane in range(PLANES)],
        run=run,
        block_tokens=BLOCK_TOKENS,
        blocks=blocks,
        chunk_blocks=chunk_blocks,
        host=host.address,
    )
    ways.run(way, load)
    ways.close()
    assert kv.image() == expected_kv
    assert host.image() == expected_host


@pytest.mark.parametrize(
    ("run", "blocks", "why"), [(16 * 8, [1, 2], "multiple of 16 bytes"), (4096, [1, 2, 3], "no whole chunks")]
)
def test_a_request_that_the_kernels_cannot_move_is_refused(
    library: Path, run: int, blocks: list[int], why: str
) -> None:
    memory = Memory(4096 * 64)
    with pytest.raises(WayFailed, match=why):
        OtherWays(
            library,
            bases=[memory.address],
            run=run,
            block_tokens=BLOCK_TOKENS,
            blocks=blocks,
            chunk_blocks=2,
            host=memory.address,
        )


def test_nvcc_compiles_the_ways_without_a_warning_to_streaming_accesses_of_16_bytes(tmp_path: Path) -> None:
    if find_nvcc() is None:
        pytest.skip("there is no nvcc")
    functions = cuobjdump("-sass", "-arch", "sm_90", build(tmp_path, on_host=False)).split("Function : ")[1:]
    kernels = [text for text in functions if "copy_paged" in text.splitlines()[0]]
    assert len(kernels) == 4  # by blocks and by slots, each way
    for kernel in kernels:
        vectors = re.findall(r"\b(?:LDG|STG)[A-Z.]*\.128", kernel)
        assert vectors == ["LDG.E.EF.128"] * 4 + ["STG.E.EF.128"] * 4
        assert not re.findall(r"\b(?:LDL|STL|LD|ST)\b", kernel), "local or generic memory is used"
