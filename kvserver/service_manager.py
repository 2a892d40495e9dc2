"""Messages to and from the service manager that started this process: systemd's sd_notify(3), for a unit of `Type=notify`.

Owns: the protocol of NOTIFY_SOCKET, and that of descriptors that outlast a restart (FDSTORE=1, LISTEN_FDS). Refuses to know: when the daemon
is alive or ready (the loop states it), what a descriptor is.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

_FIRST_FD = 3  # of those that the service manager passes
_SEND_SECONDS = 5.0


def report_alive(failure: str) -> None:
    """Report the start, feed the watchdog, and show in `systemctl status` what /readyz answers. Never blocks, never raises.

    Called each second, so that a lost message needs no retry. `failure`: why the daemon is not ready, or "".
    """
    address = _address()
    if not address:
        return
    state = "not ready: " + " ".join(failure.split()) if failure else "ready"
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
    ):
        sender.sendto(f"READY=1\nWATCHDOG=1\nSTATUS={state}".encode(errors="replace"), address)


def keep_descriptors(named: Mapping[str, int]) -> None:
    """Have the service manager keep descriptors for the next start of the unit. OSError if there is none."""
    if not (address := _address()):
        raise FileNotFoundError("NOTIFY_SOCKET is not set")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(_SEND_SECONDS)
        sender.connect(address)
        for name, fd in named.items():
            socket.send_fds(sender, [f"FDSTORE=1\nFDNAME={name}".encode()], [fd])


def drop_descriptors(named: Mapping[str, int]) -> None:
    """Close descriptors that an earlier start had kept, and have the service manager close its own. OSError if it is not reached."""
    for fd in named.values():
        os.close(fd)
    if named and (address := _address()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(_SEND_SECONDS)
            sender.connect(address)
            for name in named:
                sender.send(f"FDSTOREREMOVE=1\nFDNAME={name}".encode())


def kept_descriptors() -> dict[str, int]:
    """Descriptors that an earlier start had kept, by name. Children inherit neither them nor their names."""
    pid, count, names = (os.environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    fds = range(_FIRST_FD, _FIRST_FD + int(count))
    for fd in fds:
        os.set_inheritable(fd, False)
    return dict(zip(names.split(":"), fds, strict=False))


def _address() -> str:
    """NOTIFY_SOCKET; "" if there is none. A name without a file begins with NUL."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    return "\0" + address[1:] if address.startswith("@") else address
