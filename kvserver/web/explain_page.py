"""`GET /explain`: why a request, or the worst requests of the last minutes, computed prompt tokens.

    GET /explain?request_id=cmpl-...        the X-Request-Id, the id in the answer, or the beginning of one
    GET /explain?minutes=5&limit=10&instance_id=...

    {"order": "...", "requests": [{"verdict", "advice", ... and explain_facts.Facts}], "remembered": {...}}

Errors are {"error": code, "message": text}: 400 for a bad parameter, 404 for a request that is not remembered.

Owns: the parameters and the form. Refuses to know: sockets.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from kvserver.protocol.status import ExplainStatus
from kvserver.telemetry import Explain, Facts, advice, verdict

MOST_REQUESTS = 100  # in one answer
MOST_MINUTES = 24 * 60
_LONGEST_ID = 512
_NAMES = ("request_id", "instance_id", "minutes", "limit")
_BY_ID = "newest first"
_BY_TOKENS = "most avoidable tokens first, then most computed tokens, then newest"


class BadParameter(Exception):
    """Invalid parameter, answered with a 400."""


def answer(explain: Explain, query: str) -> tuple[int, str | bytes]:
    """HTTP code and JSON."""
    try:
        given = _parameters(query)
        most = _number(given, "limit", 10, MOST_REQUESTS)
        minutes = _number(given, "minutes", 5, MOST_MINUTES)
    except BadParameter as error:
        return 400, _error("bad_parameter", str(error))
    client_id, remembered = given.get("request_id"), explain.status()
    if client_id is None:
        found = explain.worst(minutes * 60, most, given.get("instance_id", ""))
    else:
        found = explain.find_requests(client_id, most)
        if not found:
            return 404, _error("unknown_request", _unknown(client_id, remembered))
    order = _BY_TOKENS if client_id is None else _BY_ID
    shown = {"order": order, "requests": [_shown(facts) for facts in found], "remembered": remembered}
    return 200, msgspec.json.encode(shown)


def _shown(facts: Facts) -> dict[str, Any]:
    return {"verdict": verdict(facts), "advice": advice(facts), **facts}


def _unknown(client_id: str, remembered: ExplainStatus) -> str:
    return (
        f"no request {client_id!r} is remembered; {remembered.requests:,} are, of at most {remembered.most_requests:,}, the "
        f"oldest from {remembered.oldest_seconds:.0f} s ago. Requests of engines that are not registered with this daemon are never remembered"
    )


def _parameters(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=len(_NAMES) + 1)
    except (ValueError, UnicodeDecodeError):
        raise BadParameter("the query cannot be read") from None
    given = dict(pairs)
    for name, value in given.items():
        if name not in _NAMES:
            raise BadParameter(f"{name[:50]!r} is no parameter; there are {', '.join(_NAMES)}")
        if not 0 < len(value) <= _LONGEST_ID:
            raise BadParameter(f"{name} has 1 to {_LONGEST_ID} characters")
    if len(given) < len(pairs):
        raise BadParameter("a parameter is given twice")
    if "request_id" in given and ("minutes" in given or "instance_id" in given):
        raise BadParameter("give request_id, or minutes and instance_id, not both")
    return given


def _number(given: dict[str, str], name: str, default: int, most: int) -> int:
    text = given.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and 0 < int(text) <= most):
        raise BadParameter(f"{name} is a number from 1 to {most}")
    return int(text)


def _error(code: str, message: str) -> str:
    return json.dumps({"error": code, "message": message}) + "\n"
