"""The memory that this process may still use, by the limits of the machine and of its cgroups.

Owns: the size of L1 in ordinary memory, the number of free huge pages, and what a daemon needs beside L1. Refuses to know: the use of
the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvserver.config.settings import GiB, KiB, MiB, Settings, parse_size
from kvserver.config.tiers import parse_tiers
from kvserver.protocol import ConfigError

HUGE_PAGE_BYTES = {"2MiB": 2 * MiB, "1GiB": GiB}
_CGROUP_NAMES = {2 * MiB: "2MB", GiB: "1GB"}
_RESERVE_BYTES = 256 * MiB  # left free for the rest of the machine

# What a daemon needs beside L1; bench/overhead.py measures each.
_PROCESS_BYTES = 128 * MiB  # interpreter, libraries, threads, clients of storage, answers, the what-if curve
_QUEUE_BYTES = 288 * MiB  # 65,536 events that wait for their thread: 4 KiB that each may carry, and their structs
_OBJECT_BYTES = 128 * KiB  # assumed size of an object: one block of a small model
_INDEXED_BYTES = 512  # of the index and its observers, for each object of L1
_FILED_BYTES = 128  # of the index, for each object of a tier in files
_CONTEXT_BYTES = 512 * MiB  # of the host, for a CUDA context; an estimate that no run has shown yet


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that this process may still use, and the name of the limit (of a cgroup or of the machine)."""
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    bound, source = int(meminfo["MemAvailable"].split()[0]) * 1024, "MemAvailable of the machine"
    for left, limit in _cgroup_room(root, "memory", "memory"):
        if left < bound:
            bound, source = left, limit
    return bound, source


def bytes_beside_l1(settings: Settings, l1_bytes: int, uses_gpus: bool = False) -> int:
    """The most memory that a daemon needs beside L1 itself: what a container's limit must hold as well."""
    files = sum(parse_size(tier.own["size"]) for tier in parse_tiers(settings.l2) if tier.kind == "file")
    events = parse_size(settings.kv_events_memory) + parse_size(settings.kv_events_buffer)
    return (
        _PROCESS_BYTES
        + _QUEUE_BYTES
        + l1_bytes * _INDEXED_BYTES // _OBJECT_BYTES
        + files * _FILED_BYTES // _OBJECT_BYTES
        + parse_size(settings.kv_index_size)
        + (events if settings.kv_events_endpoint else 0)
        + (_CONTEXT_BYTES if uses_gpus else 0)
    )


def memory_limit(root: Path = Path("/")) -> tuple[int, str] | None:
    """The lowest memory limit of this process's cgroups, and its name; None if the machine's memory is the only limit."""
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    machine = int(meminfo["MemTotal"].split()[0]) * 1024
    found = [(limit, name) for limit, _, name in _cgroup_limits(root, "memory", "memory") if limit < machine]
    return min(found, default=None)


def free_huge_bytes(page_bytes: int, root: Path = Path("/"), node: int | None = None) -> int:
    """Bytes that this process may still use in explicit huge pages of one size, on one node if given."""
    counts = []
    for name in ("free_hugepages", "resv_hugepages"):
        try:
            counts.append(int((huge_page_folder(page_bytes, root) / name).read_text()))
            if node is not None and name == "free_hugepages":
                counts[0] = min(counts[0], int((huge_page_folder(page_bytes, root, node) / name).read_text()))
        except (OSError, ValueError):
            return 0
    free, promised = counts
    rooms = [left for left, _ in _cgroup_room(root, "hugetlb", f"hugetlb.{_CGROUP_NAMES[page_bytes]}")]
    return max(0, min([(free - promised) * page_bytes, *rooms]))


def huge_page_folder(page_bytes: int, root: Path = Path("/"), node: int | None = None) -> Path:
    """The kernel's folder with the counts of explicit huge pages of one size."""
    base = "sys/kernel/mm" if node is None else f"sys/devices/system/node/node{node}"
    return root / base / "hugepages" / f"hugepages-{page_bytes // KiB}kB"


def _cgroup_room(root: Path, controller: str, prefix: str) -> Iterator[tuple[int, str]]:
    """Room in each limit of this process's cgroups of either version: (bytes left, name of the limit)."""
    return ((limit - used, name) for limit, used, name in _cgroup_limits(root, controller, prefix))


def _cgroup_limits(root: Path, controller: str, prefix: str) -> Iterator[tuple[int, int, str]]:
    """Limits of this process's cgroups of either version: (bytes, bytes used, name)."""
    for folder, (limit, usage) in _cgroup_folders(root, controller):
        try:
            bound, used = (int((folder / f"{prefix}.{name}").read_text()) for name in (limit, usage))
        except (OSError, ValueError):  # no such file, or "max"
            continue
        yield bound, used, f"{prefix}.{limit} of the cgroup {folder}"


def _cgroup_folders(root: Path, controller: str) -> list[tuple[Path, tuple[str, str]]]:
    """Folders of this process's cgroups of either version and their parents, with the names of limit and usage files."""
    versions = {  # controllers in /proc/self/cgroup: folder below sys/fs/cgroup; limit and usage files
        "": ("", ("max", "current")),
        controller: (controller, ("limit_in_bytes", "usage_in_bytes")),
    }
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version = versions.get(controllers)
        if version is not None:
            base = root / "sys/fs/cgroup" / version[0]
            folder = base / path.lstrip("/")
            found += [(f, version[1]) for f in (folder, *folder.parents) if f == base or base in f.parents]
    return found


def choose_l1_bytes(setting: str, root: Path = Path("/"), kept_bytes: int = 0) -> int:
    """Bytes of L1. ConfigError with the numbers if so much memory is not free. `kept_bytes`: memory that L1 has already."""
    free, source = available_memory(root)
    free += kept_bytes
    wanted = max(64 * MiB, free // 4) if setting == "auto" else parse_size(setting)
    if wanted > free - _RESERVE_BYTES:
        raise ConfigError(
            f"--l1-size {setting} is {wanted} bytes, but only {free} are left by {source} "
            f"({_RESERVE_BYTES} of them are kept free); lower --l1-size or give this process more memory"
        )
    return wanted
