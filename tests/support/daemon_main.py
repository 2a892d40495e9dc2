"""`kvserver serve` with a slow CPU device or simulated GPUs: `class Daemon` starts it for tests that need them.

It has the flags of `kvserver serve` and its own, which `kvserver serve` refuses.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvserver._native import Gpu, Way
from kvserver.config import add_flags, read_configuration
from kvserver.copy import Hardware
from kvserver.copy.devices import OpenGpu
from kvserver.daemon import serve
from kvserver.l2.files.disk import Disk
from kvserver.protocol import ConfigError
from support.mortal_gpus import obey
from support.simulators import FakeGpu, slow_cpu


class Slow(TypedDict):
    delay_micros: int
    pause_file: str


def opener(count: int, slow: Slow, orders: Path | None) -> OpenGpu:
    uuids = [f"GPU-00000000-0000-0000-0000-{number:012d}" for number in range(count)]

    def opened(uuid: str) -> Gpu:
        if uuid not in uuids:
            raise RuntimeError(f"this process has no GPU {uuid}, it has {', '.join(uuids)}")
        gpu = FakeGpu(uuid, **slow)
        if orders is not None and uuid == uuids[0]:
            obey(gpu, orders)
        return gpu

    return opened


def gated(gate: Path) -> Callable[[Disk, int, int, int], bytes]:
    """Disk.read(), which reads no journal before this file exists."""
    read = Disk.read

    def read_later(disk: Disk, fd: int, size: int, offset: int) -> bytes:
        while os.readlink(f"/proc/self/fd/{fd}").endswith("/journal") and not gate.exists():
            time.sleep(0.005)
        return read(disk, fd, size, offset)

    return read_later


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--copy-delay-us", type=int, default=0, help="a pause before each block that is copied")
    parser.add_argument(
        "--copy-pause", default="", help="no block but a copy's first is copied while this file exists; of a GPU none"
    )
    parser.add_argument("--simulated-gpus", type=int, default=0)
    parser.add_argument("--gpu-way", choices=["dma", "staged"], help="of all copies of GPUs")
    parser.add_argument("--gpu-orders", type=Path, help="what happens to the first GPU: see mortal_gpus.py")
    parser.add_argument("--journal-gate", type=Path, help="file tiers read no journal before this file exists")
    parser.add_argument("--drain-seconds", type=float, default=5.0, help="for the copies under way at the daemon's end")
    add_flags(parser)
    arguments = parser.parse_args()
    slow = Slow(delay_micros=arguments.copy_delay_us, pause_file=arguments.copy_pause)
    hardware = Hardware(
        make_cpu=partial(slow_cpu, **slow),
        gpu_way={"dma": Way.DMA, "staged": Way.STAGED}.get(arguments.gpu_way),
    )
    if arguments.simulated_gpus:
        hardware = replace(hardware, open_gpu=opener(arguments.simulated_gpus, slow, arguments.gpu_orders))
    read = gated(arguments.journal_gate) if arguments.journal_gate else Disk.read
    try:
        with mock.patch.object(Disk, "read", read):
            return serve(read_configuration(vars(arguments)), hardware, arguments.drain_seconds)
    except ConfigError as error:
        print(f"kvserver: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
