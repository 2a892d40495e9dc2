"""Rules and panels keep clusters and namespaces apart: where Prometheus Operator scrapes, `instance` is a pod's name, unique in a namespace only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from support.promtool import ALERTS, ROOT, check

from unit.telemetry.test_dashboards import QUERIES, panels

NAMES = {"instance", "instance_id", "tier", "model_name", "device"}
FLEETS = ('cluster="c", namespace="a"', 'cluster="c", namespace="b"', 'cluster="d", namespace="a"')
GROUPING = re.compile(r"\b(?:by|on|without|ignoring) \(([^)]*)\)")


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_a_grouping_with_a_name_keeps_its_namespace_and_cluster(where: str, query: str) -> None:
    for inside in GROUPING.findall(query):
        labels = set(re.findall(r"\w+", inside))
        assert not labels & NAMES or {"cluster", "namespace"} <= labels, inside


def test_a_legend_with_a_name_shows_its_namespace_and_cluster() -> None:
    for panel in panels():
        for target in panel.get("targets", []):
            if NAMES & set(re.findall(r"{{(\w+)}}", target["legendFormat"])):
                assert "{{cluster}} {{namespace}} " in target["legendFormat"]


def within(labels: str, series: str) -> str:
    return series.replace("{", f"{{{labels}, ", 1)


def test_what_happens_in_three_namespaces_alerts_for_each(tmp_path: Path) -> None:
    """Each case of alerts.yaml, three times at once: nothing is counted together, and each alert names its namespace."""
    made = []
    for case in yaml.safe_load((ROOT / "deploy/prometheus/tests/alerts.yaml").read_text())["tests"]:
        given, expected = case["input_series"], case.get("promql_expr_test")
        if expected is None:
            continue  # it is about texts
        made.append(
            {
                "interval": case["interval"],
                "input_series": [{**one, "series": within(labels, one["series"])} for labels in FLEETS for one in given],
                "promql_expr_test": [
                    {**at, "exp_samples": [{**one, "labels": within(labels, one["labels"])} for labels in FLEETS for one in at["exp_samples"]]}
                    for at in expected
                ],
            }
        )  # fmt: skip
    assert len(made) >= 30
    check(tmp_path, ALERTS, made)
