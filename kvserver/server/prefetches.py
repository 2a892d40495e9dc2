"""Prefetches as an operator or a router sees them: which prompts L1 gets from L2, and when they will be there.

Owns: the outcome of a request for a prefetch, and the report. Refuses to know: HTTP, how tokens become keys (`routing`), how a prefetch is
filled and what ends it (`tiering`). Runs in the loop's thread.
"""

from __future__ import annotations

from msgspec import Struct

from kvserver.server.pins import MOST_CHUNKS, PinReport, PinRequest, rejected
from kvserver.server.upkeep import Upkeep
from kvserver.tiering import MOST_PREFETCHES, Prefetch, Prefetches


class PrefetchesReport(Struct, frozen=True):
    """Prefetches that have not ended, the oldest first."""

    prefetches: list[PinReport]


class PrefetchReports:
    """The reports are those of pins. Tokens: that L1 will have when it is ready. Bytes: that are read from L2 for it."""

    def __init__(self, upkeep: Upkeep) -> None:
        self._upkeep = upkeep

    @property
    def _prefetches(self) -> Prefetches:
        return self._upkeep.prefetches

    def begin(self, request: PinRequest) -> PinReport:
        report = self._begin(request)
        self._prefetches.requested[report.outcome] += 1
        return report

    def reject(self, code: str, text: str) -> PinReport:
        """Count a request that names no prompt of one namespace."""
        self._prefetches.requested["rejected"] += 1
        return rejected(code, text)

    def _begin(self, request: PinRequest) -> PinReport:
        if not self._upkeep.storage.tiers.all:
            return rejected("off", "there is no --l2")
        if len(self._prefetches.live) >= MOST_PREFETCHES:
            return rejected("too_many", f"there are {MOST_PREFETCHES} prefetches; delete one")
        if request.chunks > MOST_CHUNKS:
            return rejected(
                "too_large", f"the prompt has {request.chunks} chunks, and a prefetch at most {MOST_CHUNKS}"
            )
        instance = self._prefetches.reader(request.namespace)
        if instance is None or instance.description is None:
            return rejected("no_engine", "the engine has disconnected, or not all of its ranks are registered")
        keys = request.chunk_keys(0, request.chunks)
        prefetch = self._prefetches.begin(
            instance,
            request.namespace,
            keys,
            instance.description.durability,
            request.ttl_seconds,
            tenant=request.tenant,
        )
        report = self._report(prefetch)
        if report.outcome in ("missing", "rejected"):
            self._prefetches.end(prefetch)
            return PinReport(outcome=report.outcome, reason=report.reason)
        return report

    def all(self) -> PrefetchesReport:
        return PrefetchesReport([self._report(each) for each in self._prefetches.live.values()])

    def delete(self, id: str) -> PinReport:
        prefetch = self._prefetches.live.get(id)
        if prefetch is None:
            return PinReport(
                id=id, outcome="missing", reason="unknown: no prefetch has this id; it ended, or never was"
            )
        self._prefetches.end(prefetch)
        return PinReport(id=id, outcome="accepted", model_name=prefetch.model_name)

    def _report(self, prefetch: Prefetch) -> PinReport:
        fill, chunks = prefetch.fill, prefetch.leased_chunks
        if fill is not None and prefetch.reads:
            chunks = max(chunks, fill.chunks)
        outcome, reason = _outcome(prefetch, chunks)
        return PinReport(
            id=prefetch.id, outcome=outcome, tokens=chunks * prefetch.chunk_tokens, bytes=fill.bytes if fill is not None else 0,
            tiers=["l1"] * bool(prefetch.leased_chunks) + ["l2"] * prefetch.reads, expires_at=round(prefetch.expires_at, 3),
            ready_in_seconds=prefetch.ready_in(self._upkeep.clock()), reason=reason, owner="operator", model_name=prefetch.model_name,
        )  # fmt: skip


def _outcome(prefetch: Prefetch, chunks: int) -> tuple[str, str]:
    """The outcome, and the reason for one that is not all of the prompt."""
    fill = prefetch.fill
    if fill is not None and not (fill.planned or fill.ended):
        return "deferred", "asking: a shared tier of L2 is asked what it has"
    if chunks == prefetch.chunks and chunks:
        return "accepted", ""
    if fill is not None and fill.clipped:
        return (
            "clipped" if chunks else "rejected"
        ), "no_room: requests and other prefetches use the room that L1 has for fills"
    if chunks:
        return "clipped", f"not_cached: {prefetch.chunks - chunks} chunks at its end are not there"
    return "missing", "not_cached: neither L1 nor L2 has its first chunk; a prompt of a LoRA is not prefetched"
