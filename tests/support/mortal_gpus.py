"""A file with orders for a simulated GPU (`Daemon(gpu_orders=FILE)`). They are carried out when the GPU is opened if the file is there by
then; else as soon as it appears, and then the file is removed.

Lines: `die`; `hang` (the GPU is lost, but the copies in it neither end nor go away); `fail CALL TEXT` (the next call of that name fails).
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from support.simulators import FakeGpu

REASON = "Xid 79: the GPU has fallen off the bus"


def obey(gpu: FakeGpu, file: Path) -> None:
    if file.exists():
        follow(gpu, file)
    else:
        threading.Thread(target=follow_later, args=(gpu, file), daemon=True).start()


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
                gpu.pause()
                gpu.lose(REASON)
            case ["fail", call, text]:
                gpu.fail_next(call, text)


def order(file: Path, text: str) -> None:
    """Write the file, whole at once."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.rename(file)
