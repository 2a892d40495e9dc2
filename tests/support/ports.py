"""TCP ports of this machine that no other process gets while a test has them."""

from __future__ import annotations

import socket


def reserved_port() -> tuple[socket.socket, int]:
    """A port for a program that takes a number: it is bound, so that a connection is refused and the kernel gives it to no program that
    wants any port, but a server that is given the number can listen, since both set SO_REUSEADDR. The caller closes the socket at the end."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation, reservation.getsockname()[1]
