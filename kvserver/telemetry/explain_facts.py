"""Facts of one request: tokens by tier, the first missing chunk, the outcome.

Tokens:
- `l2` are those that were read from L2 into L1 for the request and then loaded, `l1` the other loaded ones.
- `computed` is None while the engine has not reported the request's end, or where its adapter is too old to report tokens. Then
  `l1` is what loads copied and `l0` is None.
- `avoidable` counts the computed tokens that were in L1, are in L1 for others or had been there. These are the tokens found and
  not loaded, and the missed ones except those never stored. The prompt's last token never counts: engines compute it in any case.

An engine may be wrong about its prompt, and a preempted request looks up its answer, too. So looked up tokens count up to the
prompt's end.

Owns: the record of a request, and what `/explain` and spans show of it. Refuses to know: how many are remembered (`explain`),
sentences (`explain_text`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from kvserver.cache import MissReason
from kvserver.events import LookupEnded, RequestEnded
from kvserver.telemetry.differences import Difference

MOST_RANKS = 64  # whose loads are listed for one request
OUTCOMES = {
    "hit": "every whole chunk was in the engine's own memory or was loaded",
    "partial": "a part of the chunks was",
    "miss": "none was",
    "load_failed": "a load of what was found failed",
    "not_loaded": "the engine loaded nothing of what was found",
    "found": "found in L1; the engine does not report what became of it",
    "no_lookup": "no lookup of the request is known",
    "running": "the engine has not reported its end",
    "instance_died": "the engine's connection ended before it reported the request's end",
    "instance_left": "the engine unregistered before it reported the request's end",
}
_DONE = "done"
_NEW = (MissReason.NEVER_STORED.value, MissReason.PARTIAL_CHUNK.value)  # reasons of tokens that L1 never had
_SHORT = 16  # of a namespace in hex


class Tokens(TypedDict):
    prompt: int
    looked_up: int  # whole chunks, and the single blocks that were found behind the last one
    found: int  # in L1, or read from L2 in time, from the first on without a hole
    l0: int | None  # that the engine had itself
    l1: int
    l2: int
    computed: int | None
    avoidable: int


class Missing(TypedDict):
    chunk: int  # from 0
    token: int
    reason: str
    evicted_seconds_before: float | None  # the lookup; None if that is not known, or not the reason


class Load(TypedDict):
    rank: int
    loads: int
    seconds: float
    queue_seconds: float
    copy_seconds: float
    bytes: int
    outcome: str  # "done", "running", or the code of its failure


class Waits(TypedDict):
    lookups: int  # more than one: the request waited, and was looked up again
    first_lookup_to_load_seconds: float | None
    load_seconds: float | None  # of the slowest rank
    load_queue_seconds: float | None
    load_copy_seconds: float | None


class Facts(TypedDict):
    request_id: str
    instance_id: str
    model_name: str
    age_seconds: float  # since its first lookup
    outcome: str  # one of OUTCOMES
    failure: str  # code of the load that failed
    not_loaded: str  # the engine's code for why it loaded nothing; "" if it loaded, or does not know
    tokens: Tokens
    handed_over: int  # tokens that the engine which computed them had promised to store
    chunk_tokens: int
    missing: Missing | None
    missed_tokens: dict[str, int]  # by reason
    unavailable: str
    namespace: str
    differs: Difference | None
    waits: Waits
    loads: list[Load]
    unlisted_loads: int
    block_tokens: int  # the fewest that the engine could store; 0 if that is not known
    tails: bool  # it stores single blocks behind the last whole chunk
    engine: str  # which engine and version it is; "" if that is not known
    ends_unreported: bool  # the engine reports no ends of requests: l0 and computed stay None


@dataclass(slots=True)
class RankLoad:
    """Loads of one rank for one request."""

    rank: int
    began: int = 0
    nanos: int = 0
    copy_nanos: int = 0
    bytes: int = 0
    chunks: int = 0
    outcome: str = "running"

    def ended(self, nanos: int, copy_nanos: int, copied_bytes: int, chunks: int, outcome: str) -> None:
        self.nanos += nanos
        self.copy_nanos += copy_nanos
        self.bytes += copied_bytes
        self.chunks += chunks if outcome == _DONE else 0
        self.outcome = outcome if self.outcome in ("running", _DONE) else self.outcome

    def shown(self) -> Load:
        copy = min(self.copy_nanos, self.nanos)
        assert 0 <= copy <= self.nanos, f"{copy} of {self.nanos} ns"
        return Load(
            rank=self.rank,
            loads=self.began,
            seconds=self.nanos * 1e-9,
            queue_seconds=(self.nanos - copy) * 1e-9,
            copy_seconds=copy * 1e-9,
            bytes=self.bytes,
            outcome=self.outcome,
        )


@dataclass(slots=True)
class Request:
    instance_id: str
    model_name: str
    request_id: str
    began_ns: int
    bytes: int = 0  # of memory, about
    lookup: LookupEnded | None = None  # the last one
    lookups: int = 0
    load_began_ns: int = 0  # of the first rank's first load
    loads: dict[int, RankLoad] = field(default_factory=dict)  # by rank
    unlisted_loads: int = 0  # of ranks beyond MOST_RANKS
    ended: RequestEnded | None = None
    departure: str = ""  # how its instance disconnected while the request ran: "died" or "left"
    chunk_tokens: int = 0
    block_tokens: int = 0  # the fewest that the engine could store; 0 if that is not known
    tails: bool = False
    engine: str = ""
    ends_unreported: bool = False  # the engine reports no ends of requests

    @property
    def missing(self) -> tuple[int, MissReason] | None:
        """Number of the first missing chunk, and its reason."""
        reason = next(iter(self.missed_tokens()), None)
        if reason is None:
            return None
        return self.lookup.hit_tokens // self.chunk_tokens if self.lookup is not None else 0, MissReason(reason)

    @property
    def prompt_tokens(self) -> int:
        reported = self.ended.prompt_tokens if self.ended is not None else 0
        if reported or self.lookup is None:
            return reported
        return self.lookup.prompt_tokens or self.lookup.tokens

    @property
    def failure(self) -> str:
        """The code of a failed load; "" if none failed."""
        codes = (load.outcome for load in tuple(self.loads.values()) if load.outcome not in ("running", _DONE))
        reported = self.ended is not None and self.ended.failed_loads > 0
        return next(codes, "failed" if reported else "")

    def missed_tokens(self) -> dict[str, int]:
        """Missed tokens by reason, that of the first missing token first. Together with the found ones they are the whole prompt."""
        lookup, prompt = self.lookup, self.prompt_tokens
        if lookup is None:
            least = self.block_tokens if self.tails else self.chunk_tokens
            return {MissReason.PARTIAL_CHUNK.value: prompt} if 0 < prompt < least else {}
        left = prompt - min(lookup.hit_tokens, prompt)
        missed = {}
        for reason, tokens in lookup.outcome.missed_tokens(lookup.chunk_tokens, prompt).items():
            if within := min(tokens, left):
                missed[reason.value] = within
                left -= within
        assert left == 0, f"{missed} of {prompt}, {left} left"
        return missed

    def tokens(self) -> Tokens:
        lookup, ended, prompt = self.lookup, self.ended, self.prompt_tokens
        looked_up = min(lookup.tokens, prompt) if lookup is not None else 0
        found = min(lookup.hit_tokens, prompt) if lookup is not None else 0
        if ended is not None and ended.prompt_tokens:
            l0: int | None = ended.local_tokens
            l2 = min(ended.filled_tokens, ended.loaded_tokens)
            l1 = ended.loaded_tokens - l2
            had = ended.local_tokens + ended.loaded_tokens
            computed: int | None = prompt - had
        else:
            l0, l2, computed = None, 0, None
            copied = max((load.chunks for load in tuple(self.loads.values())), default=0) * self.chunk_tokens
            l1 = had = min(copied, prompt)
        stored_once = sum(tokens for reason, tokens in self.missed_tokens().items() if reason not in _NEW)
        avoidable = min(stored_once, max(0, looked_up - max(found, l0 or 0)))
        if computed is not None:
            avoidable = min(max(0, computed - 1), avoidable + max(0, min(found, prompt - 1) - had))
        tokens = Tokens(
            prompt=prompt, looked_up=looked_up, found=found, l0=l0, l1=l1, l2=l2, computed=computed, avoidable=avoidable
        )
        _check(tokens)
        return tokens

    def outcome(self, tokens: Tokens) -> str:
        """Outcome of the request, one of OUTCOMES."""
        if self.failure:
            return "load_failed"
        if self.ended is None and not self.ends_unreported:
            return f"instance_{self.departure}" if self.departure else "running"
        if self.lookup is None:
            return "no_lookup"
        usable, l0, loaded = min(tokens["found"], tokens["prompt"] - 1), tokens["l0"], tokens["l1"] + tokens["l2"]
        if l0 is None:
            if not tokens["found"]:
                return "miss"
            if not loaded:
                return "found"
        elif usable > l0 and not loaded:
            return "not_loaded"
        had = (l0 or 0) + loaded
        if had >= min(tokens["looked_up"], tokens["prompt"] - 1):
            return "hit"
        return "partial" if had else "miss"


def _check(tokens: Tokens) -> None:
    """Assert 0 <= part <= whole of each count. REQUIRES: what RequestEnded promises of the engine's tokens."""
    prompt, l0, computed = tokens["prompt"], tokens["l0"], tokens["computed"]
    assert 0 <= tokens["found"] <= tokens["looked_up"] <= prompt, tokens
    assert min(l0 or 0, tokens["l1"], tokens["l2"], computed or 0) >= 0, tokens
    had = (l0 or 0) + tokens["l1"] + tokens["l2"]
    assert had <= prompt if computed is None else had + computed == prompt, tokens
    assert 0 <= tokens["avoidable"] <= (prompt if computed is None else computed), tokens


def facts_of(
    request: Request, now_ns: int, evicted_before: float | None = None, differs: Difference | None = None
) -> Facts:
    """`evicted_before`: how long before its lookup the first missing chunk was evicted."""
    tokens, lookup = request.tokens(), request.lookup
    waited = max(0, request.load_began_ns - request.began_ns)  # of a request that was known by its end alone, 0
    first_missing = None
    if request.missing is not None:
        chunk, reason = request.missing
        token = tokens["found"]
        assert 0 <= token < tokens["prompt"], tokens
        assert evicted_before is None or evicted_before >= 0, evicted_before
        first_missing = Missing(chunk=chunk, token=token, reason=reason.value, evicted_seconds_before=evicted_before)
    slowest = max(request.loads.values(), key=lambda load: load.nanos, default=None)
    timed = slowest.shown() if slowest is not None and slowest.nanos else None
    return Facts(
        request_id=request.request_id,
        instance_id=request.instance_id,
        model_name=request.model_name,
        age_seconds=round((now_ns - request.began_ns) * 1e-9, 3),
        outcome=request.outcome(tokens),
        failure=request.failure,
        not_loaded=request.ended.not_loaded if request.ended is not None else "",
        tokens=tokens,
        handed_over=lookup.handed_over_tokens if lookup is not None else 0,
        chunk_tokens=request.chunk_tokens,
        missing=first_missing,
        missed_tokens=request.missed_tokens(),
        unavailable=lookup.outcome.unavailable if lookup is not None else "",
        namespace=lookup.namespace.hex()[:_SHORT] if lookup is not None else "",
        differs=differs,
        waits=Waits(
            lookups=request.lookups,
            first_lookup_to_load_seconds=waited * 1e-9 if request.load_began_ns else None,
            load_seconds=timed["seconds"] if timed else None,
            load_queue_seconds=timed["queue_seconds"] if timed else None,
            load_copy_seconds=timed["copy_seconds"] if timed else None,
        ),
        loads=[load.shown() for _, load in sorted(request.loads.items())],
        unlisted_loads=request.unlisted_loads,
        block_tokens=request.block_tokens,
        tails=request.tails,
        engine=request.engine,
        ends_unreported=request.ends_unreported and request.ended is None,
    )
