"""`kvserver`, but its simulated GPUs die when a file appears; if it says "hang", what they were given never ends.

Usage: python mortal_gpus.py FILE ARGUMENTS
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from kvserver import daemon
from kvserver.__main__ import main
from kvserver._native import FakeGpu, Gpu
from kvserver.devices import OpenGpu
from kvserver.settings import Settings

REASON = "Xid 79: the GPU has fallen off the bus"


def mortal_opener(settings: Settings) -> OpenGpu:
    def opened(uuid: str) -> Gpu:
        gpu = FakeGpu(uuid, delay_micros=settings.test_copy_delay_us)
        threading.Thread(target=die_with, args=(gpu, Path(sys.argv[1])), daemon=True).start()
        return gpu

    return opened


def die_with(gpu: FakeGpu, file: Path) -> None:
    while not file.exists():
        time.sleep(0.002)
    if file.read_text() == "hang":
        gpu.hold()
        gpu.lose(REASON)
    else:
        gpu.die(REASON)


if __name__ == "__main__":
    daemon.gpu_opener = mortal_opener
    sys.exit(main(sys.argv[2:]))
