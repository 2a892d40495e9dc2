"""The adapter's worker half on a GPU: how each kind of torch's memory is handed over, and that copies keep the stream's order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.daemon import Daemon
from support.gpu_memory import SIMULATED

from kvserver.protocol import CudaIpc, CudaVmmFd

if TYPE_CHECKING:
    from .adapter_engine import AdapterEngine

pytestmark = pytest.mark.skipif(SIMULATED, reason="a simulated GPU has no memory of its own")

SOURCE, TARGET = range(1, 9), range(17, 25)
KINDS = {"one_allocation": CudaIpc, "one_a_layer": CudaIpc, "latent": CudaIpc, "by_descriptor": CudaVmmFd}
MakeEngine = Callable[..., "AdapterEngine"]


@pytest.fixture
def make_engine(daemon: Daemon) -> Iterator[MakeEngine]:
    """`ordered` is False for the control: a worker that sends without waiting for the stream."""
    import torch

    from kvserver.adapters.common.send_queue import DirectSendQueue, OrderedSendQueue

    from . import adapter_engine

    made: list[AdapterEngine] = []

    def make(kind: str = "one_allocation", ordered: bool = True) -> AdapterEngine:
        queue = OrderedSendQueue(lambda: torch.cuda.Event(blocking=True)) if ordered else DirectSendQueue()
        made.append(adapter_engine.AdapterEngine(daemon.endpoint, getattr(adapter_engine, kind)(), queue))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
        assert engine.faults.counts == {}


def equal(left: list[object], right: list[object]) -> bool:
    import torch

    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_kv_of_each_kind_of_memory_comes_back_byte_for_byte(make_engine: MakeEngine, kind: str) -> None:
    engine = make_engine(kind)
    assert {type(memory) for memory in engine.shared.memory} == {KINDS[kind]}
    engine.write(SOURCE, 3)
    content = engine.read(SOURCE)
    engine.begin_store(kind, SOURCE)
    engine.end()
    engine.zero(range(33))
    engine.begin_load(kind, TARGET)
    engine.end()
    assert equal(engine.read(TARGET), content)
    assert not equal(engine.read(SOURCE), content)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_store_has_what_the_stream_wrote_before_it(make_engine: MakeEngine, ordered: bool) -> None:
    """Without order the copy reads what lay there before: the control."""
    engine = make_engine(ordered=ordered)
    engine.write(SOURCE, 7)  # the first time its kernels are loaded, which waits for the stream
    engine.zero(range(33))
    engine.read(SOURCE)  # the stream is idle
    engine.be_busy()
    engine.write(SOURCE, 7)
    engine.begin_store(f"late {ordered}", SOURCE)
    engine.end()
    content = engine.read(SOURCE)
    engine.begin_load(f"late {ordered}", TARGET)
    engine.end()
    same = equal(engine.read(TARGET), content)
    assert same == ordered


@pytest.mark.parametrize("ordered", [True, False])
def test_a_load_is_not_overwritten_by_what_the_stream_does_before_it(make_engine: MakeEngine, ordered: bool) -> None:
    engine = make_engine(ordered=ordered)
    engine.write(SOURCE, 9)
    content = engine.read(SOURCE)
    engine.begin_store(f"zeroed {ordered}", SOURCE)
    engine.end()
    engine.be_busy()
    engine.zero(TARGET)
    engine.begin_load(f"zeroed {ordered}", TARGET)
    engine.end()
    assert equal(engine.read(TARGET), content) == ordered


CANNOT_SHARE = """
import sys, torch
from kvserver.adapters.common.exporter import CannotShare
from kvserver.adapters.common.memory import share
cache = torch.zeros(1024, 16, 2, 2048, dtype=torch.bfloat16, device="cuda:0")  # more than one piece of a segment
try:
    share({"layer": cache}, 1024, 0)
except CannotShare as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("allocator", "remedy"),
    [("expandable_segments:True", "expandable_segments:False"), ("backend:cudaMallocAsync", "backend:native")],
)
def test_memory_that_cannot_be_shared_is_refused_with_the_setting_that_changes_it(
    tmp_path: Path, allocator: str, remedy: str
) -> None:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    done = subprocess.run(
        [sys.executable, "-c", CANNOT_SHARE],
        cwd=tmp_path,
        env={**os.environ, **dict.fromkeys(names, allocator)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert f"PYTORCH_CUDA_ALLOC_CONF={remedy}" in done.stdout
