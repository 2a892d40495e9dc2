"""Pages of an engine that a test makes up, at an address of this machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Page = Callable[[BaseHTTPRequestHandler], None]


def text_page(text: str, path: str = "/metrics") -> Page:
    def page(handler: BaseHTTPRequestHandler) -> None:
        body = text.encode()
        handler.send_response(200 if handler.path == path else 404)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return page


@contextlib.contextmanager
def page_servers() -> Iterator[Callable[[Page], str]]:
    """Yields what serves a page at an address of its own, and returns that."""
    servers: list[ThreadingHTTPServer] = []

    def serve(page: Page) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page(self)

            def log_message(self, *_: object) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()
