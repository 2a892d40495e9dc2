"""The unit of what a query of the dashboard returns, from the units of its metrics in METRICS.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from support.metrics_doc import Documented, documented

_FAMILIES = {series: family for family in documented().values() for series in family.series}
_NAME = re.compile(r"(?<![\w:$])((?:vllm:)?(?:kvserver|process)_\w+|up|vllm:\w+)(?![\w:(])")
_COUNTED = re.compile(r"^(count|changes)\b|\bchanges\(")


@dataclass(frozen=True)
class Unit:
    what: str  # bytes, seconds, tokens, share, switch (0 or 1), or count of whatever
    a_second: bool = False

    @property
    def shown(self) -> set[str]:
        """Names of Grafana's units for it."""
        if self.a_second:
            return {"bytes": {"Bps"}, "count": {"short", "reqps"}, "tokens": {"short"}, "seconds": {"short"}}[self.what]
        return {"bytes": {"bytes"}, "seconds": {"s"}, "share": {"percentunit"}, "switch": {"none"}}.get(
            self.what, {"short", "none"}
        )


SHARE = Unit("share")


def unit_of(query: str, kind: str = "timeseries") -> Unit:
    """ValueError if its metrics have different units. `kind`: of the panel."""
    bare = re.sub(r'"[^"]*"', "", query)
    bare = re.sub(r"\{[^{}]*\}|\[[^\[\]]*\]", "", bare).partition(" or 0 * ")[0]
    bare = re.sub(r"\b(by|on|ignoring|group_left) \([^()]*\)", "", bare)
    over, *under = _split(bare, "/")
    first = _of_terms(over, kind)
    if not under:
        return first
    second = _of_terms(under[0], kind)
    if first == second:
        return SHARE
    if second.what == "seconds" and first.a_second == second.a_second:
        return Unit(first.what, a_second=True)
    raise ValueError(f"{first} over {second}: {query}")


def _split(text: str, operator: str) -> list[str]:
    """At the operator where it is in no parentheses; parentheses around all of it are taken off."""
    text = text.strip()
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == operator and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]


def _of_terms(text: str, kind: str) -> Unit:
    """Of what is added, subtracted or multiplied with a number of ranks."""
    if _COUNTED.search(text.strip()):
        return Unit("count")
    a_second = bool(re.search(r"\brate\(", text))
    quantile = "histogram_quantile" in text or kind == "heatmap"
    found = {_of_metric(name, a_second, quantile) for name in _NAME.findall(text) if "world_size" not in name}
    if len(found) != 1:
        raise ValueError(f"{sorted(map(str, found))}: {text}")
    return found.pop()


def _of_metric(name: str, a_second: bool, quantile: bool) -> Unit:
    if name not in _FAMILIES:
        return Unit("switch" if name == "up" or name.endswith(("_connected", "_open")) else "count", a_second)
    family: Documented = _FAMILIES[name]
    if family.type == "histogram" and not name.endswith("_sum"):
        return Unit(_category(family.unit)) if quantile else Unit("count", a_second)
    unit, _, rate = re.sub(r" a second$", "/s", family.unit).partition("/")
    return Unit(_category(unit), a_second or rate == "s")


def _category(unit: str) -> str:
    if unit in ("bytes", "seconds", "tokens"):
        return unit
    return {"ratio": "share", "0 or 1": "switch", "1": "switch"}.get(unit, "count")
