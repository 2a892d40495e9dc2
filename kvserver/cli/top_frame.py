"""A view of `kvserver top` as lines for a terminal.

Owns: the text, its order and its styles. Refuses to know: the terminal, where the numbers come from. Everything is readable
without colours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from kvserver.cli.screen import Line, Span
from kvserver.cli.status import bar, duration, size
from kvserver.cli.terminal import padded, plain, width_of
from kvserver.cli.top_view import Amount, EngineView, TierView, TopView

_HEAD = 12  # columns of the words on the left
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.:-=+*#"
_NAMES = {"l0": "L0", "l1": "L1", "l2": "L2"}
_STATES = {"on": "good", "private": "warn", "waiting": "bad", "refused": "bad", "left": "dim"}
_AGES = {"hit": "hits are {} old", "residency": "evicted after {}", "idle_before_evict": "{} of them unused"}
_HEADS = (
    "engine",
    "model",
    "state",
    "ranks",
    "run",
    "wait",
    "tokens/s",
    "L0",
    "L1",
    "L2",
    "computed",
    "failed",
    "seen",
)
_WORDS = 3  # columns of the heads that are words
_MOST_NAME = 32


def frame(view: TopView, histories: dict[str, Sequence[float]] | None = None) -> list[Line]:
    """`histories`: the recent values of "tokens" (a second) and "hit_rate", the newest last."""
    past = histories or {}
    return [
        _title(view),
        *_trouble(view),
        [],
        *_prompts(view, past.get("tokens", ())),
        *_lookups(view, past.get("hit_rate", ())),
        [],
        *_l1(view),
        *(line for tier in view.l2 for line in _tier(tier)),
        _moved(view),
        [],
        *_engines(view.engines),
        *_worst(view.worst),
    ]


def number(count: float | None) -> str:
    """Three digits or so; "-" for what is not known."""
    if count is None:
        return "-"
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if count >= factor:
            return f"{count / (1e3 if unit == 'k' else factor):.1f}{unit}"
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.1f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def sparkline(values: Sequence[float], most: int = 40, highest: float = 0.0) -> str:
    """One character a value; `highest` is the whole height, by default the greatest value."""
    steps = _BARS if (sys.stdout.encoding or "").lower().replace("-", "") == "utf8" else _PLAIN_BARS
    values = list(values)[-most:]
    top = highest or max(values, default=0.0) or 1.0
    return "".join(steps[min(len(steps) - 1, int(value / top * len(steps)))] for value in values)


def _head(words: str, *rest: Span, style: str = "bold") -> Line:
    return [(padded(words, _HEAD), style), *rest]


def _rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else f"{size(bytes_per_second)}/s"


def _title(view: TopView) -> Line:
    ready: Span = ("ready", "good") if view.ready else ("NOT READY", "bad")
    window = f"  rates of the last {view.window_seconds:.0f} s" if view.window_seconds >= 0.5 else ""
    return [
        (f"kvserver {plain(view.version)}  ", "bold"),
        ready,
        (f"  up {duration(view.uptime_seconds)}  boot {plain(view.boot_id)}", ""),
        (window, "dim"),
    ]


def _trouble(view: TopView) -> Iterator[Line]:
    if view.stale_seconds is not None:
        text = f"the event loop has not answered for {view.stale_seconds:.1f} s; this is its last status"
        yield [("STALE  ", "bad"), (text, "")]
    if view.unbalanced_audits:
        yield [
            ("AUDIT  ", "bad"),
            (f"the accounting did not balance in {view.unbalanced_audits} audits: report it", ""),
        ]


def _prompts(view: TopView, history: Sequence[float]) -> Iterator[Line]:
    recent = view.prompt_tokens_per_second
    total = sum(amount.tokens for amount in view.prompt_tokens)
    text = f"{number(recent)} tokens/s, {number(total)} since the start" if total else "no tokens reported yet"
    yield _head("PROMPTS", (text, ""), ("  " + sparkline(history), "note"))
    for amount in view.prompt_tokens if total else ():
        yield _amount(_NAMES.get(amount.name, amount.name), amount, bool(recent))


def _amount(name: str, amount: Amount, recent: bool) -> Line:
    share = amount.recent_share if recent else amount.share
    when = f"{percent(amount.recent_share):>7}  {number(amount.per_second):>8}/s" if recent else " " * 18
    return _head(
        f"  {name}",
        (f"{bar(share or 0.0, 1)} {when}   ", ""),
        (f"since the start {percent(amount.share)}", "dim"),
        style="",
    )


def _lookups(view: TopView, history: Sequence[float]) -> Iterator[Line]:
    text = f"{percent(view.recent_hit_rate)} of looked-up tokens, {percent(view.hit_rate)} since the start; {number(view.lookups_per_second)} lookups/s"
    yield _head("HIT RATE", (text, ""), ("  " + sparkline(history, highest=1.0), "note"))
    missed = [amount for amount in view.missed if amount.tokens]
    if missed:
        parts = [
            f"{amount.name} {percent(amount.share)}"
            + (f" ({number(amount.per_second)}/s)" if amount.per_second else "")
            for amount in missed
        ]
        yield _head("MISSES", (f"tokens by reason: {', '.join(map(plain, parts))}", ""))


def _l1(view: TopView) -> Iterator[Line]:
    l1 = view.l1
    evicted = f"{number(l1.evicted_chunks)} evicted" + (
        f" ({number(l1.evicted_per_second)}/s)" if l1.evicted_per_second else ""
    )
    text = f"{bar(l1.used_bytes, l1.size_bytes)} {size(l1.used_bytes)} of {size(l1.size_bytes)}, {number(l1.chunks)} chunks, {evicted}"
    yield _head("L1", (text, ""))
    ages = [
        _AGES[of].format(duration(age) if age >= 1 else f"{age:.2g} s")
        for of, age in l1.median_ages.items()
        if age is not None
    ]
    if ages:
        yield _head("  ages", (", ".join(ages) + " (medians)", ""), style="")


def _tier(tier: TierView) -> Iterator[Line]:
    name = f"L2 {plain(tier.name)}"
    if tier.state not in ("ready", "read_only"):
        failure = f": {plain(tier.failure)}" if tier.failure else ""
        yield _head(name, (f"is {tier.state.upper()}", "bad"), (failure, ""))
        return
    used = (
        f"{bar(tier.used_bytes, tier.size_bytes)} {size(tier.used_bytes)} of {size(tier.size_bytes)}, "
        if tier.size_bytes
        else ""
    )
    only = "read only, " if tier.state == "read_only" else ""
    text = (
        f"{used}{only}{number(tier.objects)} objects, {number(tier.evicted_objects)} evicted; read {_rate(tier.read_bytes_per_second)}, "
        f"written {_rate(tier.written_bytes_per_second)}, {size(tier.queue_bytes)} queued"
    )
    yield _head(name, (text, ""), (f", {tier.failed} reads failed" if tier.failed else "", "warn"))


def _moved(view: TopView) -> Line:
    failed = view.failed_stores + view.failed_loads + view.errors + view.events_dropped
    return _head(
        "COPIES",
        (f"stored {_rate(view.stored_bytes_per_second)}, loaded {_rate(view.loaded_bytes_per_second)}; ", ""),
        (
            f"failed: {view.failed_stores} stores, {view.failed_loads} loads; {view.errors} errors, {view.events_dropped} events dropped",
            "warn" if failed else "",
        ),
        (f"; loop lag {view.loop_lag_seconds * 1000:.1f} ms", ""),
    )


def _engines(engines: Sequence[EngineView]) -> Iterator[Line]:
    if not engines:
        yield [("no engine is connected", "")]
        return
    rows = [_row(engine) for engine in engines]
    widths = [max(width_of(row[at]) for row in (_HEADS, *rows)) for at in range(len(_HEADS))]
    yield [
        (
            "  ".join(
                padded(head, width, at >= _WORDS) for at, (head, width) in enumerate(zip(_HEADS, widths, strict=True))
            ),
            "bold",
        )
    ]
    for engine, row in zip(engines, rows, strict=True):
        cells = [padded(cell, width, at >= _WORDS) for at, (cell, width) in enumerate(zip(row, widths, strict=True))]
        yield [("  ".join(cells[:2]) + "  ", ""), (cells[2], _STATES[engine.state]), ("  " + "  ".join(cells[3:]), "")]
        if engine.reason:
            without = "runs without cache: " if engine.state in ("waiting", "refused") else ""
            yield [("    -> ", "warn"), (without + plain(engine.reason), "")]


def _row(engine: EngineView) -> tuple[str, ...]:
    shares = [percent(engine.shares.get(source)) for source in ("l0", "l1", "l2", "computed")]
    shown = (
        "NO CACHE" if engine.state == "refused" else engine.state.upper() if engine.state == "waiting" else engine.state
    )
    return (
        padded(plain(engine.instance_id), min(_MOST_NAME, width_of(plain(engine.instance_id)))),
        padded(plain(engine.model_name), min(_MOST_NAME, width_of(plain(engine.model_name)))),
        shown,
        engine.ranks or "-",
        number(engine.running),
        number(engine.waiting),
        number(engine.prompt_tokens_per_second),
        *shares,
        str(engine.failed),
        f"{duration(engine.seen_seconds)} ago" if engine.state != "refused" else "-",
    )


def _worst(verdicts: Sequence[str]) -> Iterator[Line]:
    if verdicts:
        yield []
        yield [("worst requests of the last minutes (kvserver explain)", "bold")]
        yield from ([("  " + plain(verdict), "")] for verdict in verdicts)
