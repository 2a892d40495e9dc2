"""The adapter's worker half over torch's tensors on cuda:0, without an engine: steps, and copies of whole blocks."""

from __future__ import annotations

import time
import uuid

import torch
from support import cuda_driver
from support.daemon import wait_until
from support.registration import registration
from support.worker import make_keys, packed

from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.link import GPU_MARGIN_SECONDS, WORDS, Link, Registration
from kvserver.adapters.common.memory import share
from kvserver.adapters.common.send_queue import SendQueue
from kvserver.adapters.common.settings import CommonSettings
from kvserver.adapters.common.specs import LoadSpec, StoreSpec
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.common.worker import PositionSize, Rank, WorkerHalf
from kvserver.protocol import HelloReply, RegisterWorker

BLOCKS, TOKENS, LAYERS, HEADS, HEAD = 33, 16, 4, 2, 64
CHUNK_BLOCKS = 4
SLEEP_CYCLES = 1_000_000_000  # half a second and more of a GPU's clock: far longer than a copy of these blocks


class _Bytes:
    """GPU memory that torch did not allocate, for torch.as_tensor()."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def one_allocation() -> dict[str, torch.Tensor]:
    """As vLLM 0.29 and later have it on GPUs: [layer][block][token][head][K and V], each layer a view."""
    whole = torch.zeros(LAYERS, BLOCKS, TOKENS, HEADS, 2 * HEAD, dtype=torch.bfloat16, device="cuda:0")
    return {f"layers.{i}": whole[i].transpose(1, 2) for i in range(LAYERS)}


def one_a_layer() -> dict[str, torch.Tensor]:
    """An allocation of torch for each layer, some of them in one of the driver's."""
    shape = (BLOCKS, TOKENS, HEADS, 2 * HEAD)
    return {f"layers.{i}": torch.zeros(shape, dtype=torch.bfloat16, device="cuda:0") for i in range(LAYERS)}


def latent() -> dict[str, torch.Tensor]:
    """MLA: [block][token][576] for each layer."""
    shape = (BLOCKS, TOKENS, 576)
    return {f"layers.{i}": torch.zeros(shape, dtype=torch.bfloat16, device="cuda:0") for i in range(LAYERS)}


def by_descriptor() -> dict[str, torch.Tensor]:
    """Memory of cuMemCreate that may be exported as a descriptor."""
    size = LAYERS * BLOCKS * TOKENS * HEADS * 2 * HEAD * 2
    torch.cuda.init()
    whole = torch.as_tensor(_Bytes(cuda_driver.exportable(size), size), device="cuda:0").view(torch.bfloat16)
    caches = whole.view(LAYERS, BLOCKS, TOKENS, HEADS, 2 * HEAD)
    return {f"layers.{i}": caches[i] for i in range(LAYERS)}


class AdapterEngine:
    """REQUIRES: the tensors' first dimension counts blocks."""

    def __init__(self, endpoint: str, caches: dict[str, torch.Tensor], send_queue: SendQueue) -> None:
        self.caches = caches
        addresses = [tensor.data_ptr() for tensor in caches.values()]
        self.shared = share(caches, BLOCKS, 0)
        assert [tensor.data_ptr() for tensor in caches.values()] == addresses, "engines capture addresses"
        name = uuid.uuid4().hex

        def message(hello: HelloReply, attachment: int) -> RegisterWorker:
            return registration(
                instance_id=name, attachment=attachment, memory=self.shared.memory, planes=self.shared.planes,
                words=WORDS, num_blocks=BLOCKS, block_tokens=TOKENS, chunk_blocks=CHUNK_BLOCKS,
                layout=self.shared.layout,
            )  # fmt: skip

        link = Link(endpoint, "worker 0", Registration(self.shared.fds, message, GPU_MARGIN_SECONDS))
        link.start(20)
        # The daemon's first registration makes its context, which takes long beside others that do the same.
        wait_until(lambda: link.usable() is not None, 60, "the daemon has opened the memory")
        size = PositionSize(1, sum(plane.run_bytes for plane in self.shared.planes))
        self.faults = Faults()
        self.half = WorkerHalf(CommonSettings(endpoint=endpoint), send_queue, self.faults, Rank(0, [size]), link)
        self._last_id = 0

    # ---- the engine's own work, queued on the current stream ------------------------------------

    def write(self, blocks: range, seed: int) -> None:
        for layer, tensor in enumerate(self.caches.values()):
            part = tensor[blocks.start : blocks.stop]
            part.copy_(torch.arange(part.numel(), device="cuda:0").view(part.shape) % 251 + (seed + layer))

    def zero(self, blocks: range) -> None:
        for tensor in self.caches.values():
            tensor[blocks.start : blocks.stop].zero_()

    def read(self, blocks: range) -> list[torch.Tensor]:
        return [tensor[blocks.start : blocks.stop].cpu() for tensor in self.caches.values()]

    @staticmethod
    def be_busy() -> None:
        torch.cuda._sleep(SLEEP_CYCLES)

    # ---- copies -----------------------------------------------------------------------------------

    def begin_store(self, seed: str, blocks: range) -> None:
        self._begin(StepPlan(stores=[StoreSpec(*self._fields(seed, blocks))]))

    def begin_load(self, seed: str, blocks: range) -> None:
        self._begin(StepPlan(loads=[LoadSpec(*self._fields(seed, blocks), skip_blocks=0)]))

    def _fields(self, seed: str, blocks: range) -> tuple[int, str, str, int, bytes, bytes]:
        self._last_id += 1
        keys = b"".join(make_keys(len(blocks) // CHUNK_BLOCKS, seed))
        return self._last_id, f"request {self._last_id}", "", CHUNK_BLOCKS, keys, packed(blocks)

    def _begin(self, plan: StepPlan) -> None:
        self.half.start_loads(plan)
        self.half.answer_for_loads(plan)
        self.half.start_stores(plan)
        self.half.answer_for_stores(plan)

    def end(self) -> None:
        """Step until the copy that began last has ended, whole."""
        before = self.half.counters["loaded"] + self.half.counters["store_bytes"]
        until = time.monotonic() + 20
        while self.half.counters["loaded"] + self.half.counters["store_bytes"] == before:
            assert time.monotonic() < until, (self.half.counters, self.faults.counts)
            self.half.poll(idle=True)
        self.half.load_ends.take_finished()
        assert self.half.take_report() is None or self.half.counters["load_failures"] == 0

    def close(self) -> None:
        torch.cuda.synchronize()
        self.half.shut()
