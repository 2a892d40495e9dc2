"""`POST | GET /cache/pins` and `DELETE /cache/pins/ID`: prompts whose KV stays in L1 for a time, within `--pin-share`.

- `POST /cache/pins`: the prompt as for `/kv/match` (`model`, `instance_ids`, `tokens` or whole `block_hashes`, `lora_name`, `cache_salt`) and
  `ttl_seconds`, which begin with the answer. Or, instead of the prompt, `session_id` with `model`, `instance_ids` and `cache_salt`.
- `GET /cache/pins`: {"pins": [...], "left_out"}, those that end first coming first.
- `DELETE /cache/pins/ID` ends that pin only. A chunk that another pin names stays protected.

    {"id", "outcome": accepted|clipped|deferred|rejected|missing, "tokens", "bytes", "tiers", "expires_at", "ready_in_seconds", "reason", ...}

`reason` begins with a code. A rejected pin is a 409, a missing prompt or pin a 404. Errors of form are {"error": code, "message": text}.

Owns: the body, the path and the form. Refuses to know: sockets, what a pin protects.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta, Struct

from kvserver.protocol import KEY_BYTES, MAX_PIN_SECONDS, MAX_SESSION_ID, TENANT
from kvserver.routing import BadQuery, JsonQuery, MatchPages
from kvserver.server import PinReport, PinRequest, SessionPinRequest

PREFIX = "/cache/pins/"
_LONGEST_ID = 64
_CODES = {"rejected": 409, "missing": 404}


class TimedQuery(JsonQuery, kw_only=True):
    ttl_seconds: float
    tenant: Annotated[str, Meta(pattern=TENANT)] = ""  # to whom what L1 lacks will belong

    def request(self, match: MatchPages) -> PinRequest | SessionPinRequest:
        return _request(match, self)


class _Pin(TimedQuery, kw_only=True):
    ttl_seconds: Annotated[float, Meta(gt=0, le=MAX_PIN_SECONDS)]
    session_id: Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_ID)] | None = None

    def request(self, match: MatchPages) -> PinRequest | SessionPinRequest:
        if self.session_id is None:
            return super().request(match)
        if self.tokens is not None or self.block_hashes is not None or self.lora_name:
            raise BadQuery(400, "bad_query", "give session_id, or a prompt by block_hashes or tokens")
        return SessionPinRequest(
            self.session_id, self.cache_salt, self.model, tuple(self.instance_ids), self.ttl_seconds
        )


_decoder: msgspec.json.Decoder[TimedQuery] = msgspec.json.Decoder(_Pin)


class Requested(Protocol):
    """Pins, or what is requested and reported as pins are."""

    def begin(self, request: Any) -> PinReport: ...
    def reject(self, code: str, text: str) -> PinReport: ...
    def all(self) -> Struct: ...
    def delete(self, id: str) -> PinReport: ...


def create(
    pins: Requested, match: MatchPages, ask: Callable[[Callable[[], PinReport]], PinReport], body: bytes, content_type: str,
    decoder: msgspec.json.Decoder[TimedQuery] = _decoder,
) -> tuple[int, bytes]:  # fmt: skip
    """HTTP code and JSON. `ask` runs a function in the loop."""
    if content_type != "application/json":
        return _bad(415, "media_type", "send application/json")
    try:
        query = decoder.decode(body)
        request = query.request(match)
    except BadQuery as error:
        if error.code == 409:
            code, text = error.error, error.message
            return 409, msgspec.json.encode(ask(lambda: pins.reject(code, text)))
        return _bad(error.code, error.error, error.message)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return _bad(400, "bad_query", str(error))
    report = ask(lambda: pins.begin(request))
    return _CODES.get(report.outcome, 200), msgspec.json.encode(report)


def _request(match: MatchPages, query: TimedQuery) -> PinRequest:
    engine, hashes = match.prompt(query)
    if len({hashes[at : at + KEY_BYTES] for at in range(0, len(hashes), KEY_BYTES)}) < len(hashes) // KEY_BYTES:
        raise BadQuery(400, "bad_query", "block_hashes has the hash of one block twice")
    groups = engine.object_groups
    return PinRequest(
        namespace=engine.namespace_prefix,
        model_name=engine.scheduler.model_name,
        hashes=hashes,
        chunk_blocks=engine.chunk_blocks,
        full_groups=tuple(number for number, group in enumerate(groups) if group.kind == "full") if groups else (0,),
        ttl_seconds=query.ttl_seconds,
        tenant=query.tenant,
    )


def everything(pins: Requested, ask: Callable[[Callable[[], Any]], Any]) -> bytes:
    return msgspec.json.encode(ask(pins.all))


def delete(pins: Requested, ask: Callable[[Callable[[], PinReport]], PinReport], path: str) -> tuple[int, bytes]:
    id = path.split("/", 3)[3]
    if not 0 < len(id) <= _LONGEST_ID or not id.isalnum():
        return _bad(400, "bad_parameter", "an id is what a POST to this page answered")
    report = ask(lambda: pins.delete(id))
    return _CODES.get(report.outcome, 200), msgspec.json.encode(report)


def _bad(code: int, error: str, message: str) -> tuple[int, bytes]:
    return code, json.dumps({"error": error, "message": message}).encode() + b"\n"
