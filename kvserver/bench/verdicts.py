"""Measurements, their verdicts, and what else happened on the machine meanwhile.

A verdict is a ratio to a ceiling of the same run, never a time: machines differ. Owns: the bounds. Refuses to know: how anything
is measured.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from msgspec import Struct

COPY_LEAST = 0.5  # of memcpy with as many threads; quiet machines have 0.7 to 1.4
THREADS_LEAST = 0.8  # of one thread's memcpy, by all: fewer processors than threads are there
LOOKUP_MOST = {1024: 5.0, 131_072: 15.0}  # echoes, by tokens; quiet machines have 1.2 to 1.6, and 2.2 to 4.6
STORAGE_LEAST = 0.6  # of the plain loop; bench/l2.py finds 0.9 and more
_BUSY, _STOLEN = 0.15, 0.03  # shares of all processors
_NO_CAUSE = "no cause was found: run it again while the machine is idle, then kvserver doctor"


class Measurement(Struct, frozen=True, kw_only=True):
    """A value beside its ceiling. `normal` is None if there is nothing to judge."""

    part: str  # memcpy, copies, gpu, lookup or storage
    what: str
    value: float = 0.0
    unit: str = ""
    ceiling: str = ""  # what `ratio` is of
    ratio: float | None = None
    bound: str = ""  # as "at least 0.6"
    normal: bool | None = None
    failure: str = ""  # why nothing was measured


def at_least(part: str, what: str, value: float, unit: str, ceiling: str, of: float, least: float) -> Measurement:
    ratio = value / of
    return Measurement(
        part=part, what=what, value=value, unit=unit, ceiling=ceiling, ratio=ratio, bound=f"at least {least}",
        normal=ratio >= least,
    )  # fmt: skip


def at_most(part: str, what: str, value: float, unit: str, ceiling: str, of: float, most: float) -> Measurement:
    ratio = value / of
    return Measurement(
        part=part, what=what, value=value, unit=unit, ceiling=ceiling, ratio=ratio, bound=f"at most {most}",
        normal=ratio <= most,
    )  # fmt: skip


def failed(part: str, what: str, why: str) -> Measurement:
    return Measurement(part=part, what=what, normal=False, failure=why)


class MachineWatch:
    """Use of the machine's processors by other processes, from now on."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._read()

    def reasons(self) -> list[str]:
        """Possible reasons for slow measurements under the watch; at least one line."""
        (busy, stolen, total, own, throttled), before = self._read(), self._before
        spent = max(total - before[2], 1e-9)
        others = (busy - before[0] - (own - before[3])) / spent
        found = []
        if others > _BUSY:
            found.append(f"other processes used {others:.0%} of this machine's processors meanwhile")
        if (taken := (stolen - before[1]) / spent) > _STOLEN:
            found.append(f"the hypervisor gave {taken:.0%} of the processors' time to others")
        if throttled > before[4]:
            found.append("the container's limit of processors was reached (cpu.max of its cgroup)")
        if "[never]" in self._text("sys/kernel/mm/transparent_hugepage/enabled"):
            found.append("transparent huge pages are off, so L1 is in small pages: kvserver doctor")
        return found or [_NO_CAUSE]

    def _read(self) -> tuple[float, float, float, float, int]:
        """Seconds of all processors that were busy, stolen, and in all; of this process and its ended children; throttled periods."""
        ticks = [int(word) for word in self._text("proc/stat").partition("\n")[0].split()[1:9]] or [0] * 8
        user, nice, system, idle, io, interrupt, soft, stolen = (tick / os.sysconf("SC_CLK_TCK") for tick in ticks)
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        throttled = re.search(r"nr_throttled (\d+)", self._text("sys/fs/cgroup/cpu.stat"))
        busy = user + nice + system + interrupt + soft
        return busy, stolen, busy + stolen + idle + io, own, int(throttled[1]) if throttled else 0

    def _text(self, path: str) -> str:
        try:
            return (self._root / path).read_text()
        except OSError:
            return ""
