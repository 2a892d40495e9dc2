"""What METRICS.md states of every family, for tests that hold the code, the dashboard and the rules to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "kvserver/METRICS.md"
_ROW = re.compile(
    r"^\| `((?:kvserver|process)_[a-z0-9_]+)` \| (counter|gauge|histogram) \|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE
)
_INSTANCE = ("instance_id", "model_name")  # the page's I
_ENGINE_ROW = re.compile(r"^\| `(vllm:kvserver_\w+)` \| (?:counter|gauge) \|([^|]*)\|", re.MULTILINE)
_OF_ENGINES = {"model_name", "engine"}  # labels that vLLM gives its metrics


@dataclass(frozen=True)
class Documented:
    name: str  # a counter's with _total
    type: str
    labels: tuple[str, ...]
    unit: str
    definition: str

    @property
    def series(self) -> set[str]:
        """The names under which Prometheus has it."""
        return {self.name + end for end in ("_bucket", "_sum", "_count")} if self.type == "histogram" else {self.name}


def documented() -> dict[str, Documented]:
    found: dict[str, Documented] = {}
    for name, kind, labels, unit, text in _ROW.findall(PAGE.read_text()):
        assert name not in found, f"{name} is listed twice"
        words = [word.strip(" `") for word in labels.split(",") if word.strip()]
        spelled = tuple(label for word in words for label in (_INSTANCE if word == "I" else (word,)))
        found[name] = Documented(name, kind, spelled, unit.strip(), text.strip())
    return found


def values(header: str) -> list[str]:
    """The label values that the table with this header explains."""
    ((_, rows),) = re.findall(
        rf"^(\| {re.escape(header)} \|)\n\| --- \| --- \|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE
    )
    return re.findall(r"^\| `(\w+)` \| [^|]+ \|$", rows, re.MULTILINE)


def miss_reasons() -> set[str]:
    """Of kvserver_lookup_missed_tokens_total."""
    return set(values("reason | what it means"))


def engine_series() -> dict[str, set[str]]:
    """Those of vLLM's own metrics that the rules may query, with their labels: what the adapter's page lists, and one of vLLM's."""
    page = (PAGE.parent.parent / "adapters/README.md").read_text()
    rows = {name: _OF_ENGINES | set(re.findall(r"`(\w+)`", labels)) for name, labels in _ENGINE_ROW.findall(page)}
    assert rows
    return rows | {"vllm:engine_sleep_state": _OF_ENGINES | {"sleep_state"}}
