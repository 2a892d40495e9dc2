"""The dashboard's queries for promtool: `rules` prints them as recording rules; `test FOLDER` prints a test that runs them on the two scrapes
of a real daemon that `.ci/metrics.py` left there, and requires of each whether it finds anything. Needs tests/ on its path.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from support.promtool import as_asked, panels, scraped

EMPTY = {  # queries that find nothing of this daemon, and why
    "panel103:B": "its engine is not private",
    "panel114:A": "its engine publishes no KV events",
    "panel227:A": "its engine publishes no KV events",
    "panel182:B": "it has filled nothing from storage",
}
# Not the daemon's own: Prometheus makes the first, and engines' scrapes bring the others (adapters/README.md).
OTHERS = {
    'up{job="kvserver",instance="d"}': (1, 1),
    'vllm:kvserver_connected{job="vllm",instance="e",model_name="m",engine="0"}': (0, 0),
    'vllm:kvserver_without_cache_info{job="vllm",instance="e",model_name="m",engine="0",reason="no_daemon",detail=""}': (1, 1),
    'vllm:kvserver_breaker_open{job="vllm",instance="e",model_name="m",engine="0"}': (0, 0),
    'vllm:kvserver_quarantined_blocks{job="vllm",instance="e",model_name="m",engine="0"}': (0, 0),
    'vllm:kvserver_unsent_total{job="vllm",instance="e",model_name="m",engine="0"}': (0, 1),
    'vllm:kvserver_cancelled_stores_total{job="vllm",instance="e",model_name="m",engine="0"}': (0, 1),
    'vllm:kvserver_refused_total{job="vllm",instance="e",model_name="m",engine="0",code="bad_planes"}': (0, 1),
    'vllm:kvserver_faults_total{job="vllm",instance="e",model_name="m",engine="0",place="link"}': (0, 1),
}  # fmt: skip


def rules() -> list[dict[str, str]]:
    return [
        {"record": f"panel{panel['id']}:{target['refId']}", "expr": as_asked(target["expr"])}
        for panel in panels()
        for target in panel.get("targets", [])
    ]


def test(folder: Path) -> dict[str, object]:
    """Five minutes of the first scrape, then the second: what changed did so within every window."""
    before, after = (
        scraped((folder / f"{name}.txt").read_text(), job="kvserver", instance="d") for name in ("before", "after")
    )
    values = {name: (before.get(name, 0), value) for name, value in after.items()} | OTHERS
    series = [{"series": name, "values": f"{old:f}x5 {new:f}x5"} for name, (old, new) in values.items()]
    expected = [rule["record"] for rule in rules() if rule["record"] not in EMPTY]
    query = {
        "expr": 'group by (__name__) ({__name__=~"panel.+"})',
        "eval_time": "8m",
        "exp_samples": [{"labels": name, "value": 1} for name in expected],
    }
    return {
        "rule_files": ["dashboard.yaml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [query]}],
    }


def main() -> None:
    made = test(Path(sys.argv[2])) if sys.argv[1] == "test" else {"groups": [{"name": "dashboard", "rules": rules()}]}
    print(yaml.safe_dump(made, width=1000))


if __name__ == "__main__":
    main()
