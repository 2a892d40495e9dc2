"""`POST /cache/clear`: forget all KV, or that of one instance or model.

- `POST /cache/clear`: all, in L1 and L2.
- `POST /cache/clear?instance_id=ID`: what this engine may find.
- `POST /cache/clear?model_name=NAME`: what engines of this model may find.
- `...&dry_run=true` reports what would be cleared.
- `...&shared=true`: also if other engines, or machines through a tier of L2, use the same KV.

    {"chunks": 3, "tail_blocks": 0, "l2": [{"name", "kind", "objects", "shared"}], "instances", "models", "shared_with", "cleared"}

Errors are {"error": code, "message": text}:
- 400 for a bad parameter;
- 404 for an unknown instance or model;
- 409 while an instance waits for its ranks (`not_ready`), for a model with more than 64 namespaces (`too_many`), and for KV that
  others use (`shared`, with "report");
- 500 and 504 where a tier of L2 has not forgotten: it may do so later.

Owns: the parameters and the form. Refuses to know: sockets, what is cleared.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeAlias
from urllib.parse import parse_qsl

import msgspec

from kvserver.server import ClearRefusal, ClearReport, ClearRequest, Clears

Outcome: TypeAlias = ClearReport | ClearRefusal
_DEADLINE_SECONDS = 10.0  # for the tiers of L2 to make a clear durable
_LONGEST_NAME = 1024
_NAMES = ("instance_id", "model_name")
_TRUTHS = ("dry_run", "shared")
_TRUTH = {"true": True, "false": False}


class _BadQuery(Exception):
    """Becomes a 400."""


def answer(clears: Clears, ask: Callable[[Callable[[], Outcome]], Outcome], query: str) -> tuple[int, bytes]:
    """HTTP code and JSON. `ask` runs a function in the loop."""
    try:
        request = _request(query)
    except _BadQuery as error:
        return 400, _error("bad_parameter", str(error))
    ended: Future[str] = Future()
    outcome = ask(lambda: clears.clear(request, lambda _, failure: ended.set_result(failure)))
    if isinstance(outcome, ClearRefusal):
        return _refused(outcome)
    if not outcome.cleared:
        return 200, msgspec.json.encode(outcome)
    try:
        failure = ended.result(_DEADLINE_SECONDS)
    except FutureTimeout:
        text = f"L1 is cleared; a tier of L2 has not answered within {_DEADLINE_SECONDS:.0f} s"
        return 504, _error("timeout", text)
    if failure:
        return 500, _error("storage", f"L1 is cleared, L2 is not: {failure}")
    return 200, msgspec.json.encode(outcome)


def _refused(refusal: ClearRefusal) -> tuple[int, bytes]:
    code = 404 if refusal.code.startswith("unknown") else 409
    hint = "; add shared=true to clear it for all of them" if refusal.code == "shared" else ""
    report = msgspec.structs.replace(refusal.report, cleared=False) if refusal.report is not None else None
    return code, _error(refusal.code, refusal.message + hint, report)


def _request(query: str) -> ClearRequest:
    known = (*_NAMES, *_TRUTHS)
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), errors="strict", max_num_fields=8)
    except (ValueError, UnicodeDecodeError):
        raise _BadQuery("the query cannot be read") from None
    given = dict(pairs)
    for name, value in given.items():
        if name not in known:
            raise _BadQuery(f"{name[:50]!r} is no parameter; there are {', '.join(known)}")
        if name in _NAMES and not 0 < len(value) <= _LONGEST_NAME:
            raise _BadQuery(f"{name} has 1 to {_LONGEST_NAME} characters")
        if name in _TRUTHS and value not in _TRUTH:
            raise _BadQuery(f"{name} is true or false")
    if len(given) < len(pairs):
        raise _BadQuery("a parameter is given twice")
    if len(given.keys() & set(_NAMES)) > 1:
        raise _BadQuery("give instance_id or model_name, not both")
    return ClearRequest(
        instance_id=given.get("instance_id", ""),
        model_name=given.get("model_name", ""),
        shared=_TRUTH[given.get("shared", "false")],
        dry_run=_TRUTH[given.get("dry_run", "false")],
    )


def _error(code: str, message: str, report: ClearReport | None = None) -> bytes:
    shown = {"error": code, "message": message} | ({"report": report} if report is not None else {})
    return msgspec.json.encode(shown) + b"\n"
