"""Zeros in place of L1's bytes: the negative control of tests that compare outputs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from support.daemon import Daemon


def zero_l1(daemon: Daemon) -> int:
    """Overwrite all of L1 with zeros, from outside; returns how many bytes were not zero."""
    size = daemon.status()["l1"]["size_bytes"]
    for line in Path(f"/proc/{daemon.pid}/maps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0\s*$", line)
        if match and int(match[2], 16) - int(match[1], 16) == size:
            break
    else:
        raise AssertionError("no mapping of the size of L1")
    begin, changed, piece = int(match[1], 16), 0, 1 << 20
    memory = os.open(f"/proc/{daemon.pid}/mem", os.O_RDWR)
    try:
        for offset in range(0, size, piece):
            data = os.pread(memory, piece, begin + offset)
            changed += len(data) - data.count(0)
            os.pwrite(memory, bytes(piece), begin + offset)
    finally:
        os.close(memory)
    return changed
