"""The default endpoint of a daemon and its clients, and the check that it belongs to this user."""

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
    """Why the default endpoint may belong to another user; "" if it is safe, and for all other endpoints.

    Any user may have made the endpoint's folder in /tmp. A foreign daemon there would get the engines' memory, and
    engines would compute with the KV that it returns.
    """
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
        return f"{folder} may be written by all users; chmod 700 it, or name another endpoint"
    return ""
