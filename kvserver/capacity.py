"""How much memory this process may still take, by the machine and by its cgroups.

Owns: the size of L1. Refuses to know: what it is for.
"""

from __future__ import annotations

from pathlib import Path

from kvserver.config import MiB, parse_size
from kvserver.errors import ConfigError

_VERSIONS = {  # controllers, as /proc/self/cgroup has them: where the folders lie; files of limit and use
    "": ("", ("memory.max", "memory.current")),
    "memory": ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
}
_RESERVE_BYTES = 256 * MiB  # left to the rest of the machine by "auto" and by the check


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that this process may still use, and what sets that bound (the cgroup or the machine)."""
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    bound, source = int(meminfo["MemAvailable"].split()[0]) * 1024, "MemAvailable of the machine"
    for folder, (limit, usage) in _cgroup_folders(root):
        try:
            left = int((folder / limit).read_text()) - int((folder / usage).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if left < bound:
            bound, source = left, f"{limit} of the cgroup {folder}"
    return bound, source


def _cgroup_folders(root: Path) -> list[tuple[Path, tuple[str, str]]]:
    """This process's cgroup folders of either version and those above them, with the files of limit and use."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version = _VERSIONS.get(controllers)
        if version is not None:
            base = root / "sys/fs/cgroup" / version[0]
            folder = base / path.lstrip("/")
            found += [(f, version[1]) for f in (folder, *folder.parents) if f == base or base in f.parents]
    return found


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
