"""promtool's tests of rules, written by tests: what the alerts, or the dashboard's queries, make of a real daemon's scrapes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent.parent
ALERTS = ROOT / "deploy/prometheus/kvserver-alerts.yaml"
DASHBOARD = ROOT / "deploy/grafana/kvserver.json"
VARIABLES = ("cluster", "namespace", "instance", "model", "engine")
_WINDOWS = {"$__rate_interval": "5m", "$__range": "3h"}  # what Grafana puts in
UNPACKED = ROOT / "build/promtool/usr/bin"  # where the system has none


def promtool() -> str:
    found = shutil.which("promtool") or shutil.which("promtool", path=str(UNPACKED))
    if found is None:
        pytest.skip("no promtool: it is neither on PATH nor in build/promtool; `make rules` puts Debian's there")
    return found


def check(folder: Path, rules: Path, cases: Sequence[dict[str, Any]]) -> None:
    """AssertionError with promtool's output unless the rules do what the cases expect, in the format of `promtool test rules`."""
    test = folder / "test.yaml"
    test.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": list(cases)}))
    ran = subprocess.run([promtool(), "test", "rules", test], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


def panels() -> list[dict[str, Any]]:
    """Rows, and the panels in them."""
    return [
        inner for outer in json.loads(DASHBOARD.read_text())["panels"] for inner in (outer, *outer.get("panels", []))
    ]


def as_asked(query: str, **chosen: str) -> str:
    """A query of the dashboard as Prometheus gets it. `chosen`: variables with their values; all of the others."""
    values = {f"${name}": chosen.get(name, ".*") for name in VARIABLES}
    for name, value in (_WINDOWS | values).items():
        query = query.replace(name, value)
    return query


def scraped(text: str, **labels: str) -> dict[str, float]:
    """Values by series, with these labels of their target."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            inside = ",".join(f"{name}={json.dumps(value)}" for name, value in {**sample.labels, **labels}.items())
            found[f"{sample.name}{{{inside}}}"] = sample.value
    return found


def firing(folder: Path, alerts: set[str], *scrapes: str, minutes: int = 90, up: bool = True) -> None:
    """AssertionError unless exactly these alerts fire when each scrape lasts for five minutes, and the last one for `minutes`.

    In those a counter goes on by what it rose between the last two scrapes, each minute. `up`: of the last one; "" is a scrape that failed.
    """
    named = set(re.findall(r"[\w:]*kvserver_\w+|process_\w+", ALERTS.read_text()))
    values = [scraped(text, job="kvserver", instance="d") for text in scrapes]
    given = [{"series": 'up{job="kvserver",instance="d"}', "values": f"1x{5 * len(scrapes) - 6} {+up}x{minutes}"}]
    for series in set().union(*values):
        name = series.partition("{")[0]
        if name in named:
            seen = [one.get(series) for one in values]
            held = " ".join("_x5" if value is None else f"{value:f}x4" for value in seen[:-1])
            given.append({"series": series, "values": f"{held} {_going_on(name, seen[-2], seen[-1], minutes)}"})
    busy = "" if "KVServerLoopLag" in alerts else ', alertname!="KVServerLoopLag"'  # which a busy machine makes
    found = {
        "expr": f'group by (alertname) (ALERTS{{alertstate="firing"{busy}}})',
        "eval_time": f"{5 * (len(scrapes) - 1) + minutes - 1}m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in alerts],
    }
    check(folder, ALERTS, [{"interval": "1m", "input_series": given, "promql_expr_test": [found]}])


def _going_on(name: str, before: float | None, last: float | None, minutes: int) -> str:
    if last is None:
        return f"_x{minutes}"
    is_counter = name.endswith(("_total", "_count", "_sum", "_bucket"))
    grown = last - (before or 0)
    step = (grown if grown >= 0 else last) if is_counter else 0  # less: a daemon that was started anew
    return f"{last:f}+{step:f}x{minutes}"
