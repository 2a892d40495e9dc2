"""Reading that `kvserver top` shows: a status, its changes from an earlier one, and data that no status has.

Owns: the reading, whose form `kvserver top --json` prints. Refuses to know: terminals, how statuses are read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from msgspec import Struct

from kvserver.protocol.status import DaemonStatus, InstanceStatus, RequestsStatus, TierStatus

AGES = {  # by what they are of: the metric
    "hit": "kvserver_l1_hit_age_seconds",
    "residency": "kvserver_l1_chunk_residency_seconds",
    "idle_before_evict": "kvserver_l1_chunk_idle_before_evict_seconds",
}
_BUCKET = re.compile(r'^(\w+)_bucket\{(?:.*,)?le="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)


class TierRates(Struct, frozen=True):
    read_bytes: float
    written_bytes: float


class Rates(Struct, frozen=True, kw_only=True):
    """Rates per second between two statuses of one incarnation of the daemon."""

    window_seconds: float
    prompt_tokens: dict[str, float]  # by source
    missed_tokens: dict[str, float]  # by reason
    hit_rate: float | None  # hit tokens over looked-up tokens; None without lookups
    lookups: float
    stored_bytes: float
    loaded_bytes: float
    evicted_chunks: float
    l2: dict[str, TierRates]
    engines: dict[str, float]  # prompt tokens, by instance id


class Reading(Struct, frozen=True, kw_only=True):
    status: DaemonStatus
    rates: Rates | None = None  # None until two statuses are known
    median_age_seconds: dict[str, float] = {}  # of L1, by AGES, since the daemon's start
    worst: list[str] = []  # verdicts of requests that computed most although they need not have


def rates(now: DaemonStatus, before: DaemonStatus) -> Rates | None:
    """Rates between two statuses; None if they are of two incarnations of the daemon, or of one moment."""
    seconds = now.uptime_seconds - before.uptime_seconds
    if now.boot_id != before.boot_id or seconds <= 0:
        return None

    def rate(new: float, old: float) -> float:
        return max(0.0, new - old) / seconds  # what an engine had counted leaves the sums with it

    def each(new: Counter[str], old: Counter[str]) -> dict[str, float]:
        return {name: rate(count, old[name]) for name, count in new.items()}

    totals, old = now.totals, before.totals
    looked_up = totals.lookup_tokens - old.lookup_tokens
    tiers: dict[str, TierStatus] = defaultdict(TierStatus, {tier.name: tier for tier in before.l2})
    return Rates(
        window_seconds=round(seconds, 3),
        prompt_tokens=each(Counter(totals.prompt_tokens), Counter(old.prompt_tokens)),
        missed_tokens=each(missed_tokens(now), missed_tokens(before)),
        hit_rate=(totals.hit_tokens - old.hit_tokens) / looked_up if looked_up > 0 else None,
        lookups=rate(_lookups(now), _lookups(before)),
        stored_bytes=rate(totals.stored_bytes, old.stored_bytes),
        loaded_bytes=rate(totals.loaded_bytes, old.loaded_bytes),
        evicted_chunks=rate(now.l1.evictions, before.l1.evictions),
        l2={
            tier.name: TierRates(
                rate(tier.read_bytes, tiers[tier.name].read_bytes),
                rate(tier.written_bytes, tiers[tier.name].written_bytes),
            )
            for tier in now.l2
        },
        engines=each(_tokens(now.instances), _tokens(before.instances)),
    )


def missed_tokens(status: DaemonStatus) -> Counter[str]:
    """Missed tokens by reason, of the engines that are or were connected in the last minutes."""
    found: Counter[str] = Counter()
    for requests in _requests(status):
        found.update(requests.missed_tokens)
    return found


def _lookups(status: DaemonStatus) -> int:
    return sum(requests.lookups for requests in _requests(status))


def _requests(status: DaemonStatus) -> list[RequestsStatus]:
    return [*(one.requests for one in status.instances), *(one.requests for one in status.departed)]


def _tokens(instances: list[InstanceStatus]) -> Counter[str]:
    reporting = (one for one in instances if one.requests.prompt_tokens is not None)
    return Counter({one.instance_id: sum((one.requests.prompt_tokens or {}).values()) for one in reporting})


def median_ages(metrics: str) -> dict[str, float]:
    """Medians of AGES from the text of /metrics, interpolated linearly within the bucket of the median."""
    counts: dict[str, dict[float, float]] = {name: defaultdict(float) for name in AGES.values()}
    for name, bound, count in _BUCKET.findall(metrics):
        if name in counts:
            counts[name][float(bound)] += float(count)
    medians = {of: _median(counts[name]) for of, name in AGES.items()}
    return {of: median for of, median in medians.items() if median is not None}


def _median(cumulative: dict[float, float]) -> float | None:
    """Median of a cumulative histogram: None without observations, the last bound if it is beyond all bounds."""
    half = max(cumulative.values(), default=0.0) / 2
    lower = below = 0.0
    for bound, count in sorted(cumulative.items()) if half else ():
        if count >= half:
            return lower if bound == float("inf") else lower + (bound - lower) * (half - below) / (count - below)
        lower, below = bound, count
    return None
