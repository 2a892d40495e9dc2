"""Files that are memory: the kind of their file system, and the place of the state of an L1 file (`restart`).

hugetlbfs has no write(2), so a state cannot be beside a file on it.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvserver.config.capacity import HUGE_PAGE_BYTES
from kvserver.protocol import ConfigError

FDSTORE = "fdstore:"  # value of --l1-file: no path, but the descriptor store of the service manager


def l1_state_path(path: str, endpoint: str) -> Path:
    """Path of the state of an L1 file: beside it, or on hugetlbfs beside the endpoint. ConfigError where neither is possible."""
    try:
        kind = file_system_of(os.stat(path).st_dev)
    except OSError:
        kind = ""  # there is no such file
    if kind != "hugetlbfs":
        return Path(f"{path}.state")
    if not endpoint.startswith("ipc://"):
        raise ConfigError(
            f"--l1-file {path}: on hugetlbfs its state is beside the endpoint, which is no file: give ipc:///path"
        )
    return Path(endpoint.removeprefix("ipc://")).parent / f"{path.strip('/').replace('/', '-')}.state"


def huge_pages_at(path: str) -> str:
    """Value of --l1-huge-pages for a file on hugetlbfs, whether or not it exists; "" on another file system."""
    place = path if os.path.exists(path) else os.path.dirname(path)
    try:
        found, page_bytes = os.stat(place), os.statvfs(place).f_bsize
    except OSError:
        return ""
    names = {size: name for name, size in HUGE_PAGE_BYTES.items()}
    return names.get(page_bytes, "") if file_system_of(found.st_dev) == "hugetlbfs" else ""


def file_system_of(device: int) -> str:
    """The kind of a file system; "" if the kernel does not state it."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return ""
