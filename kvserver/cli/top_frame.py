"""A reading of `kvserver top` for a terminal.

Owns: the text, its order and its styles. Refuses to know: where the numbers come from. Everything is readable without colours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from kvserver.cli.status import SERVING, bar, duration, kind, not_reported, rate, size, tier_line, what_if
from kvserver.cli.terminal import plain
from kvserver.cli.top_view import Rates, Reading, missed_tokens
from kvserver.protocol.status import DaemonStatus, InstanceStatus

_HEAD = 10  # columns of the words on the left
_STEPS = "▁▂▃▄▅▆▇█"
_NAMES = {"l0": "L0", "l1": "L1", "l2": "L2", "computed": "computed"}
_AGES = {"hit": "hits are {} old", "residency": "evicted after {}", "idle_before_evict": "{} of them unused"}
_STYLES = {
    r"^[A-Z][A-Z0-9 ]+\b|^engine  .*": "bold",
    r"NOT READY|^STALE|^AUDIT|is [A-Z]{4,}|NO CACHE|  WAITING  |runs without cache": "bold red",
    r"  private  |shares KV with no other": "yellow",
    r"(?<=  )(ready|on)(?=  )": "green",
}
_WORDS = ("engine", "model", "kind", "state", "ranks")
_MOST_NAME = 32  # cells
_NUMBERS = ("run", "wait", "tokens/s", *_NAMES.values(), "failed", "seen")


def frame(reading: Reading, tokens: Sequence[float] = (), hits: Sequence[float] = (), keys: str = "") -> list[Text]:
    """`tokens` a second and `hits`, the hit rate, are the last values of each, the newest last. `keys`: what they do."""
    status, rates = reading.status, reading.rates
    lines = [
        _title(status, rates, keys),
        *_trouble(status),
        "",
        *_prompts(status, rates, tokens),
        _hit_rate(status, rates, hits),
        *_misses(status, rates),
        "",
        _l1(status, rates),
        *_ages(reading.median_age_seconds),
        *what_if(status.what_if, status.l1.policy),
        *(_with_rates(tier_line(tier), rates, tier.name) for tier in status.l2),
        _copies(status, rates),
        "",
    ]
    lines += _engines(status, rates)
    if reading.worst:
        lines += ["", "worst requests of the last minutes (kvserver explain)", *("  " + text for text in reading.worst)]
    return [_line(line) for line in lines]


def number(count: float) -> str:
    """Three digits or so."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if count >= factor:
            return f"{count / (1e3 if unit == 'k' else factor):.1f}{unit}"
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.1f}"


def sparkline(values: Sequence[float], most: float) -> str:
    """One character a value; `most` is the whole height."""
    return "".join(_STEPS[min(len(_STEPS) - 1, int(value / (most or 1.0) * len(_STEPS)))] for value in values)


def _line(text: str) -> Text:
    """Words in capitals at its beginning are its head."""
    shown = Text(plain(text), no_wrap=True, overflow="crop")
    for words, style in _STYLES.items():
        shown.highlight_regex(words, style)
    return shown


def _head(words: str, text: str) -> str:
    return f"{words:<{_HEAD}} {text}"


def _title(status: DaemonStatus, rates: Rates | None, keys: str) -> str:
    window = f"  rates of {rates.window_seconds:.0f} s" if rates is not None else ""
    return (
        f"kvserver {status.version}  {keys}{'ready' if status.ready else 'NOT READY'}  up {duration(status.uptime_seconds)}  "
        f"boot {status.boot_id}{window}"
    )


def _trouble(status: DaemonStatus) -> Iterator[str]:
    if status.not_ready:
        yield _head("NOT READY", status.not_ready)
    if status.stale_seconds is not UNSET:
        text = f"the event loop has not answered for {status.stale_seconds:.1f} s; this is its last status"
        yield _head("STALE", text)
    if consequence := SERVING.get(status.serving):
        yield _head("SERVING", f"is {status.serving.upper()}: {consequence}")
    if status.books.unbalanced:
        yield _head("AUDIT", f"the accounting did not balance in {status.books.unbalanced} audits: report it")


def _prompts(status: DaemonStatus, rates: Rates | None, history: Sequence[float]) -> Iterator[str]:
    tokens = status.totals.prompt_tokens
    total, now = sum(tokens.values()), rates.prompt_tokens if rates is not None else {}
    recent = sum(now.values())
    rest = (
        f"{number(recent)} tokens/s, {number(total)} since the start  {sparkline(history, max(history, default=0.0))}"
    )
    yield _head("PROMPTS", rest if total else "no tokens reported yet")
    for source, name in _NAMES.items() if total else ():
        count, each = tokens.get(source, 0), now.get(source, 0.0)
        shown = (each, recent) if recent else (count, total)
        last = f"{rate(each, recent):>6} {number(each):>8}/s" if recent else " " * 17
        yield _head(f"  {name}", f"{bar(*shown)} {last}   since the start {rate(count, total)}")


def _hit_rate(status: DaemonStatus, rates: Rates | None, history: Sequence[float]) -> str:
    totals = status.totals
    now = f"{rate(rates.hit_rate, 1)} of looked-up tokens, " if rates is not None and rates.hit_rate is not None else ""
    since = f"{rate(totals.hit_tokens, totals.lookup_tokens)} since the start, in L1 alone"
    lookups = f"; {number(rates.lookups)} lookups/s" if rates is not None else ""
    return _head("HIT RATE", f"{now}{since}{lookups}  {sparkline(history, 1.0)}")


def _misses(status: DaemonStatus, rates: Rates | None) -> Iterator[str]:
    missed, now = missed_tokens(status), rates.missed_tokens if rates is not None else {}
    parts = [
        f"{reason} {rate(count, missed.total())}" + (f" ({number(now[reason])}/s)" if now.get(reason) else "")
        for reason, count in missed.most_common()
        if count
    ]
    if parts:
        yield _head("MISSES", f"tokens by reason: {', '.join(parts)}")


def _l1(status: DaemonStatus, rates: Rates | None) -> str:
    l1 = status.l1
    now = f" ({number(rates.evicted_chunks)}/s)" if rates is not None and rates.evicted_chunks else ""
    used = f"{bar(l1.used_bytes, l1.size_bytes)} {size(l1.used_bytes)} of {size(l1.size_bytes)}"
    return _head("L1", f"{used}, {l1.chunks:,} chunks, {l1.evictions:,} evicted{now}")


def _ages(ages: dict[str, float]) -> Iterator[str]:
    if ages:
        parts = [_AGES[of].format(duration(age) if age >= 1 else f"{age:.2g} s") for of, age in ages.items()]
        yield _head("  ages", f"{', '.join(parts)} (medians)")


def _with_rates(text: str, rates: Rates | None, name: str) -> str:
    head, _, rest = text.partition(" ")
    now = rates.l2.get(name) if rates is not None else None
    moved = f"; read {size(now.read_bytes)}/s, written {size(now.written_bytes)}/s" if now is not None else ""
    return _head(head, rest.strip() + moved)


def _copies(status: DaemonStatus, rates: Rates | None) -> str:
    totals = status.totals
    now = f"stored {size(rates.stored_bytes)}/s, loaded {size(rates.loaded_bytes)}/s; " if rates is not None else ""
    return _head(
        "COPIES",
        f"{now}{totals.failed_stores} failed stores, {totals.failed_loads} failed loads, {totals.errors} errors, "
        f"{status.events.dropped} events dropped; loop lag {status.loop_lag_seconds * 1000:.1f} ms",
    )


# ---- engines ------------------------------------------------------------------------------------


def _engines(status: DaemonStatus, rates: Rates | None) -> Iterator[str]:
    """A table, and under it why an engine runs without cache or alone."""
    nothing = ("-",) * (len(_NUMBERS) + 1)
    rows = [
        *((one.instance_id, one.model_name, kind(one), "NO CACHE", *nothing) for one in status.refused_engines),
        *(_row(one, rates, status.serving == "off") for one in status.instances),
        *(
            (one.instance_id, one.model_name, "-", "left", *nothing[1:], f"{duration(one.gone_seconds)} ago")
            for one in status.departed
        ),
    ]
    if not rows:
        yield "no engine is connected"
        return
    table = [(*_WORDS, *_NUMBERS), *(tuple(map(_cell, row)) for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            set_cell_size(cell, width) if place < len(_WORDS) else " " * (width - cell_len(cell)) + cell
            for place, (cell, width) in enumerate(cells)
        )
    for refused in status.refused_engines:
        yield f"{refused.instance_id} runs without cache: {refused.code}: {refused.message}"
    for one in status.instances:
        if not one.namespace:
            ranks = f"{len(one.workers)} of {one.world_size} ranks registered: no cache until all are, and agree"
            yield f"{one.instance_id} runs without cache: {ranks}"
        elif one.private:
            yield f"{one.instance_id} shares KV with no other engine: {one.private}"
    yield from not_reported(status.instances)


def _cell(text: str) -> str:
    shown = plain(text)
    return shown if cell_len(shown) <= _MOST_NAME else set_cell_size(shown, _MOST_NAME)


def _row(one: InstanceStatus, rates: Rates | None, is_off: bool) -> tuple[str, ...]:
    requests = one.requests
    tokens = requests.prompt_tokens or {}
    total = sum(tokens.values())
    stats = None if one.load is None or one.load.stale else one.load
    seen = max((worker.last_seen_seconds for worker in one.workers), default=0.0)
    return (
        one.instance_id,
        one.model_name,
        kind(one),
        "WAITING" if not one.namespace else "NO CACHE" if is_off else "private" if one.private else "on",
        f"{len(one.workers)}/{one.world_size}",
        number(stats.running) if stats is not None else "-",
        number(stats.waiting) if stats is not None else "-",
        number(rates.engines.get(one.instance_id, 0.0))
        if rates is not None and requests.prompt_tokens is not None
        else "-",
        *(rate(tokens.get(source, 0), total) for source in _NAMES),
        str(requests.failed_stores + requests.failed_loads),
        f"{duration(seen)} ago",
    )
