"""`POST /kv/match` and `GET /instances`: how much of a prompt each engine would find, and how busy it is.

    {"model": "", "instance_ids": [], "block_hashes": [...]}
    {"model": "m", "tokens": [...], "lora_name": "", "lora_path": "", "cache_salt": ""}

The request is JSON or, with `Content-Type: application/msgpack`, msgpack; the answer has the same form. Hashes are hexadecimal
text in JSON, bytes in msgpack, or the unsigned integers that engines publish. In msgpack they may also be all end to end as one
`bytes`, with `hash_bytes` for each. Tokens are hashed as the engines hash them, if the engines describe how.

    {"instances": [{"instance_id", "model_name", "blocks", "l0", "l1", "l2", "l1_l2", "best", "block_tokens", "chunk_tokens",
     "load"}], "skipped": [{"instance_id", "reason"}]}

The unit is blocks. `blocks` is the length of the prompt. `l0`, `l1` and `l2` are the leading blocks that each tier has, `l1_l2`
those of L1 and L2 together, `best` those of all tiers together. For an engine with several object groups they are the boundary
that a lookup finds in each tier, the boundary in L1 and L2 together, and the greatest of these. Errors are {"error": code,
"message": text}.

Owns: both forms and their limits. Refuses to know: sockets, the loop. Engine stats are up to ENGINE_STATS_SECONDS old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from kvserver.kv_events import ReaderConnected
from kvserver.protocol import KEY_BYTES, SGLANG_HASHES, SGLANG_PAIRS_HASH, WAIT_SECONDS, Histogram, Label, Name, Text
from kvserver.protocol.status import EngineStatus, InstanceStatus
from kvserver.routing.block_hashes import ALGORITHMS, hash_blocks, hash_pages
from kvserver.routing.prefix_index import KVIndex, Match
from kvserver.telemetry import Family, Kind

MOST_BODY_BYTES = 4 << 20
ENGINE_STATS_SECONDS = 0.5
JSON, MSGPACK = "application/json", "application/msgpack"
_OF_INSTANCE = (
    "instance_id", "model_name", "engine", "engine_version", "namespace", "world_size", "block_tokens", "chunk_tokens", "l0_source", "load",
)  # fmt: skip
_MOST_IDS = 1024
_LEAST_WHOLE = 16  # bytes of a whole hash: of xxhash
_HASHING_AT_ONCE = 2  # requests that hash tokens; others wait, so that the loop gets the interpreter

Token: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Answer: TypeAlias = dict[str, Any]


class BadQuery(Exception):
    """Query that is answered with this HTTP code."""

    def __init__(self, code: int, error: str, message: str) -> None:
        super().__init__(message)
        self.code, self.error, self.message = code, error, message


class _Query(msgspec.Struct, kw_only=True):
    model: Label = ""
    instance_ids: Annotated[list[Name], Meta(max_length=_MOST_IDS)] = []
    hash_bytes: Annotated[int, Meta(ge=8, le=32)] = 32
    tokens: list[Token] | None = None
    lora_name: Label = ""
    lora_path: Text = ""
    cache_salt: Text = ""


class JsonQuery(_Query, kw_only=True):
    block_hashes: list[str | int] | None = None


class HashedPrompt(NamedTuple):
    """`engine`: one of those that share KV. `hashes`: of the blocks, each as long as a key."""

    engine: ReaderConnected
    hashes: bytes


class _MsgpackQuery(_Query, kw_only=True):
    block_hashes: memoryview | list[bytes | int] | None = None  # the first is a part of the body, uncopied


_json, _msgpack = msgspec.json.Decoder(JsonQuery), msgspec.msgpack.Decoder(_MsgpackQuery)


class RecentEngineStats:
    """Latest engine stats. Never waits for the loop."""

    def __init__(
        self, ask: Callable[[], Future[list[InstanceStatus]]], every_seconds: float = ENGINE_STATS_SECONDS
    ) -> None:
        self._ask = ask
        self._every_seconds = every_seconds
        self._lock = threading.Lock()
        self._asked: Future[list[InstanceStatus]] | None = None
        self._asked_at = float("-inf")
        self._last: dict[str, EngineStatus | None] = {}

    def read(self) -> dict[str, EngineStatus | None]:
        """Engine stats by instance id."""
        with self._lock:
            if self._asked is not None and self._asked.done():
                if not self._asked.cancelled() and self._asked.exception() is None:
                    self._last = {one.instance_id: one.load for one in self._asked.result()}
                self._asked = None
            if self._asked is None and time.monotonic() - self._asked_at >= self._every_seconds:
                self._asked, self._asked_at = self._ask(), time.monotonic()
            return self._last


class MatchPages:
    """Pages of this module. Any thread may call."""

    def __init__(self, index: KVIndex, ask: Callable[[], Future[list[InstanceStatus]]]) -> None:
        """`ask` requests the instances of `/status` from the loop."""
        self._index = index
        self._engine_stats = RecentEngineStats(ask)
        self._hashing = threading.BoundedSemaphore(_HASHING_AT_ONCE)
        self._seconds = Histogram(WAIT_SECONDS)
        self._counting = threading.Lock()

    def match(self, body: bytes, content_type: str) -> tuple[int, bytes, str]:
        """(HTTP code, body, content type) of the answer."""
        began = time.monotonic()
        form = MSGPACK if content_type == MSGPACK else JSON
        try:
            if content_type not in (JSON, MSGPACK):
                raise BadQuery(415, "media_type", f"send {JSON} or {MSGPACK}, not {content_type or 'neither'}")
            code, answer = 200, self._answer(_decoded(body, form))
        except BadQuery as error:
            code, answer = error.code, {"error": error.error, "message": error.message}
        raw = msgspec.msgpack.encode(answer) if form == MSGPACK else msgspec.json.encode(answer)
        with self._counting:
            self._seconds.observe(time.monotonic() - began)
        return code, raw, form

    def prompt(self, query: JsonQuery) -> HashedPrompt:
        """The prompt, as engines that share KV name its blocks. BadQuery if no engine is meant, or some share none, or it cannot be hashed."""
        if (query.block_hashes is None) == (query.tokens is None):
            raise BadQuery(400, "bad_query", "give either block_hashes or tokens")
        engines = self._index.known_engines(query.model, query.instance_ids)
        if not engines:
            raise BadQuery(409, "no_engine", "no engine that is meant has described how it names blocks")
        engine = engines[0]
        if any(other.namespace_prefix != engine.namespace_prefix for other in engines):
            names = ", ".join(each.instance_id for each in engines[:8])
            raise BadQuery(409, "several_namespaces", f"{names} do not all share KV: name one in instance_ids")
        if query.tokens is None:
            return HashedPrompt(engine, _whole_hashes(query, engine.scheduler.hash_algorithm in SGLANG_HASHES))
        if bool(query.lora_name) != bool(query.lora_path):
            raise BadQuery(400, "bad_query", "a LoRA is hashed by lora_name and lora_path")
        if why := unhashable(engine, query.lora_name):
            raise BadQuery(409, "unsupported_hashes", why)
        with self._hashing:
            return HashedPrompt(engine, _hashes(engine, query, query.tokens))

    def families(self) -> list[Family]:
        with self._counting:
            seconds = self._seconds.snapshot()
        text = "Time that the daemon took to answer POST /kv/match, also queries that it refused."
        return [Family("kvserver_kv_match_seconds", text, Kind.HISTOGRAM, bounds=WAIT_SECONDS).add(seconds)]

    def instances(self, status: Sequence[InstanceStatus]) -> bytes:
        """`status`: /status's instances."""
        rows = [
            {name: getattr(one, name) for name in _OF_INSTANCE} | (self._index.instance(one.instance_id) or {})
            for one in status
        ]
        return msgspec.json.encode({"instances": rows})

    def _answer(self, query: JsonQuery | _MsgpackQuery) -> Answer:
        if (query.block_hashes is None) == (query.tokens is None):
            raise BadQuery(400, "bad_query", "give either block_hashes or tokens")
        engines = self._index.known_engines(query.model, query.instance_ids)
        if query.tokens is not None:
            return self._match_tokens(engines, query, query.tokens)
        found: list[tuple[ReaderConnected, Match, int]] = []
        of_sglang = [engine for engine in engines if engine.scheduler.hash_algorithm in SGLANG_HASHES]
        others = [engine for engine in engines if engine not in of_sglang]
        for is_sglang, alike in ((False, others), (True, of_sglang)):
            if alike or not (engines or is_sglang):  # without engines, too, a query is checked
                hashes, hash_bytes = _joined(query, is_sglang, signed=bool(of_sglang))
                blocks = len(hashes) // hash_bytes
                found += [
                    (*each, blocks) for each in zip(alike, self._index.match(alike, hashes, hash_bytes), strict=True)
                ]
        order = {engine.instance_id: number for number, engine in enumerate(engines)}
        return self._found(sorted(found, key=lambda each: order[each[0].instance_id]))

    def _match_tokens(self, engines: list[ReaderConnected], query: _Query, tokens: list[int]) -> Answer:
        if not query.model:
            raise BadQuery(400, "bad_query", "tokens need a model")
        if bool(query.lora_name) != bool(query.lora_path):
            raise BadQuery(400, "bad_query", "a LoRA is hashed by lora_name and lora_path")
        skipped = {engine.instance_id: reason for engine in engines if (reason := unhashable(engine, query.lora_name))}
        if engines and len(skipped) == len(engines):
            raise BadQuery(400, "unsupported_hashes", next(iter(skipped.values())))
        chains: dict[tuple[Any, ...], list[ReaderConnected]] = {}
        for engine in engines:
            if engine.instance_id not in skipped:
                chains.setdefault(_chain(engine), []).append(engine)
        found: list[tuple[ReaderConnected, Match, int]] = []
        for alike in chains.values():
            with self._hashing:
                hashes = _hashes(alike[0], query, tokens)
            found += [
                (engine, match, len(hashes) // 32)
                for engine, match in zip(alike, self._index.match(alike, hashes, 32, len(tokens)), strict=True)
            ]
        return self._found(found) | {"skipped": [{"instance_id": name, "reason": why} for name, why in skipped.items()]}

    def _found(self, found: Any) -> Answer:
        stats = self._engine_stats.read()
        return {
            "instances": [
                {
                    "instance_id": engine.instance_id,
                    "model_name": engine.scheduler.model_name,
                    "blocks": blocks,
                    "l0": match.l0,
                    "l1": match.l1,
                    "l2": match.l2,
                    "l1_l2": match.l1_l2,
                    "best": match.best,
                    "block_tokens": engine.block_tokens,
                    "chunk_tokens": engine.block_tokens * engine.chunk_blocks,
                    "load": stats.get(engine.instance_id),
                }
                for engine, match, blocks in found
            ],
            "skipped": [],
        }


def unhashable(engine: ReaderConnected, lora: str = "") -> str:
    """Reason why tokens, with that LoRA, cannot be hashed for this engine; "" if they can."""
    scheduler = engine.scheduler
    if scheduler.hash_algorithm in SGLANG_HASHES:
        return f"{engine.instance_id} hashes the id that SGLang gives a LoRA; send block_hashes" if lora else ""
    if scheduler.hash_algorithm not in ALGORITHMS:
        return f"{engine.instance_id} hashes blocks by {scheduler.hash_algorithm or 'an unknown algorithm'}; send block_hashes"
    if not scheduler.hash_start or engine.block_tokens % scheduler.hash_block_tokens:
        return f"{engine.instance_id} did not describe how its chain of hashes begins; send block_hashes"
    return ""


def _chain(engine: ReaderConnected) -> tuple[Any, ...]:
    """Engines with equal values give equal blocks equal hashes."""
    scheduler = engine.scheduler
    return scheduler.hash_algorithm, scheduler.hash_start, scheduler.hash_block_tokens, engine.block_tokens


def _hashes(engine: ReaderConnected, query: _Query, tokens: list[int]) -> bytes:
    """The hashes of the engine's blocks. Each is the last hash among the smaller blocks that the engine hashes."""
    scheduler = engine.scheduler
    if scheduler.hash_algorithm in SGLANG_HASHES:
        pairs = scheduler.hash_algorithm == SGLANG_PAIRS_HASH
        try:
            return b"".join(hash_pages(engine.block_tokens, tokens, query.cache_salt, pairs))
        except OverflowError as error:
            raise BadQuery(400, "bad_query", f"a token id of SGLang has 32 bits: {error}") from None
    lora = (query.lora_name, query.lora_path) if query.lora_name else None
    whole = tokens[: len(tokens) // engine.block_tokens * engine.block_tokens]
    fine = hash_blocks(
        scheduler.hash_algorithm, scheduler.hash_start, scheduler.hash_block_tokens, whole, lora, query.cache_salt
    )
    every = engine.block_tokens // scheduler.hash_block_tokens
    return b"".join([value for number, value in enumerate(fine, 1) if number % every == 0])


def _decoded(body: bytes, form: str) -> JsonQuery | _MsgpackQuery:
    try:
        return _msgpack.decode(body) if form == MSGPACK else _json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadQuery(400, "bad_query", str(error)) from None


def _joined(query: JsonQuery | _MsgpackQuery, is_sglang: bool, signed: bool) -> tuple[bytes | memoryview, int]:
    """(hashes end to end, bytes of each): as received, or the short form of each, 8 bytes."""
    hashes = query.block_hashes
    if isinstance(hashes, memoryview):
        if len(hashes) % query.hash_bytes:
            raise BadQuery(400, "bad_hashes", f"{len(hashes)} bytes are no whole hashes of {query.hash_bytes}")
        if not is_sglang:
            return hashes, query.hash_bytes
        short = [
            _short(bytes(hashes[at : at + query.hash_bytes]), True, signed)
            for at in range(0, len(hashes), query.hash_bytes)
        ]
        return b"".join(short), 8
    try:
        return b"".join([_short(value, is_sglang, signed) for value in hashes or []]), 8
    except (ValueError, OverflowError) as error:
        raise BadQuery(400, "bad_hashes", f"a hash is 8 to 32 bytes, or an integer of 64 bits: {error}") from None


def _whole_hashes(query: JsonQuery, is_sglang: bool) -> bytes:
    """The hashes end to end, as keys have them."""
    hashes = []
    for value in query.block_hashes or []:
        try:
            raw = bytes.fromhex(value) if isinstance(value, str) else b""
        except ValueError as error:
            raise BadQuery(400, "bad_hashes", str(error)) from None
        if not _LEAST_WHOLE <= len(raw) <= KEY_BYTES:
            text = f"send tokens, or whole hashes: {_LEAST_WHOLE} to {KEY_BYTES} bytes in hexadecimal digits"
            raise BadQuery(400, "short_hashes", text)
        hashes.append((raw[8:] + raw[:8] if is_sglang else raw).ljust(KEY_BYTES, b"\0"))
    return b"".join(hashes)


def _short(value: str | bytes | int, is_sglang: bool, signed: bool) -> bytes:
    """The last 8 bytes, of SGLang's the first 8. An integer has no more; `signed`: it may be negative."""
    if isinstance(value, int):
        return value.to_bytes(8, "big", signed=signed and value < 0)
    raw = bytes.fromhex(value) if isinstance(value, str) else value
    if not 8 <= len(raw) <= 32:
        raise ValueError(f"{len(raw)} bytes")
    return raw[:8] if is_sglang else raw[-8:]
