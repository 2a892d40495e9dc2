"""Default endpoint of a daemon and its clients, and the checks of its owner: a daemon serves its own user and root."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

_UNMAPPED = 65534  # the kernel's number for a user of another user namespace that has none in this one


class NotPermitted(PermissionError):
    """Socket of a daemon that is not for this user. The message names both users."""


def default_endpoint() -> str:
    """The endpoint of an unconfigured daemon and client of this user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "kvserver" if runtime else Path(f"/tmp/kvserver-{os.getuid()}")
    return f"ipc://{folder}/kvserver.sock"


def stranger_at(endpoint: str) -> str:
    """Reason why the default endpoint may belong to another user; "" if it is safe, and for all other endpoints.

    Any user may have made the endpoint's folder in /tmp. A foreign daemon there would get the engines' memory, and engines would
    compute with the KV that it returns.
    """
    if endpoint != default_endpoint():
        return ""
    folder = Path(endpoint.removeprefix("ipc://")).parent
    try:
        found = folder.lstat()
    except (FileNotFoundError, PermissionError):  # what keeps this user from the folder keeps it from the socket
        return ""
    if found.st_uid not in (os.getuid(), 0):
        return f"{folder} belongs to user {found.st_uid}; remove it, or name another endpoint"
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH:
        return f"{folder} may be written by all users; chmod 700 it, or name another endpoint"
    return ""


def barrier(endpoint: str) -> str:
    """Reason why the daemon at the endpoint is not for this user; "" if none is there, or nothing keeps this user from it."""
    if not endpoint.startswith("ipc://"):
        return ""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            connect(probe, endpoint.removeprefix("ipc://"))
        except NotPermitted as error:
            return str(error)
        except OSError:
            return ""
        return why_refused(probe)


def connect(connection: socket.socket, path: str) -> None:
    """Connect to a daemon's socket. NotPermitted where the kernel does not let this user, else another OSError."""
    try:
        connection.connect(path)
    except PermissionError as error:
        place, owner = _nearest(Path(path))
        text = f"user {os.geteuid()} may not connect: {place} belongs to user {owner} ({error.strerror})"
        raise NotPermitted(f"{text}; run engine and daemon as one user") from None


def why_refused(connection: socket.socket) -> str:
    """Reason why the daemon at the other end of a Unix socket refuses this user's credentials; "" if it does not."""
    size = struct.calcsize("3i")
    _pid, owner, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    uid = os.geteuid()
    if owner == uid or (uid == 0 and owner != _UNMAPPED):
        return ""
    text = f"the daemon at {connection.getpeername()} belongs to user {owner}, and refuses user {uid}"
    return f"{text}; run engine and daemon as one user"


def _nearest(path: Path) -> tuple[Path, int]:
    """The path, or the last folder on the way to it that this user can see; and whose it is."""
    for place in (path, *path.parents):
        try:
            return place, place.stat().st_uid
        except OSError:
            continue
    return Path("/"), 0
