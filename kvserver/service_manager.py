"""Reports to the service manager that started this process: systemd's sd_notify(3), for a unit of `Type=notify`.

Owns: the protocol of NOTIFY_SOCKET. Refuses to know: when the daemon is alive or ready (the loop states it).
"""

from __future__ import annotations

import contextlib
import os
import socket


def report_alive(failure: str) -> None:
    """Report the start, feed the watchdog, and show in `systemctl status` what /readyz answers. Never blocks, never raises.

    Called each second, so that a lost message needs no retry. `failure`: why the daemon is not ready, or "".
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # a name without a file
        address = "\0" + address[1:]
    state = "not ready: " + " ".join(failure.split()) if failure else "ready"
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
    ):
        sender.sendto(f"READY=1\nWATCHDOG=1\nSTATUS={state}".encode(errors="replace"), address)
