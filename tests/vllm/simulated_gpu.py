"""A connector for engines on CPU that reports their KV cache on a GPU, of which the daemon has a simulated one.

The memory is handed over as a descriptor of VMM memory, and copies wait for events of a stream that is a little late.
Loaded by the engine's process, by the name of this module.
"""

from __future__ import annotations

import time

from kvserver.adapters.common.exporter import Exported
from kvserver.adapters.common.host_memory import HostMemory
from kvserver.adapters.common.send_queue import OrderedSendQueue, SendQueue
from kvserver.adapters.vllm import KVServerConnector
from kvserver.protocol import CudaVmmFd

UUID = "GPU-00000000-0000-0000-0000-000000000000"
_LATE_SECONDS = 0.002


class GpuMemory(HostMemory):
    def export(self) -> Exported:
        exported = super().export()
        sizes = [memory.size_bytes for memory in exported.memory]
        memory = [CudaVmmFd(device=UUID, index=i, offset=0, size_bytes=size) for i, size in enumerate(sizes)]
        return Exported([*memory], exported.fds)


class LateEvent:
    """As torch.cuda.Event: it fires somewhat after it was recorded."""

    def record(self) -> None:
        self._fires = time.monotonic() + _LATE_SECONDS

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._fires - time.monotonic()))


class SimulatedGpuConnector(KVServerConnector):
    make_exporter = GpuMemory

    def make_send_queue(self) -> SendQueue:
        return OrderedSendQueue(LateEvent)
