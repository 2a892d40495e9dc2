"""The dashboard and the Prometheus rules query only documented families. That they are valid PromQL: `make rules`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.grafana_schema import misfits
from support.metrics_doc import Documented, documented, engine_series, miss_reasons
from support.query_units import unit_of

from kvserver.events.types import TYPES
from kvserver.protocol import ErrorCode

DEPLOY = Path(__file__).parents[3] / "deploy"
RULES = sorted(DEPLOY.glob("prometheus/*.yaml"))
SERIES = {series: family for family in documented().values() for series in family.series}
WITHIN = {
    "cluster",
    "namespace",
}  # labels that Prometheus adds for several of these: `instance` may be a pod's name, unique in one only
FROM_PROMETHEUS = {"job", "instance", *WITHIN}  # labels that Prometheus adds
# Series that are not the daemon's, with labels that Prometheus does not add.
FOREIGN = {"up": set[str](), **engine_series()}
_NAME = re.compile(rf"(?<![\w:$])((?:\w+:)?kvserver_[\w:]*|process_\w+|{'|'.join(FOREIGN)})(?![\w:(])")
_SELECTOR = re.compile(r"(?<![\w:])([\w:]+)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|ignoring|without|group_left)\s*\(([^)]*)\)")
VALUES = {
    "kvserver_rpc_errors_total": {"reason": {code.value for code in ErrorCode}},
    "kvserver_lookup_missed_tokens_total": {"reason": miss_reasons()},
    "kvserver_events_dropped_total": {"type": {kind.__name__ for kind in TYPES}},
}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/kvserver.json").read_text())
    return found


def panels() -> Iterator[dict[str, Any]]:
    """Rows, and the panels in them."""
    for panel in dashboard()["panels"]:
        yield panel
        yield from panel.get("panels", [])


@pytest.mark.parametrize("maker", ["grafana", "prometheus", "kubernetes"])
def test_generated_files_are_what_their_sources_make(maker: str) -> None:
    made = subprocess.run(
        [sys.executable, DEPLOY / maker / "make.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert made.returncode == 0, made.stderr


def rules(path: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


RECORDED = {rule["record"] for path in RULES for rule in rules(path) if "record" in rule}


def queries() -> Iterator[tuple[str, str]]:
    """(place, PromQL) of all there are."""
    for panel in panels():
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"].removeprefix("label_values")
    for path in RULES:
        for rule in rules(path):
            yield f"{path.name} {rule.get('alert') or rule.get('record')}", rule["expr"]


QUERIES = list(queries())


def names_in(query: str) -> set[str]:
    return set(_NAME.findall(re.sub(r'"[^"]*"', '""', query)))


def labels_of(name: str) -> set[str] | None:
    """What a series of that name can have; None where only its rule knows."""
    family: Documented | None = SERIES.get(name)
    if family is None:
        return FROM_PROMETHEUS | FOREIGN[name] if name in FOREIGN else None
    return {*family.labels, *FROM_PROMETHEUS, *(["le"] if name.endswith("_bucket") else [])}


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_a_query_names_only_what_is_exported_or_recorded(where: str, query: str) -> None:
    names = names_in(query)
    assert names, "the query names no series"
    assert names - SERIES.keys() - RECORDED - FOREIGN.keys() == set()


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_a_query_uses_only_labels_that_its_metrics_have(where: str, query: str) -> None:
    for name, inside in _SELECTOR.findall(query):
        known = labels_of(name)
        assert known is not None, f"{name} is selected by labels that only its rule knows"
        for label, how, value in _MATCHER.findall(inside):
            assert label in known, f"{name} has no label {label}"
            if how in ("=", "!=") and label in VALUES.get(name, {}):
                assert value in VALUES[name][label]
    known_to_all = [labels for name in names_in(query) if (labels := labels_of(name)) is not None]
    if known_to_all:
        for inside in _GROUPING.findall(query):
            for label in re.findall(r"\w+", inside):
                assert any(label in labels for labels in known_to_all), f"none of its metrics has a label {label}"


def test_every_family_is_on_the_dashboard() -> None:
    shown = {SERIES[name].name for panel in panels() for target in panel.get("targets", [])
             for name in names_in(target["expr"]) if name in SERIES}  # fmt: skip
    assert documented().keys() - shown == set()


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert [number for number, times in Counter(panel["id"] for panel in panels()).items() if times > 1] == []
    for shown in [dashboard()["panels"], *(panel["panels"] for panel in dashboard()["panels"] if panel.get("panels"))]:
        check_places(shown)


def check_places(shown: list[dict[str, Any]]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in shown:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, f"panel {panel['id']} overlaps another"
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_dashboard_fits_grafanas_published_schema() -> None:
    assert misfits(dashboard()) == []


def test_what_is_on_one_axis_has_one_unit_and_the_axis_shows_it() -> None:
    for panel in panels():
        if panel["type"] in ("row", "table"):
            continue
        units = {unit_of(target["expr"], panel["type"]) for target in panel["targets"]}
        assert len(units) == 1, (panel["title"], units)
        config = panel["fieldConfig"]
        assert config["overrides"] == [], "none has a second axis"
        shown = panel["options"]["yAxis"]["unit"] if panel["type"] == "heatmap" else config["defaults"]["unit"]
        assert shown in units.pop().shown, panel["title"]


def test_all_panels_use_the_chosen_data_source_and_variables() -> None:
    names = {variable["name"] for variable in dashboard()["templating"]["list"]}
    for panel in panels():
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            used = set(re.findall(r"\$(?!__)\{?(\w+)", target["expr"]))
            assert used <= names, f"panel {panel['title']}"
            chosen = "model" if names_in(target["expr"]) <= FOREIGN.keys() - {"up"} else "instance"
            assert used >= {chosen, *WITHIN}, f"panel {panel['title']} shows daemons, or models, that were not chosen"


def test_every_alert_states_its_severity_and_what_to_do() -> None:
    alerts = [rule for path in RULES for rule in rules(path) if "alert" in rule]
    assert alerts
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["annotations"].keys() == {"summary", "runbook", "runbook_url"}
        assert "\n" not in alert["annotations"]["runbook"]


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    headings = re.findall(r"^### (\w+)$", (DEPLOY / "guides/alerts.md").read_text(), re.MULTILINE)
    assert headings == list(ALERTS)
    urls = [alert["annotations"]["runbook_url"].partition("#") for alert in ALERTS.values()]
    assert [anchor for _, _, anchor in urls] == [name.lower() for name in ALERTS]
    (page,) = {page for page, _, _ in urls}
    assert page.endswith("/deploy/guides/alerts.md")


ALERTS = {rule["alert"]: rule for path in RULES for rule in rules(path) if "alert" in rule}


def cases(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((DEPLOY / f"prometheus/tests/{name}.yaml").read_text())["tests"]
    return found


def firing(case: dict[str, Any]) -> set[str]:
    labels = [sample["labels"] for at in case.get("promql_expr_test", []) for sample in at["exp_samples"]]
    return set(re.findall(r'alertname="(\w+)"', " ".join(labels)))


@pytest.mark.parametrize("name", ["alerts", "silences"])
def test_every_alert_fires_when_it_should_and_where_it_could_miss_its_reason(name: str) -> None:
    assert {alert for case in cases(name) for alert in firing(case)} == ALERTS.keys()


def test_series_of_the_rules_tests_are_real_ones() -> None:
    for path in sorted(DEPLOY.glob("prometheus/tests/*.yaml")):
        for test in yaml.safe_load(path.read_text())["tests"]:
            for given in test["input_series"]:
                ((name, inside),) = _SELECTOR.findall(given["series"])
                known = labels_of(name)
                assert known == {label for label, _, _ in _MATCHER.findall(inside)} | WITHIN, given["series"]


def test_the_example_scrapes_the_default_port_and_loads_the_rules() -> None:
    example = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert set(example["rule_files"]) == {"kvserver-recording.yaml", "kvserver-alerts.yaml"}
    jobs = {job["job_name"]: job["static_configs"] for job in example["scrape_configs"]}
    assert jobs == {"kvserver": [{"targets": ["127.0.0.1:8080"]}], "vllm": [{"targets": ["127.0.0.1:8000"]}]}
