"""Peers of this process that are open, so that those of a failed test are closed as well.

A failed test's locals become garbage in one heap: the collector may then end a ZMQ context before the sockets in it, and
waits for them for ever. So what owns a context is registered here until it is closed.
"""

from __future__ import annotations

from typing import Protocol


class Peer(Protocol):
    def close(self) -> None:
        """Calls closed()."""


_open: dict[int, Peer] = {}


def opened(peer: Peer) -> None:
    _open[id(peer)] = peer


def closed(peer: Peer) -> None:
    _open.pop(id(peer), None)


def close_leftovers() -> None:
    for peer in list(_open.values()):
        peer.close()
