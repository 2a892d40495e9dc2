"""What `kvserver top` shows, as numbers: of one status, and of what has changed since an earlier one.

Owns: the view, whose form `kvserver top --json` prints. Refuses to know: terminals, how statuses are read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from msgspec import UNSET, Struct

from kvserver.protocol.status import DaemonStatus, DepartedStatus, InstanceStatus, RequestsStatus, TierStatus

SOURCES = ("l0", "l1", "l2", "computed")
AGES = {  # by what they are of: the metric
    "hit": "kvserver_l1_hit_age_seconds",
    "residency": "kvserver_l1_chunk_residency_seconds",
    "idle_before_evict": "kvserver_l1_chunk_idle_before_evict_seconds",
}
_BUCKET = re.compile(r'^(\w+)_bucket\{(?:.*,)?le="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)


class Amount(Struct, frozen=True, kw_only=True):
    """Of prompt tokens from one source, or of missed tokens for one reason."""

    name: str
    tokens: int  # since the daemon's start, of engines that it still lists
    share: float | None
    per_second: float | None  # None until two statuses are known
    recent_share: float | None


class L1View(Struct, frozen=True, kw_only=True):
    used_bytes: int
    size_bytes: int
    chunks: int
    evicted_chunks: int
    evicted_per_second: float | None
    policy: str
    median_ages: dict[str, float | None]  # seconds, by AGES, since the daemon's start


class TierView(Struct, frozen=True, kw_only=True):
    name: str
    state: str
    failure: str
    used_bytes: int
    size_bytes: int
    objects: int
    queue_bytes: int
    evicted_objects: int
    hits: int
    failed: int  # reads
    read_bytes_per_second: float | None
    written_bytes_per_second: float | None


class EngineView(Struct, frozen=True, kw_only=True):
    instance_id: str
    model_name: str
    state: str  # on, private, waiting, refused or left
    reason: str  # why it runs without cache, or alone
    ranks: str = ""
    running: int | None = None
    waiting: int | None = None
    prompt_tokens_per_second: float | None = None
    prompt_tokens: int = 0
    shares: dict[str, float] = {}  # of its prompt tokens, by source
    stored_bytes: int = 0
    loaded_bytes: int = 0
    failed: int = 0
    seen_seconds: float = 0.0


class TopView(Struct, frozen=True, kw_only=True):
    version: str
    boot_id: str
    ready: bool
    uptime_seconds: float
    stale_seconds: float | None  # since the daemon's loop answered
    window_seconds: float  # that rates are of; 0 until two statuses are known
    prompt_tokens: list[Amount]
    prompt_tokens_per_second: float | None
    hit_rate: float | None  # hit tokens over looked-up tokens, since the daemon's start
    recent_hit_rate: float | None
    lookups_per_second: float | None
    missed: list[Amount]
    l1: L1View
    l2: list[TierView]
    stored_bytes_per_second: float | None
    loaded_bytes_per_second: float | None
    failed_stores: int
    failed_loads: int
    errors: int
    events_dropped: int
    loop_lag_seconds: float
    unbalanced_audits: int
    engines: list[EngineView]
    worst: list[str]  # verdicts of requests that computed most although they need not have


class Beside(Struct, frozen=True):
    """What no status has."""

    median_ages: dict[str, float | None] = {}
    worst: list[str] = []


class _Change:
    """Differences between two statuses of one incarnation of the daemon; none without an earlier one."""

    def __init__(self, now: DaemonStatus, before: DaemonStatus | None) -> None:
        fits = before is not None and before.boot_id == now.boot_id and before.uptime_seconds < now.uptime_seconds
        self.before = before if fits else None
        self.seconds = now.uptime_seconds - self.before.uptime_seconds if self.before is not None else 0.0

    def per_second(self, now: float, before: float) -> float | None:
        return max(0.0, now - before) / self.seconds if self.seconds else None


def make_view(status: DaemonStatus, before: DaemonStatus | None, beside: Beside) -> TopView:
    """`before`: an earlier status, perhaps of another incarnation of the daemon."""
    change = _Change(status, before)
    old = change.before or DaemonStatus()
    totals, then = status.totals, old.totals
    prompts = _amounts(change, SOURCES, Counter(totals.prompt_tokens), Counter(then.prompt_tokens))
    rates = [amount.per_second for amount in prompts if amount.per_second is not None]
    missed, missed_then = (_missed(_requests(one)) for one in (status, old))
    return TopView(
        version=status.version,
        boot_id=status.boot_id,
        ready=status.ready,
        uptime_seconds=status.uptime_seconds,
        stale_seconds=None if status.stale_seconds is UNSET else status.stale_seconds,
        window_seconds=round(change.seconds, 3),
        prompt_tokens=prompts,
        prompt_tokens_per_second=sum(rates) if rates else None,
        hit_rate=_share(totals.hit_tokens, totals.lookup_tokens),
        recent_hit_rate=_share(totals.hit_tokens - then.hit_tokens, totals.lookup_tokens - then.lookup_tokens)
        if change.seconds
        else None,
        lookups_per_second=change.per_second(_lookups(status), _lookups(old)),
        missed=sorted(_amounts(change, missed, missed, missed_then), key=lambda amount: -amount.tokens),
        l1=_l1(status, old, change, beside),
        l2=[_tier(tier, old.l2, change) for tier in status.l2],
        stored_bytes_per_second=change.per_second(totals.stored_bytes, then.stored_bytes),
        loaded_bytes_per_second=change.per_second(totals.loaded_bytes, then.loaded_bytes),
        failed_stores=totals.failed_stores,
        failed_loads=totals.failed_loads,
        errors=totals.errors,
        events_dropped=status.events.dropped,
        loop_lag_seconds=status.loop_lag_seconds,
        unbalanced_audits=status.books.unbalanced,
        engines=_engines(status, old, change),
        worst=beside.worst,
    )


def median_ages(metrics: str) -> dict[str, float | None]:
    """By AGES, of the text of /metrics: within the bucket in which the median is, as if all its values were equally far apart."""
    counts: dict[str, Counter[float]] = {name: Counter() for name in AGES.values()}
    for name, bound, count in _BUCKET.findall(metrics):
        if name in counts:
            counts[name][float(bound)] += float(count)  # type: ignore[assignment]
    return {of: _median(counts[name]) for of, name in AGES.items()}


def _median(cumulative: Counter[float]) -> float | None:
    """None without observations. Of values beyond all bounds the last bound."""
    total = max(cumulative.values(), default=0)
    lower = below = 0.0
    for bound, count in sorted(cumulative.items()):
        if total and count >= total / 2:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (total / 2 - below) / (count - below) if count > below else bound
        lower, below = bound, count
    return None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _amounts(change: _Change, names: Iterable[str], now: Counter[str], then: Counter[str]) -> list[Amount]:
    grown = {name: max(0, now[name] - then[name]) for name in names}
    return [
        Amount(
            name=name,
            tokens=now[name],
            share=_share(now[name], now.total()),
            per_second=change.per_second(grown[name], 0),
            recent_share=_share(grown[name], sum(grown.values())) if change.seconds else None,
        )
        for name in grown
    ]


def _listed(status: DaemonStatus) -> list[InstanceStatus | DepartedStatus]:
    return [*status.instances, *status.departed]


def _requests(status: DaemonStatus) -> list[RequestsStatus]:
    return [one.requests for one in _listed(status)]


def _missed(requests: list[RequestsStatus]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in requests:
        found.update(one.missed_tokens)
    return found


def _lookups(status: DaemonStatus) -> int:
    return sum(one.lookups for one in _requests(status))


def _l1(status: DaemonStatus, old: DaemonStatus, change: _Change, beside: Beside) -> L1View:
    l1 = status.l1
    return L1View(
        used_bytes=l1.used_bytes,
        size_bytes=l1.size_bytes,
        chunks=l1.chunks,
        evicted_chunks=l1.evictions,
        evicted_per_second=change.per_second(l1.evictions, old.l1.evictions),
        policy=l1.policy,
        median_ages=beside.median_ages,
    )


def _tier(tier: TierStatus, before: list[TierStatus], change: _Change) -> TierView:
    then = next((one for one in before if one.name == tier.name), TierStatus())
    return TierView(
        name=tier.name,
        state=tier.state,
        failure=tier.failure,
        used_bytes=tier.used_bytes,
        size_bytes=tier.size_bytes,
        objects=tier.objects,
        queue_bytes=tier.queue_bytes,
        evicted_objects=tier.evictions,
        hits=tier.hits,
        failed=tier.corrupt + tier.timeouts + tier.errors,
        read_bytes_per_second=change.per_second(tier.read_bytes, then.read_bytes),
        written_bytes_per_second=change.per_second(tier.written_bytes, then.written_bytes),
    )


def _engines(status: DaemonStatus, old: DaemonStatus, change: _Change) -> list[EngineView]:
    then = {(one.instance_id, one.model_name): one.requests for one in _listed(old)}
    found = [
        EngineView(instance_id=one.instance_id, model_name=one.model_name, state="refused", reason=f"{one.code}: {one.message}")
        for one in status.refused_engines
    ]  # fmt: skip
    for one in status.instances:
        requests, before = one.requests, then.get((one.instance_id, one.model_name), RequestsStatus())
        total = sum(requests.prompt_tokens.values())
        stats = None if one.load is None or one.load.stale else one.load
        state, reason = _state(one)
        found.append(
            EngineView(
                instance_id=one.instance_id,
                model_name=one.model_name,
                state=state,
                reason=reason,
                ranks=f"{len(one.workers)}/{one.world_size}",
                running=stats.running if stats is not None else None,
                waiting=stats.waiting if stats is not None else None,
                prompt_tokens_per_second=change.per_second(total, sum(before.prompt_tokens.values())),
                prompt_tokens=total,
                shares={source: requests.prompt_tokens.get(source, 0) / total for source in SOURCES} if total else {},
                stored_bytes=requests.stored_bytes,
                loaded_bytes=requests.loaded_bytes,
                failed=requests.failed_stores + requests.failed_loads,
                seen_seconds=max((worker.last_seen_seconds for worker in one.workers), default=0.0),
            )
        )
    found += [
        EngineView(instance_id=one.instance_id, model_name=one.model_name, state="left", reason="", seen_seconds=one.gone_seconds)
        for one in status.departed
    ]  # fmt: skip
    return found


def _state(one: InstanceStatus) -> tuple[str, str]:
    if not one.namespace:
        return (
            "waiting",
            f"{len(one.workers)} of {one.world_size} ranks are registered: no cache until all are, and agree",
        )
    if one.private:
        return "private", f"shares KV with no other engine: {one.private}"
    return "on", ""
