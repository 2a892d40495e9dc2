"""Unix socket that listens at a path, and whether the path still leads to it.

A path can lose its socket while the socket listens on: a logout removes a folder, another process makes a file of that name.
libzmq removes any file at a path that it bound. So it gets a socket that was bound here (ZMQ_USE_FD).

Owns: which file at a path may be replaced or removed. Refuses to know: what connects.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands that bind nothing start without it
    import zmq

_BACKLOG = 128
_SERVED = (errno.EAGAIN, errno.EPROTOTYPE)  # its queue is full; it is of another kind
_USE_FD = 89  # zmq.USE_FD


class SocketFile:
    """A listening Unix socket and its path. REQUIRES: one thread uses it."""

    def __init__(self, path: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
        self.path = path
        self._kind = kind
        self._made: tuple[int, int] | None = None  # device and inode, which the open socket keeps from being used again

    def listen(self) -> socket.socket:
        """A socket that listens at the path, for this user alone. OSError if it cannot, or the path is another process's.

        A socket that no process serves is replaced, and nothing else.
        """
        self._remove_dead()
        listener = socket.socket(socket.AF_UNIX, self._kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self.path)
            os.chmod(self.path, 0o600)  # before anything may connect
            listener.listen(_BACKLOG)
            self._made = self._found()
        except BaseException:
            listener.close()
            raise
        return listener

    def bind(self, zmq_socket: zmq.Socket[bytes]) -> None:
        """Let the ZMQ socket accept at the path. OSError as of listen(). A second call adds a listener."""
        listener = self.listen()
        zmq_socket.setsockopt(_USE_FD, listener.detach())  # libzmq closes it
        try:
            zmq_socket.bind(f"ipc://{self.path}")
        except BaseException:
            self.remove()
            raise
        finally:
            zmq_socket.setsockopt(_USE_FD, -1)

    @property
    def is_ours(self) -> bool:
        return self._made is not None and self._made == self._found()

    def remove(self) -> None:
        """Remove the file, if it is the one that listen() made."""
        if self.is_ours:
            os.unlink(self.path)

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _remove_dead(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise OSError(errno.EEXIST, "there is a file that is no socket", self.path)
            with socket.socket(socket.AF_UNIX, self._kind | socket.SOCK_NONBLOCK) as probe:
                try:
                    probe.connect(self.path)
                except ConnectionRefusedError:
                    os.unlink(self.path)
                    return
                except OSError as error:
                    if error.errno not in _SERVED:
                        raise
            raise OSError(errno.EADDRINUSE, "another process serves it", self.path)
