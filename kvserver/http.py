"""The status pages: `/status`, `/instances`, `/metrics`, `/livez`, `/readyz`, `/config`, `/`, `/kv/snapshot`, and what is
sent to the daemon: `POST /cache/clear`, `POST /kv/match`.

Owns: the HTTP threads. Refuses to know: anything but snapshots. It asks the loop for one and waits a
bounded time; when the loop does not answer it serves the last one and says so, and `/readyz` fails.
"""

from __future__ import annotations

import html
import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from kvserver import metrics, snapshot_page
from kvserver.families import Family
from kvserver.match_pages import MOST_BODY_BYTES, MatchPages
from kvserver.server import Server

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOP_DEADLINE_SECONDS = 1.0  # how long a page waits for the loop
STUCK_SECONDS = 5.0  # a loop that did not turn for so long is not ready


class StatusPages(ThreadingHTTPServer):
    """Serves in its own daemon threads from start() until close()."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        address: tuple[str, int],
        server: Server,
        settings: Mapping[str, Any] = {},
        match: MatchPages | None = None,
        take_kv_snapshot: snapshot_page.TakeSnapshot | None = None,
        cut_off: Callable[[str], str] = lambda observer: "",
    ) -> None:
        """`settings` is what `/config` shows. Without an index, or where no KV events are published, those pages say so, as they
        do where the observer behind them was cut off."""
        super().__init__(address, _Handler)
        self.kvserver = server
        self.settings = settings
        self.match = match
        self.take_kv_snapshot = take_kv_snapshot
        self.cut_off = cut_off
        self._last: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._thread = threading.Thread(target=self.serve_forever, name="http", daemon=True)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(status, rpc counters), fresh if the loop answers in time. TimeoutError if it never did."""
        server = self.kvserver
        try:
            status, rpc = self.ask(lambda: (server.snapshot(), server.rpc.snapshot()))
        except TimeoutError:
            if self._last is None:
                raise
            status, rpc = self._last
            status = {**status, "ready": False, "stale_seconds": round(server.seconds_since_turn, 3)}
        else:
            self._last = status, rpc
        return status, rpc

    def families(self) -> list[Family]:
        """The metrics of a snapshot()."""
        return self.kvserver.handlers.watchers.families(*self.snapshot())

    def ask(self, function: Callable[[], T]) -> T:
        """Run `function` in the loop. TimeoutError if that did not begin in time; it will not then."""
        future = self.kvserver.call(function)
        try:
            return future.result(LOOP_DEADLINE_SECONDS)
        except FutureTimeout:
            if future.cancel():
                raise TimeoutError("the event loop does not answer") from None
            return future.result()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of one page: mostly a client that went away."""
        log.debug("http %s", client_address, exc_info=True)

    def not_ready(self) -> str | None:
        """Why this daemon should get no traffic, or None."""
        stuck = self.kvserver.seconds_since_turn
        if stuck > STUCK_SECONDS:
            return f"the event loop has not turned for {stuck:.1f} s"
        return self.kvserver.failure or None


class _Handler(BaseHTTPRequestHandler):
    server: StatusPages
    protocol_version = "HTTP/1.1"
    timeout = 30
    wbufsize = -1  # head and body leave together: apart, the second waits for the peer's delayed acknowledgement

    def do_GET(self) -> None:
        pages = {
            "/": self._page,
            "/status": self._status,
            "/instances": self._instances,
            "/metrics": self._metrics,
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/config": self._config,
            "/kv/snapshot": self._kv_snapshot,
        }
        self._run(pages.get(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        if self.path == "/kv/match":
            self._match()
        else:
            self._run(self._clear if self.path == "/cache/clear" else None)

    def _run(self, page: Any) -> None:
        length = self.headers.get("Content-Length", "0")
        if length != "0":
            self.close_connection = True  # these pages take no body; it is not read
        if page is None:
            self._send(
                404,
                f"no page {self.path}; there are /, /status, /instances, /metrics, /livez, /readyz, /config, /kv/snapshot, "
                "POST /cache/clear, POST /kv/match\n",
            )
            return
        try:
            page()
        except TimeoutError as error:
            self._send(503, f"{error}\n")

    def _status(self) -> None:
        self._send(200, json.dumps(self.server.snapshot()[0]), "application/json")

    def _instances(self) -> None:
        instances = self.server.snapshot()[0]["instances"]
        match = self.server.match
        self._send(
            200, match.instances(instances) if match else json.dumps({"instances": instances}), "application/json"
        )

    def _match(self) -> None:
        body = self._body()
        if body is None:
            return
        if reason := self.server.cut_off("index"):
            self._send(503, f"the index is not up to date: {reason}\n")
        elif self.server.match is None:
            self._send(503, "this daemon keeps no index of blocks\n")
        else:
            self._send(*self.server.match.match(body, self.headers.get_content_type()))

    def _kv_snapshot(self) -> None:
        if reason := self.server.cut_off("zmq"):
            self._send(503, f"KV events are published no more: {reason}\n")
        else:
            snapshot_page.answer(self, self.server.take_kv_snapshot)

    def _body(self) -> bytes | None:
        """None, and answered, if it is not one to be read."""
        length = self.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) <= MOST_BODY_BYTES:
            return self.rfile.read(int(length))
        self.close_connection = True
        if not length.isdecimal():
            self._send(411, "send Content-Length and a body\n")
        else:
            self._send(413, f"a body has at most {MOST_BODY_BYTES} bytes\n")
        return None

    def _metrics(self) -> None:
        self._send(200, metrics.render(self.server.families()), "text/plain; version=0.0.4; charset=utf-8")

    def _livez(self) -> None:
        self._send(200, "alive\n")

    def _readyz(self) -> None:
        reason = self.server.not_ready()
        self._send(200 if reason is None else 503, (reason or "ready") + "\n")

    def _config(self) -> None:
        self._send(200, json.dumps(self.server.settings, indent=2) + "\n", "application/json")

    def _clear(self) -> None:
        chunks = self.server.ask(self.server.kvserver.handlers.clear)
        self._send(200, json.dumps({"chunks": chunks}), "application/json")

    def _page(self) -> None:
        text = html.escape(json.dumps(self.server.snapshot()[0], indent=2))
        self._send(200, f"<!doctype html><title>kvserver</title><h1>kvserver</h1><pre>{text}</pre>\n", "text/html")

    def _send(self, code: int, body: str | bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        raw = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(raw)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http %s: " + format, self.address_string(), *args)
