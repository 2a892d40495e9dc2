"""Explanations of the last requests: how many of their tokens were found where, what was missing first, and why.

It remembers at most MOST_REQUESTS requests in MOST_BYTES, and forgets the oldest first. To state when a missing chunk was evicted
it keeps the keys of the last evicted chunks in MOST_EVICTED_BYTES. `differences` has the fields behind namespaces. A request
begins with its first lookup, or with its end where no lookup of it is known.

Owns: that memory, the search by the client's id and the order of the worst. Refuses to know: what follows of a record
(`explain_facts`), HTTP. Written in the bus's thread, read from any.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvserver.cache import MissReason, filled_to
from kvserver.events import (
    ChunksEvicted,
    CopyBegan,
    CopyEnded,
    CopyRefused,
    Event,
    InstanceDisconnected,
    LookupEnded,
    NamespaceFormed,
    RequestEnded,
    Subscriber,
)
from kvserver.protocol import KEY_BYTES, REQUESTS, chunk_tokens_for
from kvserver.protocol.status import ExplainStatus
from kvserver.telemetry.differences import Difference, Differences
from kvserver.telemetry.explain_facts import MOST_RANKS, Facts, RankLoad, Request, facts_of

MOST_REQUESTS = 8192
MOST_BYTES = 16 << 20
MOST_EVICTED_BYTES = 4 << 20
LONGEST_REASON = 200  # characters of why nothing could be found, or was loaded
_REQUEST_BYTES = 1300  # of one, beside its id and its loads; an upper bound that a test holds
_LOAD_BYTES = 300
_EVICTED = (MissReason.EVICTED, MissReason.PINNED_OUT)
_EVICTED_BYTES = 300  # of one event, beside its keys

# What vLLM makes of a client's id: "cmpl-<id>-<prompt>-<8 hex>", "chatcmpl-<id>-<8 hex>", "<sample>_cmpl-<id>-...".
_SAMPLE = re.compile(r"\d+_")
_KIND = re.compile(r"(?:generate-tokens|generative-scoring|[a-z]+)[-_]")
_ADDED = re.compile(r"(?:[-_]\d+)?(?:-[0-9a-f]{8})?")


class _Stored(NamedTuple):
    """Tokens that an engine stores; 0 if that is not known."""

    chunk_tokens: int = 0
    block_tokens: int = 0  # the fewest that it could
    tails: bool = False
    engine: str = ""  # with its version, for people
    ends_unreported: bool = False


class Explain(Subscriber):
    name = "explain"
    handles = frozenset(
        {
            LookupEnded,
            CopyBegan,
            CopyEnded,
            CopyRefused,
            RequestEnded,
            ChunksEvicted,
            NamespaceFormed,
            InstanceDisconnected,
        }
    )

    def __init__(
        self,
        most_requests: int = MOST_REQUESTS,
        most_bytes: int = MOST_BYTES,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._clock_ns = clock_ns
        self._lock = threading.Lock()  # of all below
        self._ring: deque[Request] = deque()
        self._newest: dict[tuple[str, str], Request] = {}  # by instance and request id
        self._bytes = 0
        self._evicted: deque[ChunksEvicted] = deque()
        self._evicted_bytes = 0
        self._differences = Differences()
        self._stored: dict[str, _Stored] = {}  # by instance

    # ---- from any thread ----------------------------------------------------------------------

    def find_requests(self, client_id: str, most: int) -> list[Facts]:
        """The requests that a client knows by this id, or by the beginning of one, newest first."""
        with self._lock:
            ring = list(self._ring)
        fits = [(_fit(request.request_id, client_id), request) for request in reversed(ring)]
        found = [request for whole, request in fits if whole]
        begun = [request for whole, request in fits if whole is False]
        return self._facts((found or begun)[:most])

    def worst(self, seconds: float, most: int, instance_id: str = "") -> list[Facts]:
        """Requests begun in the last so many seconds, the worst first; of one instance, if it is named.

        Order: most avoidable tokens first, then most computed ones, then the newest.
        """
        since_ns = self._clock_ns() - int(seconds * 1e9)
        with self._lock:
            ring = [
                request
                for request in reversed(self._ring)
                if request.began_ns >= since_ns and instance_id in ("", request.instance_id)
            ]

        def badness(request: Request) -> tuple[int, int]:
            tokens = request.tokens()
            return tokens["avoidable"], tokens["computed"] or 0

        return self._facts(sorted(ring, key=badness, reverse=True)[:most])

    def status(self) -> ExplainStatus:
        with self._lock:
            oldest_ns = self._ring[0].began_ns if self._ring else self._clock_ns()
            return ExplainStatus(
                requests=len(self._ring),
                most_requests=self._most_requests,
                bytes=self._bytes + self._evicted_bytes + self._differences.bytes,
                oldest_seconds=round((self._clock_ns() - oldest_ns) * 1e-9, 3),
            )

    def attributes(self, instance_id: str, request_id: str) -> Mapping[str, str | int | list[str]]:
        """Attributes for the span of the newest request of that id."""
        with self._lock:
            request = self._newest.get((instance_id, request_id))
        if request is None:
            return {}
        facts = self._facts([request], dated=False)[0]
        tokens, missing, differs = facts["tokens"], facts["missing"], facts["differs"]
        found: dict[str, str | int | list[str]] = {"outcome": facts["outcome"], "lookups": facts["waits"]["lookups"]}
        for name in ("prompt", "l0", "l1", "l2", "computed", "avoidable"):
            if (count := tokens[name]) is not None:
                found[f"{name}_tokens"] = count
        if missing is not None:
            found |= {"missing_chunk": missing["chunk"], "missing_token": missing["token"]}
            found["miss_reason"] = missing["reason"]
        if differs is not None:
            found["differing_fields"] = [field["name"] for field in differs["fields"]]
        return found

    def _facts(self, requests: Sequence[Request], dated: bool = True) -> list[Facts]:
        """`dated`: with the time of an eviction, for which evicted keys are searched."""
        with self._lock:
            evicted = tuple(self._evicted) if dated else ()
        before = [_evicted_before(request, evicted) for request in requests]
        with self._lock:
            now_ns = self._clock_ns()
            return [facts_of(r, now_ns, seconds, self._differs(r)) for r, seconds in zip(requests, before, strict=True)]

    def _differs(self, request: Request) -> Difference | None:
        lookup = request.lookup
        if lookup is None or not lookup.outcome.other_namespace:
            return None
        return self._differences.between(lookup.namespace, lookup.outcome.other_namespace)

    # ---- the bus's thread ---------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        with self._lock:
            match event:
                case LookupEnded():
                    self._looked_up(event)
                case CopyBegan() | CopyEnded() | CopyRefused() if event.direction == "load":
                    self._loading(event)
                case RequestEnded():
                    self._ended(event)
                case ChunksEvicted() if event.group is None:
                    self._chunks_evicted(event)
                case NamespaceFormed():
                    first = event.ranks[0]
                    least = chunk_tokens_for(1, first.object_groups)
                    self._stored[event.instance_id] = _Stored(
                        first.chunk_tokens,
                        least,
                        first.tails,
                        " ".join(filter(None, first.engine_names)),
                        REQUESTS in first.unreported,
                    )
                    self._differences.formed(event)
                case InstanceDisconnected():
                    self._instance_disconnected(event)

    def _looked_up(self, event: LookupEnded) -> None:
        request = self._open(event) or self._remember(event, event.began_ns)
        # Not what a peer may make long, and the id once.
        outcome = replace(event.outcome, unavailable=event.outcome.unavailable[:LONGEST_REASON])
        request.lookup = replace(event, request_id=request.request_id, keys=b"", traceparent="", outcome=outcome)
        request.lookups += 1
        request.chunk_tokens = event.chunk_tokens

    def _loading(self, event: CopyBegan | CopyEnded | CopyRefused) -> None:
        request = self._newest.get((event.instance_id, event.request_id))
        if request is None:
            return
        load = request.loads.get(event.rank)
        if load is None:
            if len(request.loads) >= MOST_RANKS:
                request.unlisted_loads += isinstance(event, CopyBegan)
                return
            load = request.loads[event.rank] = RankLoad(event.rank)
            self._grow(request, _LOAD_BYTES)
        match event:
            case CopyBegan():
                request.load_began_ns = request.load_began_ns or event.time_ns
                load.began += 1
            case CopyEnded():
                load.ended(event.time_ns - event.began_ns, event.device_ns, event.bytes, event.chunks, event.outcome)
            case CopyRefused():
                load.ended(0, 0, 0, 0, event.code)

    def _ended(self, event: RequestEnded) -> None:
        request = self._open(event)
        if request is None:
            request = self._remember(event, event.time_ns)
        request.ended = replace(event, request_id=request.request_id, not_loaded=event.not_loaded[:LONGEST_REASON])
        if event.filled_tokens and request.lookup is not None:
            request.lookup = _after_fill(request.lookup, event.local_tokens + event.loaded_tokens)

    def _chunks_evicted(self, event: ChunksEvicted) -> None:
        self._evicted.append(event)
        self._evicted_bytes += _EVICTED_BYTES + len(event.keys)
        while self._evicted_bytes > MOST_EVICTED_BYTES:
            self._evicted_bytes -= _EVICTED_BYTES + len(self._evicted.popleft().keys)

    def _instance_disconnected(self, event: InstanceDisconnected) -> None:
        self._stored.pop(event.instance_id, None)
        for request in self._ring:
            if request.instance_id == event.instance_id and request.ended is None:
                request.departure = request.departure or ("died" if event.died else "left")

    def _open(self, event: LookupEnded | RequestEnded) -> Request | None:
        """The request, if it has not ended: an id that comes again afterwards is another request's."""
        request = self._newest.get((event.instance_id, event.request_id))
        return request if request is not None and request.ended is None and not request.departure else None

    def _remember(self, event: LookupEnded | RequestEnded, began_ns: int) -> Request:
        request = Request(event.instance_id, event.model_name, event.request_id, began_ns)
        stored = self._stored.get(event.instance_id, _Stored())
        request.chunk_tokens, request.block_tokens, request.tails = stored[:3]
        request.engine, request.ends_unreported = stored[3:]
        self._ring.append(request)
        self._newest[request.instance_id, request.request_id] = request
        self._grow(request, _REQUEST_BYTES + sys.getsizeof(event.request_id))
        return request

    def _grow(self, request: Request, more: int) -> None:
        request.bytes += more
        self._bytes += more
        while len(self._ring) > self._most_requests or (self._bytes > self._most_bytes and len(self._ring) > 1):
            oldest = self._ring.popleft()
            self._bytes -= oldest.bytes
            if self._newest.get((oldest.instance_id, oldest.request_id)) is oldest:
                del self._newest[oldest.instance_id, oldest.request_id]


def _after_fill(lookup: LookupEnded, had: int) -> LookupEnded:
    """The lookup as its fill changed it. `had`: the engine's own tokens and the loaded ones, of a whole prompt all but the last."""
    outcome, block = lookup.outcome, max(1, lookup.block_tokens)
    boundary = min(outcome.chunks, max(outcome.hit_chunks, (had + 1) // lookup.chunk_tokens))
    blocks = -(-max(0, had - boundary * lookup.chunk_tokens) // block)  # behind the last chunk they are looked up again
    return replace(
        lookup, outcome=replace(filled_to(outcome, boundary), tail_blocks=blocks, tail_tokens=blocks * block)
    )


def _evicted_before(request: Request, evicted: Sequence[ChunksEvicted]) -> float | None:
    """Seconds between the eviction of the first missing chunk and the lookup; None if unknown, or not the reason."""
    lookup, missing = request.lookup, request.missing
    if lookup is None or missing is None or missing[1] not in _EVICTED or not lookup.outcome.missing_key:
        return None
    for event in reversed(evicted):
        if event.time_ns <= lookup.time_ns and event.namespace == lookup.namespace:
            at = event.keys.find(lookup.outcome.missing_key)
            if at >= 0 and at % KEY_BYTES == 0:
                return (lookup.time_ns - event.time_ns) * 1e-9
    return None


def _fit(request_id: str, client_id: str) -> bool | None:
    """Match of the client's id with the engine's name for a request.

    True if the name has the client's id whole, False if the name only begins with it, None otherwise.
    """
    begin = match.end() if (match := _SAMPLE.match(request_id)) else 0
    starts = {0, begin}
    if kind := _KIND.match(request_id, begin):
        starts.add(kind.end())
    ends = [start + len(client_id) for start in starts if request_id.startswith(client_id, start)]
    if not ends:
        return None
    return any(_ADDED.fullmatch(request_id, end) for end in ends)
