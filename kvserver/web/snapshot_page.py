"""`GET /kv/snapshot?model=...&form=...&topic=...`: the blocks in L1 and L2 after a batch of the stream.

`model`, `form` (bytes, int or signed) and `topic` may be omitted if there is only one. `Accept: application/msgpack` gives
msgpack instead of JSON lines, `Accept-Encoding: gzip` compresses the body. 404 and 400 list the streams; 503 means that
too many snapshots are in progress: retry later. `kv_events.snapshot` describes the body.

Owns: the headers and the framing. Refuses to know: the contents of the body.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvserver.kv_events import MOST_SNAPSHOT_SECONDS, Busy, Encoding, NotOneTopic, Snapshot, snapshot_parts

log = logging.getLogger(__name__)

MOST_SECONDS = MOST_SNAPSHOT_SECONDS + 10.0  # to make and to read one
MakeSnapshot = Callable[[str, str, str], Snapshot]  # model, form, topic
_NAMES = ("model", "form", "topic")
_MEDIA: dict[str, Encoding] = {"application/x-ndjson": "json", "application/msgpack": "msgpack"}


def answer(handler: BaseHTTPRequestHandler, make: MakeSnapshot | None) -> tuple[int, dict[str, Any]] | None:
    """Send the snapshot and return None, or return HTTP code and JSON to send. `make` is None if no KV events are published."""
    asked = parse_qs(urlsplit(handler.path).query)
    if make is None:
        return 404, {"error": "no KV events are published: set --kv-events-endpoint"}
    if unknown := sorted(set(asked) - set(_NAMES)):
        return 400, {"error": f"unknown {unknown}; there are {list(_NAMES)}"}
    media = "application/msgpack" if "msgpack" in handler.headers.get("Accept", "") else "application/x-ndjson"
    gzip = "gzip" in handler.headers.get("Accept-Encoding", "")
    try:
        snapshot = make(*(asked.get(name, [""])[0] for name in _NAMES))
        with snapshot_parts(snapshot, _MEDIA[media], gzip) as parts:
            _stream(handler, parts, media, gzip)
            return None
    except NotOneTopic as error:
        if error.several:
            return 400, {"error": "name one of several streams or topics", "streams": error.known}
        return 404, {"error": "there is no such stream or topic", "streams": error.known}
    except Busy:
        return 503, {"error": "too many snapshots at once"}


def _stream(handler: BaseHTTPRequestHandler, parts: Iterable[bytes], media: str, gzip: bool) -> None:
    chunked = handler.request_version != "HTTP/1.0"  # HTTP/1.0 ends a body by closing the connection
    handler.close_connection = True  # also if the body is cut off
    handler.send_response(200)
    handler.send_header("Content-Type", media)
    if gzip:
        handler.send_header("Content-Encoding", "gzip")
    if chunked:
        handler.send_header("Transfer-Encoding", "chunked")
    handler.send_header("Connection", "close")
    handler.end_headers()
    if handler.command == "HEAD":
        return
    try:
        for part in parts:
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
    except TimeoutError as error:
        log.warning("/kv/snapshot: %s", error)
        return
    if chunked:
        handler.wfile.write(b"0\r\n\r\n")
