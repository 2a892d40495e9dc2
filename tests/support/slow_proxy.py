"""A TCP proxy before a server: it delays answers, keeps them back, or cuts all connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class SlowProxy:
    """`delay_seconds` may change at any time; it counts for each piece of an answer."""

    def __init__(self, port: int) -> None:
        self.delay_seconds = 0.0
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._is_cut = False
        self._forwards = threading.Event()
        self._forwards.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and new ones at once, until restore()."""
        self._is_cut = True
        self._end(self._sockets)

    def restore(self) -> None:
        self._is_cut = False

    def hold(self) -> None:
        """Keep back answers until release()."""
        self._forwards.clear()

    def release(self) -> None:
        self._forwards.set()

    def close(self) -> None:
        self.release()
        self._end([self._listener, *self._sockets])

    def _end(self, sockets: list[socket.socket]) -> None:
        for each in list(sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._is_cut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                threading.Thread(target=self._forward, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._forward, args=(server, client, True), daemon=True).start()

    def _forward(self, source: socket.socket, to: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 20):
                if slow:
                    time.sleep(self.delay_seconds)
                    self._forwards.wait()
                to.sendall(piece)
