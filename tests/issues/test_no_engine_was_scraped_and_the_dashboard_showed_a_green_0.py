"""The panel of engines without cache had `or vector(0)`: it was green where no engine was scraped. So were others where no daemon was."""

from __future__ import annotations

from pathlib import Path

import yaml
from support.promtool import as_asked, check, panels

CONNECTED = 'vllm:kvserver_connected{job="vllm",namespace="llm",instance="vllm-0",model_name="m",engine="%d"}'


def stats() -> list[dict[str, str]]:
    return [
        {"record": f"panel{panel['id']}", "expr": as_asked(target["expr"])}
        for panel in panels()
        if panel["type"] == "stat"
        for target in panel["targets"]
    ]


def test_a_number_is_shown_only_where_something_is_scraped(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "stats", "rules": stats()}]}))
    cases = []
    for given, expected in (({}, []), ({0: 1, 1: 1}, [0]), ({0: 1, 1: 0}, [1]), ({0: 0, 1: 0}, [2])):
        series = [{"series": CONNECTED % engine, "values": f"{value}x5"} for engine, value in given.items()]
        shown = [{"labels": "panel131", "value": value} for value in expected]
        found = {"expr": '{__name__=~"panel.+"}', "eval_time": "3m", "exp_samples": shown}
        other = {"series": 'node_boot_time_seconds{instance="n"}', "values": "1x5"}
        cases.append({"interval": "1m", "input_series": [*series, other], "promql_expr_test": [found]})
    check(tmp_path, rules, cases)
