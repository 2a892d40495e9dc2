"""`GET /sessions` and `DELETE /sessions/ID`: which sessions have chunks in L1, and the end of one.

- `GET /sessions`: {"sessions": [{"session_id", "model_name", "namespace", "salt_digest", "tokens", "bytes", "tiers",
  "last_use_seconds", "pins"}], "left_out"}, the largest and latest first.
- `DELETE /sessions/ID`: all that only this session used leaves L1 before anything else, once space is needed and no pin protects it.
  `?cache_salt=SALT` where the session's requests had one, `?model=NAME` for the sessions of one model. {"id", "outcome": "accepted",
  "tokens", ...}

Errors are {"error": code, "message": text}: 400 for a bad parameter. An unknown session is a 404 with the outcome `missing`.

Owns: the parameters and the form. Refuses to know: sockets, what leaves L1 first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from urllib.parse import parse_qsl, unquote

import msgspec

from kvserver.protocol import MAX_SESSION_ID
from kvserver.server import DeletedSession, SessionReports, SessionsReport

PREFIX = "/sessions/"
_LONGEST = 4096  # characters of a parameter
_PARAMETERS = ("cache_salt", "model")


def all_sessions(reports: SessionReports, ask: Callable[[Callable[[], SessionsReport]], SessionsReport]) -> bytes:
    """JSON. `ask` runs a function in the loop."""
    return msgspec.json.encode(ask(reports.all))


def delete(
    reports: SessionReports, ask: Callable[[Callable[[], DeletedSession]], DeletedSession], path: str
) -> tuple[int, bytes]:
    """HTTP code and JSON. `ask` runs a function in the loop."""
    name, _, query = path.removeprefix(PREFIX).partition("?")
    try:
        id = unquote(name, errors="strict")
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), errors="strict", max_num_fields=4)
    except (ValueError, UnicodeDecodeError):
        return _bad("the path or the query cannot be read")
    given = dict(pairs)
    if not 0 < len(id) <= MAX_SESSION_ID:
        return _bad(f"a session's name has 1 to {MAX_SESSION_ID} characters")
    if len(given) < len(pairs) or any(key not in _PARAMETERS or len(text) > _LONGEST for key, text in given.items()):
        return _bad(f"give each of {' and '.join(_PARAMETERS)} at most once, with up to {_LONGEST} characters")
    outcome = ask(lambda: reports.delete(id, given.get("model", ""), given.get("cache_salt", "")))
    return 404 if outcome.outcome == "missing" else 200, msgspec.json.encode(outcome)


def _bad(text: str) -> tuple[int, bytes]:
    return 400, json.dumps({"error": "bad_parameter", "message": text}).encode() + b"\n"
