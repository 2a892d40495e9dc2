"""A proxy before a server of S3's protocol that answers some requests with an error of its own."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def _upload_step(method: str, path: str) -> str:
    """The step of an upload in parts; "" for another request."""
    query = path.partition("?")[2]
    if part := re.search(r"partNumber=(\d+)", query):
        return f"part {part[1]}"
    if "uploadId=" in query:
        return "abort" if method == "DELETE" else "complete"
    return "begin" if query.startswith("uploads") else ""


class IllProxy:
    """`ill`: pairs of a method and the end of a path that are answered with `status`.

    `change`: what becomes of an answer to a request with a range, which it may keep back; its arguments: the range and the body.
    `upload`: what becomes of a step of an upload in parts ("begin", "part 1", ..., "complete", "abort"), which it may keep back: the
    body that is passed on, the status of a refusal, or None: the connection is cut.
    """

    def __init__(self, port: int) -> None:
        self.ill: set[tuple[str, str]] = set()
        self.status = (500, "InternalError")
        self.refused = 0  # requests that were answered so
        self.change: Callable[[str, bytes], bytes] = lambda range, body: body
        self.upload: Callable[[str, bytes], bytes | int | None] = lambda step, body: body
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if step := _upload_step(self.command, self.path):
                    passed = proxy.upload(step, body)
                    if passed is None:
                        self.close_connection = True
                        self.connection.shutdown(socket.SHUT_RDWR)
                        return
                    if isinstance(passed, int):
                        self._reply(passed, {}, b"<Error><Code>Refused</Code></Error>")
                        return
                    body = passed
                if any(self.command == method and self.path.endswith(end) for method, end in proxy.ill):
                    proxy.refused += 1
                    status, code = proxy.status
                    self._reply(status, {}, b"<Error><Code>%s</Code></Error>" % code.encode())
                    return
                server = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                try:
                    server.request(self.command, self.path, body, dict(self.headers.items()))
                    answer = server.getresponse()
                    found, wanted = answer.read(), self.headers.get("Range")
                    found = proxy.change(wanted, found) if wanted and answer.status == 206 else found
                    self._reply(answer.status, dict(answer.getheaders()), found)
                finally:
                    server.close()

            def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
                headers = {name.lower(): value for name, value in headers.items()}
                size = headers.get("content-length", str(len(body))) if self.command == "HEAD" else str(len(body))
                self.send_response(status)
                for name, value in headers.items():
                    if name not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                self.send_header("Content-Length", size)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
