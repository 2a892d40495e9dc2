"""Devices that copy for workers: the CPU's threads, and one device for each GPU whose memory engines register.

No call waits for CUDA: a device's own threads find its GPU and make the context at the first use.

Owns: the devices, the time when a GPU's device is made, and the pinning of L1 for GPUs. Refuses to know: workers, tickets, and
how bytes move (`csrc/copy/device.h`, `csrc/gpu/gpu_device.h`).
"""

from __future__ import annotations

import logging
import resource
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvserver._native import (
    CpuDevice,
    Device,
    Direction,
    FileMapping,
    Gpu,
    GpuDevice,
    GpuMapping,
    HostRegion,
    Mapping,
    Outcome,
    Pinner,
    Way,
    cuda_gpu,
)
from kvserver.cache import PagePool
from kvserver.config import gpu_cpus, parse_gpus
from kvserver.protocol import ConfigError, CudaIpc, CudaVmmFabric, CudaVmmFd, ErrorCode, KVServerError, Memory, SharedFd
from kvserver.protocol.status import DirectionStatus, GpuStatus

log = logging.getLogger(__name__)

MakeCpu = Callable[[HostRegion, int, int], Device]  # (L1, bytes of a page, threads)
OpenGpu = Callable[[str], Gpu]  # (UUID); RuntimeError with the reason if that fails
_READY_SECONDS = 60.0  # limit for the contexts of GPUs that the settings name
_TOUCHING_THREADS = 4


@dataclass(frozen=True)
class Hardware:
    """Functions that make devices. The defaults use the machine's hardware; tests pass simulated devices."""

    make_cpu: MakeCpu = CpuDevice
    open_gpu: OpenGpu = cuda_gpu
    gpu_way: Way | None = None  # None: each GPU chooses a way for each copy


THIS_MACHINE = Hardware()


@dataclass(frozen=True)
class GpuRules:
    """Rules for GPUs: those that engines may use, and the function that opens one."""

    open: OpenGpu
    gpus: str = "auto"  # value of the setting
    pin: bool = True
    way: Way | None = None  # None: each GPU chooses a way for each copy

    @property
    def named(self) -> tuple[str, ...]:
        return parse_gpus(self.gpus)


class Devices:
    """Devices of the CPU and of GPUs. REQUIRES: one thread uses it. `rules` is None if only CPU memory is served."""

    def __init__(
        self, cpu: Device, region: HostRegion | None = None, page_bytes: int = 0, rules: GpuRules | None = None
    ) -> None:
        self.cpu = cpu
        self.gpus: dict[str, GpuDevice] = {}
        self._found: set[str] = set()  # UUIDs of GPUs that this machine has shown to have
        self._workers: Counter[str] = Counter()  # by device, the workers whose memory is mapped or being mapped
        self._region = region
        self._page_bytes = page_bytes
        self._rules = rules
        self._pinner: Pinner | None = None
        self._pinning_logged = False

    @property
    def all(self) -> list[Device]:
        return [self.cpu, *self.gpus.values()]

    @property
    def lost(self) -> str:
        """Reason why a device can no longer copy; empty while all devices can."""
        return next((device.lost for device in self.all if device.lost), "")

    # ---- a worker's memory ----------------------------------------------------------------------

    def device_for(self, memory: Sequence[Memory]) -> Device:
        """The device that copies to and from this memory. KVServerError(BAD_MEMORY) if no device can."""
        if any(isinstance(piece, CudaVmmFabric) for piece in memory):
            raise KVServerError(
                ErrorCode.BAD_MEMORY,
                "GPU memory by a fabric handle is not served; leave out --enable-sleep-mode and --enable-cumem-allocator",
            )
        places = {None if isinstance(piece, SharedFd) else piece.device for piece in memory}
        if len(places) > 1:
            named = sorted("cpu" if place is None else place for place in places)
            raise KVServerError(ErrorCode.BAD_MEMORY, f"a worker's memory must be on one device, not on {named}")
        uuid = places.pop()
        return self.cpu if uuid is None else self._gpu(uuid)

    @staticmethod
    def make_mapping(device: Device, memory: Memory, fds: Sequence[int]) -> Mapping:
        """A mapping of `memory`, not mapped yet; it owns its descriptor. REQUIRES: device_for() returned `device`."""
        if isinstance(memory, SharedFd):
            return FileMapping(fds[memory.index], memory.size_bytes)
        assert isinstance(device, GpuDevice)
        if isinstance(memory, CudaVmmFd):
            return GpuMapping.by_fd(device.gpu, fds[memory.index], memory.offset, memory.size_bytes)
        assert isinstance(memory, CudaIpc)
        return GpuMapping.by_ipc(device.gpu, memory.handle, memory.offset, memory.size_bytes)

    def name(self, device: Device) -> str:
        return device.gpu.uuid if isinstance(device, GpuDevice) else "cpu"

    def _gpu(self, uuid: str) -> GpuDevice:
        found = self.gpus.get(uuid)
        if found is not None:
            return found
        rules = self._rules
        if rules is None or rules.gpus == "none":
            raise KVServerError(ErrorCode.BAD_MEMORY, "this daemon serves CPU memory only; give --gpus auto")
        if rules.named and uuid not in rules.named:
            raise KVServerError(ErrorCode.BAD_MEMORY, f"GPU {uuid} is not one of --gpus {rules.gpus}")
        assert self._region is not None
        try:
            device = GpuDevice(self._region, self._page_bytes, rules.open(uuid), way=rules.way)
        except RuntimeError as error:
            raise KVServerError(ErrorCode.BAD_MEMORY, str(error)) from None
        self.gpus[uuid] = device
        return device

    # ---- time -----------------------------------------------------------------------------------

    def make_ready(self) -> None:
        """Make the devices and contexts of the GPUs that the settings name. Waits: call it before the loop starts.

        ConfigError with the reason if a GPU cannot be used.
        """
        for uuid in self._rules.named if self._rules else ():
            try:
                device = self._gpu(uuid)
            except KVServerError as error:
                raise ConfigError(f"--gpus: {error.message}") from None
            device.submit_map(0, [])
            deadline = time.monotonic() + _READY_SECONDS
            while not (ends := device.drain()):
                if time.monotonic() > deadline:
                    raise ConfigError(f"--gpus: GPU {uuid} was not ready within {_READY_SECONDS:.0f} s")
                select.select([device.completion_fd], [], [], 1.0)
            _, outcome, _, _, what = ends[0]
            if outcome != Outcome.DONE:
                raise ConfigError(f"--gpus: {what}")
            self.mark_found(device)

    def add_worker(self, device: Device) -> None:
        """Count one more worker of the device."""
        self._workers[self.name(device)] += 1

    def remove_worker(self, device: Device) -> None:
        """Count one worker less; its memory is unmapped. A GPU that was never found is dropped with its last worker."""
        name = self.name(device)
        self._workers[name] -= 1
        if not self._workers[name] and device is not self.cpu and name not in self._found:
            del self.gpus[name]

    def mark_found(self, device: Device) -> None:
        """The device has mapped memory, so its GPU exists. The first such GPU starts the pinning of L1 for all."""
        if not isinstance(device, GpuDevice):
            return
        self._found.add(device.gpu.uuid)
        if self._pinner is None and self._rules is not None and self._rules.pin:
            assert self._region is not None
            cpus = sorted(gpu_cpus(device.gpu.uuid))
            self._pinner = Pinner(self._region, device.gpu, _TOUCHING_THREADS, cpus)

    def update_pinned_pages(self, pool: PagePool) -> None:
        """Mark the pages of `pool` that have been pinned since the last call, and log the end of pinning."""
        if self._region is None or self._pinner is None:
            return
        pinned = min(self._region.pinned_bytes // pool.page_bytes, pool.pages)
        if pinned > pool.pinned_pages:
            pool.mark_pinned(pinned)
        if self._pinner.done and not self._pinning_logged:
            self._pinning_logged = True
            if error := self._pinner.error:
                log.warning(
                    "L1 is pinned up to %d of %d bytes only, GPU copies of the rest are slower: %s; the limit of locked "
                    "memory is %s (ulimit -l; docker: --ulimit memlock=-1, systemd: LimitMEMLOCK=infinity)",
                    self._region.pinned_bytes, self._region.size, error, _memlock(),
                )  # fmt: skip
            else:
                log.info("L1 is pinned: %d bytes, %.2f s in the driver", self._region.size, self._pinner.seconds)

    # ---- status ---------------------------------------------------------------------------------

    def status(self) -> list[GpuStatus]:
        return [
            GpuStatus(
                device=device.gpu.uuid,
                lost=device.lost,
                mapped_bytes=device.mapped_bytes,
                store=DirectionStatus(*device.counts(Direction.STORE)),
                load=DirectionStatus(*device.counts(Direction.LOAD)),
            )
            for device in self.gpus.values()
        ]


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "none" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
