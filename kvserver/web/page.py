"""The page for people: `GET /` and its assets, which hold no data, and `GET /history`, which its charts are made of.

    GET /history?since=N     the samples from number N on; without it all that are kept

    {"boot_id", "interval_seconds", "seconds", "first": N, "names": [...], "rows": [[...]],
     "ages": {"l1": {...}, "l2": {...}}, "memcpy_bytes_per_second": null or a number}

Owns: the list of assets, the headers that bind a browser to them, the form of the history. Refuses to know: sockets, who may ask
(`access`). Everything else the page shows comes from `/status` and `/explain`.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import asdict

from kvserver.server import SERIES
from kvserver.telemetry import ResidentAges
from kvserver.web.history import History
from kvserver.web.memcpy import Memcpy

_FOLDER = Path(__file__).parent / "assets"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
}
# By path: only these files can be read, whatever a request names.
ASSETS = MappingProxyType(
    {
        "/": _FOLDER / "index.html",
        "/assets/METRICS.md": Path(__file__).parent.parent / "METRICS.md",
        **{
            f"/assets/{file.relative_to(_FOLDER).as_posix()}": file
            for file in sorted(_FOLDER.rglob("*"))
            if file.suffix in (".css", ".js", ".svg")
        },
    }
)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def asset(path: str, known: str) -> tuple[int, bytes, str, dict[str, str]]:
    """Code, body, type and headers. `known`: the request's If-None-Match. REQUIRES: `path` is one of ASSETS."""
    file = ASSETS[path]
    body = file.read_bytes()
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {**_HEADERS, "ETag": tag}
    return (304, b"", _TYPES[file.suffix], headers) if known == tag else (200, body, _TYPES[file.suffix], headers)


class Data:
    """Answer of `/history`. Any thread may call answer()."""

    def __init__(self, history: History, ages: ResidentAges, memcpy: Memcpy) -> None:
        self.history = history
        self._ages = ages
        self._memcpy = memcpy

    def answer(self, query: str) -> tuple[int, str]:
        """HTTP code and JSON."""
        asked = re.fullmatch(r"(?:since=([0-9]{1,15}))?", query)
        if asked is None:
            return 400, json.dumps(
                {"error": "bad_parameter", "message": "since=N is the only parameter, N a number"}
            ) + "\n"
        first, rows = self.history.since(int(asked[1] or 0))
        shown = {
            "boot_id": self.history.boot_id,
            "interval_seconds": self.history.interval_seconds,
            "seconds": self.history.seconds,
            "first": first,
            "names": SERIES,
            "rows": [[_short(value) for value in row] for row in rows],
            "ages": {tier: asdict(counts) for tier, counts in self._ages.counts().items()},
            "memcpy_bytes_per_second": self._memcpy.bytes_per_second(),
        }
        return 200, json.dumps(shown, separators=(",", ":")) + "\n"


def _short(value: float) -> float | int:
    return int(value) if value.is_integer() else round(value, 3)
