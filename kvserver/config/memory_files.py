"""Files that are memory: the kind of their file system, and the place of the state of an L1 file (`restart`).

hugetlbfs has no write(2), so a state cannot be beside a file on it.
"""

from __future__ import annotations

import os
from pathlib import Path

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


def file_system_of(device: int) -> str:
    """The kind of a file system; "" if the kernel does not state it."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return ""
