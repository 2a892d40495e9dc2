"""Where an unconfigured daemon and its clients meet, and whether that place is this user's own."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def default_endpoint() -> str:
    """The endpoint of an unconfigured daemon and client of this user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "kvserver" if runtime else Path(f"/tmp/kvserver-{os.getuid()}")
    return f"ipc://{folder}/kvserver.sock"


def stranger_at(endpoint: str) -> str:
    """Why the default endpoint is not ours to use, "" if it is, or of any other: in /tmp anybody may have made its folder. A daemon
    that this one takes for its own is handed the engines' memory, and what it answers is computed with."""
    if endpoint != default_endpoint():
        return ""
    folder = Path(endpoint.removeprefix("ipc://")).parent
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return ""
    if found.st_uid not in (os.getuid(), 0):
        return f"{folder} belongs to user {found.st_uid}; remove it, or name another endpoint"
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH:
        return f"{folder} may be written by everybody; chmod 700 it, or name another endpoint"
    return ""
