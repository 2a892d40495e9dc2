"""How much memory this process may still take, by the machine and by its cgroups.

Owns: the size of L1. Refuses to know: what it is for.
"""

from __future__ import annotations

from pathlib import Path

from kvserver.config import MiB, parse_size
from kvserver.errors import ConfigError

_RESERVE_BYTES = 256 * MiB  # left to the rest of the machine by "auto" and by the check


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that this process may still use, and what sets that bound (the cgroup or the machine)."""
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    bound, source = int(meminfo["MemAvailable"].split()[0]) * 1024, "MemAvailable of the machine"
    for folder in _cgroup_folders(root):
        try:
            left = int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if left < bound:
            bound, source = left, f"memory.max of the cgroup {folder}"
    return bound, source


def _cgroup_folders(root: Path) -> list[Path]:
    """This process's cgroup v2 folder and those above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    base = root / "sys/fs/cgroup"
    path = next((line[3:] for line in lines if line.startswith("0::")), "/").lstrip("/")
    folders = [base / path, *(base / path).parents]
    return [folder for folder in folders if folder == base or base in folder.parents]


def choose_l1_bytes(setting: str, root: Path = Path("/")) -> int:
    """Bytes of L1. ConfigError with the numbers if they cannot be had."""
    free, source = available_memory(root)
    wanted = max(64 * MiB, free // 4) if setting == "auto" else parse_size(setting)
    if wanted > free - _RESERVE_BYTES:
        raise ConfigError(
            f"--l1-size {setting} is {wanted} bytes, but only {free} are left by {source} "
            f"({_RESERVE_BYTES} of them are kept free); lower --l1-size or give this process more memory"
        )
    return wanted
