"""Status pages, and the commands that clients send by POST.

Pages: `/status`, `/instances`, `/sessions`, `/cache/pins`, `/metrics`, `/livez`, `/readyz`, `/config`, `/kv/snapshot`, `/explain`, and the page for people at
`/` with its assets and `/history`. Commands: `POST /cache/clear`, `POST /config/serving`, `POST /audit`, `POST /kv/match`,
`DELETE /sessions/ID`, `POST /cache/pins`, `DELETE /cache/pins/ID`, and the same of `/cache/prefetches`.

A request is read as a whole before it is answered: first its head, which `access` decides on, then its body. A page waits a
bounded time for the loop. If the loop does not answer, the page shows the last snapshot with its age (`stale_seconds`), and
`/readyz` fails.

Owns: the pages. Refuses to know: how snapshots and the commands' results are made, the rules of access (`access`), threads
(`connections`).
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from kvserver import __version__
from kvserver.observability import Observability
from kvserver.protocol.status import DaemonStatus
from kvserver.routing import MOST_BODY_BYTES, MatchPages
from kvserver.server import Audit, Clears, Pins, PrefetchReports, Server, Serving, SessionReports, Upkeep
from kvserver.telemetry import Family, RpcCounts
from kvserver.telemetry.metrics_process import process_families
from kvserver.telemetry.prometheus import render
from kvserver.web import (
    clear_page,
    explain_page,
    page,
    pins_page,
    prefetches_page,
    serving_page,
    sessions_page,
    snapshot_page,
)
from kvserver.web.access import OPEN_PAGES, Access, Refusal
from kvserver.web.connections import ANSWER_SECONDS, IDLE_SECONDS, REQUEST_SECONDS, WHY_SPARE, Connections, Phase
from kvserver.web.history import NO_HISTORY, History
from kvserver.web.memcpy import Memcpy

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOP_DEADLINE_SECONDS = 1.0  # most that a page waits for the loop
STUCK_SECONDS = 5.0  # a loop without a turn for this long is not ready
_MOST_HEAD_BYTES = (64 << 10) + 1  # the request line and all headers; the standard library refuses a line of so many


class StatusPages(Connections):
    """Server of the pages. It serves in its own daemon threads from start() until close()."""

    def __init__(
        self,
        address: tuple[str, int],
        server: Server,
        observability: Observability,
        match: MatchPages,
        upkeep: Upkeep,
        settings: Mapping[str, Any] = {},
        token: str = "",
        *,
        serving: Serving | None = None,
        history: History = NO_HISTORY,
        copy_threads: int = 1,
    ) -> None:
        """`upkeep` is called in the loop's thread. `settings`: shown by `/config`. `token`: clients must send it.
        `copy_threads`: with so many memcpy is measured."""
        super().__init__(address, _Handler)
        self.access = Access(str(self.server_address[0]), address[0], token)
        self.kvserver = server
        self.match = match
        self.upkeep = upkeep
        self.clears = Clears(upkeep)
        self.sessions = SessionReports(upkeep)
        self.pins = Pins(upkeep)
        self.prefetches = PrefetchReports(upkeep)
        self.serving = serving or Serving()
        self._settings = settings
        self.explain = observability.explain
        self.page_data = page.Data(history, observability.ages, Memcpy(copy_threads))
        self.make_kv_snapshot = observability.publisher.snapshot if observability.publisher is not None else None
        self.cut_off_reason = observability.observers.cut_off_reason
        self._make_families = observability.families
        self._last: tuple[DaemonStatus, RpcCounts] | None = None
        self._thread = threading.Thread(target=self.serve, name="http", daemon=True)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def service_actions(self) -> None:
        super().service_actions()
        self.page_data.history.tick()

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts: it ends at once
        self.shutdown()
        self.server_close()

    def snapshot(self) -> tuple[DaemonStatus, RpcCounts]:
        """(status, counts of requests), fresh if the loop answers in time, else the last ones. TimeoutError if there are none."""
        server = self.kvserver
        try:
            status, rpc = self.ask(lambda: (server.snapshot(), server.rpc.snapshot()))
        except TimeoutError:
            if self._last is None:
                raise
            status, rpc = self._last
            status = replace(status, ready=False, stale_seconds=round(server.seconds_since_turn, 3))
        else:
            self._last = status, rpc
        return replace(status, http=self.status()), rpc

    def families(self) -> list[Family]:
        """All families of the daemon, of a snapshot()."""
        return self._families_of(*self.snapshot())

    def last_families(self) -> list[Family]:
        """The same once the loop has ended, from the thread that ran it."""
        server = self.kvserver
        return self._families_of(replace(server.snapshot(), http=self.status()), server.rpc.snapshot())

    def _families_of(self, status: DaemonStatus, rpc: RpcCounts) -> list[Family]:
        return [*self._make_families(status, rpc), *self.match.families(), *process_families()]

    def ask(self, function: Callable[[], T]) -> T:
        """Run `function` in the loop. TimeoutError if it did not start in time; then it never runs."""
        future = self.kvserver.call(function)
        try:
            return future.result(LOOP_DEADLINE_SECONDS)
        except FutureTimeout:
            if future.cancel():
                raise TimeoutError("the event loop does not answer") from None
            return future.result()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """An error of one page: mostly a client that disconnected."""
        log.debug("http: error for %s", client_address, exc_info=True)

    def settings(self) -> dict[str, Any]:
        """Every setting with its value and source, as the daemon has it now."""
        if not self.serving.switched:
            return {**self._settings}
        now = {"value": self.serving.mode, "source": "request", "source_name": "POST /config/serving"}
        return {**self._settings, "serving": {**self._settings["serving"], **now}}

    def not_ready(self) -> str | None:
        """Reason why this daemon should receive no traffic, or None."""
        stuck = self.kvserver.seconds_since_turn
        if stuck > STUCK_SECONDS:
            return f"the event loop has not turned for {stuck:.1f} s"
        return self.kvserver.failure or None


class _HeadReader(io.BufferedReader):
    """Reads whole lines, at most `left` bytes together. The standard library takes the end of the input for the end of the
    headers, and would carry out a request that was cut off in the middle."""

    left = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        most = self.left + 1 if size is None or size < 0 else min(size, self.left + 1)
        line = super().readline(most)
        self.left -= len(line)
        if self.left < 0:
            raise http.client.LineTooLong("head")
        if len(line) < most and not line.endswith(b"\n"):
            raise ConnectionResetError("the request ended in the middle of its head")
        return line


class _Handler(BaseHTTPRequestHandler):
    server: StatusPages
    connection: socket.socket
    server_version, sys_version = f"kvserver/{__version__}", ""
    protocol_version = "HTTP/1.1"
    rbufsize = 0  # _HeadReader is the buffer
    timeout = IDLE_SECONDS + 1  # of one read or write; the deadlines of Connections are shorter
    wbufsize = -1  # a head and a small body are sent together
    disable_nagle_algorithm = True  # else the end of a larger body waits 40 ms for the peer's delayed acknowledgement

    # ---- reading a request ------------------------------------------------------------------------

    def setup(self) -> None:
        super().setup()
        self.rfile = self._reader = _HeadReader(self.rfile)
        self._visit = self.server.visit(self.connection)
        self._body = b""

    def handle_one_request(self) -> None:
        """Answer one request, if one arrives."""
        self.close_connection = True  # until a request keeps it open
        self._body = b""
        if not self._reader.peek(1):
            return
        self.server.enter(self._visit, Phase.SENDING, REQUEST_SECONDS)
        self._reader.left = _MOST_HEAD_BYTES
        super().handle_one_request()
        if not self.server.enter(self._visit, Phase.IDLE, IDLE_SECONDS):
            self.close_connection = True

    def parse_request(self) -> bool:
        """Read the head, decide on it, read the body. False if the request is answered already."""
        if not super().parse_request():
            return False
        if self._visit.spare:
            self.close_connection = True
        refusal = self._refusal() or self._read_body()
        if refusal is None:
            return self.server.enter(self._visit, Phase.ANSWERING, ANSWER_SECONDS)
        if not self._visit.ended:  # else its end was counted
            self.server.refused(refusal.reason)
        self.close_connection = True  # the rest of its input is not read
        body = json.dumps({"error": refusal.reason, "message": refusal.message}) + "\n"
        self._send(refusal.code, body, "application/json")
        return False

    def handle_expect_100(self) -> bool:
        return True  # sent by _read_body if the body is read

    def _refusal(self) -> Refusal | None:
        if self._visit.spare and self._page_name not in OPEN_PAGES:
            return Refusal(503, self._visit.spare, WHY_SPARE[self._visit.spare])
        return self.server.access.refusal(self._method, self._page_name, self.headers)

    def _read_body(self) -> Refusal | None:
        """Read the body of a request of _WITH_BODY; other pages leave it unread and end the connection."""
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(lengths) > 1:
            return Refusal(
                411, "bad_length", "send one Content-Length and a body of that length, without Transfer-Encoding"
            )
        takes_body = self.command == "POST" and self.path in _WITH_BODY
        length = lengths[0] if lengths else "" if takes_body else "0"
        if not takes_body:
            self.close_connection |= length != "0"
            return None
        if not length.isdecimal():
            return Refusal(411, "bad_length", "send Content-Length and a body")
        if len(length) > 10 or int(length) > MOST_BODY_BYTES:
            return Refusal(413, "too_large", f"a body has at most {MOST_BODY_BYTES} bytes")
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
            self.wfile.flush()
        self._body = self.rfile.read(int(length))
        if len(self._body) < int(length):
            return Refusal(400, "bad_length", "the body ended early")
        return None

    @property
    def _page_name(self) -> str:
        return self.path.partition("?")[0]

    # ---- answering it -----------------------------------------------------------------------------

    @property
    def _method(self) -> str:
        """The method by which access is decided and a page is found: HEAD is answered as GET, without the body."""
        return "GET" if self.command == "HEAD" else self.command

    def do_GET(self) -> None:
        has_query = self._method == "GET" or self._page_name in _COMMANDS_WITH_QUERY
        page = _PAGES.get(f"{self._method} {self._page_name if has_query else self.path}")
        if self.command == "DELETE":
            page = next((page for prefix, page in _DELETIONS.items() if self.path.startswith(prefix)), page)
        try:
            (page or _Handler._no_page)(self)
        except TimeoutError as error:
            self._send(503, f"{error}\n")

    do_POST = do_HEAD = do_DELETE = do_GET

    def do_OPTIONS(self) -> None:
        """Name the methods of a page. No header of CORS: other sites' pages get nothing here."""
        if allowed := self._allowed():
            self._send(200, b"", headers={"Allow": ", ".join(allowed)})
        else:
            self._no_page()

    def _allowed(self) -> list[str]:
        """Methods of the page; none if there is no such page."""
        methods = {"GET": ["HEAD", "GET"], "POST": ["POST"]}
        allowed = [
            name
            for method, names in methods.items()
            if self.path == "*" or f"{method} {self._page_name}" in _PAGES
            for name in names
        ]
        if self.path == "*" or self.path.startswith(tuple(_DELETIONS)):
            allowed.append("DELETE")
        return [*allowed, "OPTIONS"] if allowed else []

    def _no_page(self) -> None:
        allowed = self._allowed()
        if allowed and self.command not in allowed:
            names = ", ".join(allowed)
            self._send(405, f"{self._page_name} has no {self.command}; it has {names}\n", headers={"Allow": names})
        else:
            self._send(404, f"no page {self.path}; there are {_LISTED}\n")

    def _status(self) -> None:
        self._send(200, msgspec.json.encode(self.server.snapshot()[0]), "application/json")

    def _instances(self) -> None:
        instances = self.server.snapshot()[0].instances
        self._send(200, self.server.match.instances(instances), "application/json")

    def _match(self) -> None:
        if reason := self.server.cut_off_reason("index"):
            self._send(503, f"the index is not up to date: {reason}\n")
        else:
            self._send(*self.server.match.match(self._body, self.headers.get_content_type()))

    def _kv_snapshot(self) -> None:
        if reason := self.server.cut_off_reason("zmq"):
            self._send(503, f"KV events are not published any more: {reason}\n")
        elif self.server.enter(self._visit, Phase.ANSWERING, snapshot_page.MOST_SECONDS):
            refused = snapshot_page.answer(self, self.server.make_kv_snapshot)
            if refused is not None:
                self._send(refused[0], json.dumps(refused[1]) + "\n", "application/json")

    def _explain(self) -> None:
        code, body = explain_page.answer(self.server.explain, self.path.partition("?")[2])
        self._send(code, body, "application/json")

    def _metrics(self) -> None:
        accept, encodings = (self.headers.get(name, "") for name in ("Accept", "Accept-Encoding"))
        body, headers = render(self.server.families(), accept, encodings)
        self._send(200, body, headers.pop("Content-Type"), headers)

    def _livez(self) -> None:
        self._send(200, "alive\n")

    def _readyz(self) -> None:
        reason = self.server.not_ready()
        self._send(200 if reason is None else 503, (reason or "ready") + "\n")

    def _config(self) -> None:
        self._send(200, json.dumps(self.server.settings(), indent=2) + "\n", "application/json")

    def _clear(self) -> None:
        code, body = clear_page.answer(self.server.clears, self.server.ask, self.path.partition("?")[2])
        self._send(code, body, "application/json")

    def _serving(self) -> None:
        code, body = serving_page.answer(self.server.serving, self.server.ask, self.path.partition("?")[2])
        self._send(code, body, "application/json")

    def _sessions(self) -> None:
        self._send(200, sessions_page.all_sessions(self.server.sessions, self.server.ask), "application/json")

    def _delete_session(self) -> None:
        code, body = sessions_page.delete(self.server.sessions, self.server.ask, self.path)
        self._send(code, body, "application/json")

    def _pin(self) -> None:
        server, content_type = self.server, self.headers.get_content_type()
        code, body = pins_page.create(server.pins, server.match, server.ask, self._body, content_type)
        self._send(code, body, "application/json")

    def _pins(self) -> None:
        self._send(200, pins_page.everything(self.server.pins, self.server.ask), "application/json")

    def _delete_pin(self) -> None:
        code, body = pins_page.delete(self.server.pins, self.server.ask, self.path)
        self._send(code, body, "application/json")

    def _prefetch(self) -> None:
        server, content_type = self.server, self.headers.get_content_type()
        code, body = prefetches_page.create(server.prefetches, server.match, server.ask, self._body, content_type)
        self._send(code, body, "application/json")

    def _prefetches(self) -> None:
        self._send(200, pins_page.everything(self.server.prefetches, self.server.ask), "application/json")

    def _delete_prefetch(self) -> None:
        code, body = pins_page.delete(self.server.prefetches, self.server.ask, self.path)
        self._send(code, body, "application/json")

    def _audit(self) -> None:
        outcome = self.server.ask(self.server.upkeep.audit_now)
        code = {Audit.BALANCED: 200, Audit.UNBALANCED: 500, Audit.NOT_COUNTED: 503}[outcome]
        self._send(code, json.dumps({"audit": outcome.value}), "application/json")

    def _page(self) -> None:
        code, body, content_type, headers = page.asset(self._page_name, self.headers.get("If-None-Match", ""))
        self._send(code, body, content_type, headers)

    def _history(self) -> None:
        code, body = self.server.page_data.answer(self.path.partition("?")[2])
        self._send(code, body, "application/json")

    def _send(
        self,
        code: int,
        body: str | bytes,
        content_type: str = "text/plain; charset=utf-8",
        headers: Mapping[str, str] = {},
    ) -> None:
        raw = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in headers.items():
            self.send_header(name, value)
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if code == 503:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http %s: " + format, self.address_string(), *args)


_PAGES: dict[str, Callable[[_Handler], None]] = {
    **{f"GET {name}": _Handler._page for name in page.ASSETS},
    "GET /history": _Handler._history,
    "GET /status": _Handler._status,
    "GET /instances": _Handler._instances,
    "GET /metrics": _Handler._metrics,
    "GET /explain": _Handler._explain,
    "GET /livez": _Handler._livez,
    "GET /readyz": _Handler._readyz,
    "GET /config": _Handler._config,
    "GET /kv/snapshot": _Handler._kv_snapshot,
    "GET /sessions": _Handler._sessions,
    "GET /cache/pins": _Handler._pins,
    "POST /cache/pins": _Handler._pin,
    "GET /cache/prefetches": _Handler._prefetches,
    "POST /cache/prefetches": _Handler._prefetch,
    "POST /cache/clear": _Handler._clear,
    "POST /config/serving": _Handler._serving,
    "POST /audit": _Handler._audit,
    "POST /kv/match": _Handler._match,
}
_DELETIONS: dict[str, Callable[[_Handler], None]] = {
    sessions_page.PREFIX: _Handler._delete_session,
    pins_page.PREFIX: _Handler._delete_pin,
    prefetches_page.PREFIX: _Handler._delete_prefetch,
}
_COMMANDS_WITH_QUERY = ("/cache/clear", "/config/serving")
_WITH_BODY = ("/kv/match", "/cache/pins", "/cache/prefetches")
_LISTED = ", ".join(
    [name for name in _PAGES if not name.startswith("GET /assets/")] + [f"DELETE {prefix}ID" for prefix in _DELETIONS]
)
