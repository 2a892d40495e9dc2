"""Messages to the service manager that started this process: systemd's sd_notify(3), for a unit of `Type=notify`.

Owns: the protocol of NOTIFY_SOCKET. Refuses to know: when the daemon is ready or alive (`daemon` and the loop decide).
"""

from __future__ import annotations

import contextlib
import os
import socket


def notify(message: str) -> None:
    """Send one message; without a service manager do nothing. Never blocks, never raises.

    A lost message needs no retry: `WATCHDOG=1` follows each second, and without it the manager restarts the process.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # a name without a file
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
    ):
        sender.sendto(message.encode(), address)


def notify_alive(failure: str) -> None:
    """Feed the watchdog, and state in `systemctl status` what /readyz answers. `failure`: why it is not ready, or ""."""
    state = "not ready: " + " ".join(failure.split()) if failure else "ready"
    notify(f"WATCHDOG=1\nSTATUS={state}")
