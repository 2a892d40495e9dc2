"""`kvserver`, but a file says what happens to its first simulated GPU: at once when it appears, or else when the GPU is opened.

Lines: `die`; `hang` (lost, but what it was given neither ends nor goes away); `fail CALL TEXT` (the next call of that name
does; the file is removed when it was read). Usage: python mortal_gpus.py FILE ARGUMENTS
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


def program(file: Path) -> tuple[str, ...]:
    return sys.executable, __file__, str(file)


def mortal_opener(settings: Settings) -> OpenGpu:
    file = Path(sys.argv[1])

    def opened(uuid: str) -> Gpu:
        gpu = FakeGpu(uuid, delay_micros=settings.test_copy_delay_us)
        if not uuid.endswith("0"):
            return gpu
        if file.exists():
            follow(gpu, file)
        else:
            threading.Thread(target=follow_later, args=(gpu, file), daemon=True).start()
        return gpu

    return opened


def follow_later(gpu: FakeGpu, file: Path) -> None:
    while True:
        if file.exists():
            follow(gpu, file)
            file.unlink()
        time.sleep(0.002)


def follow(gpu: FakeGpu, file: Path) -> None:
    for line in file.read_text().splitlines():
        match line.split(" ", 2):
            case ["die"]:
                gpu.die(REASON)
            case ["hang"]:
                gpu.hold()
                gpu.lose(REASON)
            case ["fail", call, text]:
                gpu.fail_next(call, text)


def order(file: Path, text: str) -> None:
    """Write the file, whole at once."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.rename(file)


if __name__ == "__main__":
    daemon.gpu_opener = mortal_opener
    sys.exit(main(sys.argv[2:]))
