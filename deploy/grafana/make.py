"""Write kvserver.json, which Grafana imports, from panels.yaml: `make dashboard`. With --check only report whether it differs.

panels.yaml lists rows of panels; all but those with `collapsed: false` are closed until they are clicked. A panel has a `title` and an `id` (links name it, so it never changes), `queries` by their legends, and
where they differ from these defaults: `kind` timeseries (or stat, table, heatmap), `size` 8x8 of 24 columns, `unit` short, `text`.
In queries [R] stands for the interval that fits the width, and in braces D selects the chosen daemons, M their chosen models, I their
chosen engines, V the chosen models in vLLM's own metrics. Two namespaces may have pods, engines, models and tiers of one name: queries and
legends with such a name get the labels cluster and namespace, which are empty where Prometheus has none.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
OUT = HERE / "kvserver.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WITHIN = 'cluster=~"$cluster", namespace=~"$namespace"'
DAEMON, MODEL, ENGINE = f'{WITHIN}, instance=~"$instance"', 'model_name=~"$model"', 'instance_id=~"$engine"'
SELECTORS = {"D": DAEMON, "M": f"{DAEMON}, {MODEL}", "I": f"{DAEMON}, {MODEL}, {ENGINE}", "V": f"{WITHIN}, {MODEL}"}
NAMES = "instance|instance_id|model_name|tier|device"  # labels whose values are names, unique within a namespace only
VARIABLES = {  # name: (label, query)
    "cluster": ("Cluster", "label_values(kvserver_build_info, cluster)"),
    "namespace": ("Namespace", 'label_values(kvserver_build_info{cluster=~"$cluster"}, namespace)'),
    "instance": ("Daemon", f"label_values(kvserver_build_info{{{WITHIN}}}, instance)"),
    "model": ("Model", "label_values(kvserver_lookup_requests_total{D}, model_name)"),
    "engine": ("Engine", "label_values(kvserver_lookup_requests_total{M}, instance_id)"),
}


def expanded(query: str) -> str:
    """With selectors, intervals and the labels that keep names apart written out."""
    query = query.replace("[R]", "[$__rate_interval]")
    query = re.sub(rf"\b(by|on) \((?=[^)]*\b(?:{NAMES})\b)", r"\1 (cluster, namespace, ", query)
    return re.sub(
        r"\{[^{}]*\}", lambda braces: re.sub(r"\b[DMIV]\b(?!\")", lambda m: SELECTORS[m[0]], braces[0]), query
    )


def dashboard() -> dict[str, Any]:
    described = yaml.safe_load((HERE / "panels.yaml").read_text())
    panels: list[dict[str, Any]] = []
    y = 0
    for row in described["rows"]:
        collapsed = row.get("collapsed", True)
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        inside, below = _placed(row["panels"], y + 1)
        head = {"id": row["id"], "type": "row", "title": row["title"], "collapsed": collapsed, "gridPos": place}
        panels += [head | {"panels": inside}] if collapsed else [head | {"panels": []}, *inside]
        y = y + 1 if collapsed else below
    return described["dashboard"] | {"templating": {"list": _variables()}, "panels": panels}


def _placed(row: list[dict[str, Any]], y: int) -> tuple[list[dict[str, Any]], int]:
    """The panels of a row from `y` on, from left to right and then below, and where they end."""
    found, x, height = [], 0, 0
    for panel in row:
        w, h = map(int, panel.get("size", "8x8").split("x"))
        if x + w > 24:
            x, y, height = 0, y + height, 0
        found.append(_panel(panel) | {"gridPos": {"h": h, "w": w, "x": x, "y": y}})
        x, height = x + w, max(height, h)
    return found, y + height


def _variables() -> list[dict[str, Any]]:
    chosen: dict[str, Any] = {
        "multi": False,
        "includeAll": False,
        "options": [],
        "hide": 0,
        "skipUrlSync": False,
    }
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
    }
    found: list[dict[str, Any]] = [source | chosen]
    for name, (label, query) in VARIABLES.items():
        of = {"name": name, "label": label, "type": "query", "datasource": SOURCE}
        asked = {
            "query": {"query": expanded(query), "refId": name},
            "refresh": 2,
            "sort": 1,
        }
        everything = {
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }
        found.append(of | asked | everything | {"hide": 0, "options": [], "regex": "", "skipUrlSync": False})
    return found


def _panel(panel: dict[str, Any]) -> dict[str, Any]:
    kind = panel.get("kind", "timeseries")
    made: dict[str, Any] = {"id": panel["id"], "type": kind, "title": panel["title"]}
    if "text" in panel:
        made["description"] = panel["text"]
    made["datasource"] = SOURCE
    made |= KINDS[kind](panel)
    made["targets"] = [
        _target(chr(ord("A") + number), kind, legend, query)
        for number, (legend, query) in enumerate(panel["queries"].items())
    ]
    return made


def _target(ref: str, kind: str, legend: str, query: str) -> dict[str, Any]:
    legend = re.sub(rf"(?={{{{(?:{NAMES})}}}})", "{{cluster}} {{namespace}} ", legend, count=1)
    made = {"refId": ref, "datasource": SOURCE, "editorMode": "code", "expr": expanded(query), "legendFormat": legend}
    if kind == "table":
        return made | {"range": False, "instant": True, "format": "table"}
    if kind == "heatmap":
        return made | {"range": True, "format": "heatmap"}
    return made | ({"range": False, "instant": True} if kind == "stat" else {"range": True})


# ---- kinds: what Grafana needs of each --------------------------------------------------------


def _timeseries(panel: dict[str, Any]) -> dict[str, Any]:
    stacked = panel.get("stacked", False)
    lines = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 20 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
    }
    stacking = {"mode": "normal" if stacked else "none", "group": "A"}
    limits = {name: panel.get(name, least) for name, least in (("min", 0), ("max", None))}
    defaults = {
        "unit": panel.get("unit", "short"),
        **{name: limit for name, limit in limits.items() if limit is not None},
        "custom": {**lines, "stacking": stacking},
    }
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {"fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}


def _stat(panel: dict[str, Any]) -> dict[str, Any]:
    """`words`: what to show for 0, in red, and 1, in green. `red_from`: the number from which it is red. `nothing`: what to show without data."""
    mappings = []
    if "words" in panel:
        bad, good = panel["words"]
        options = {"0": {"text": bad, "color": "red", "index": 0}, "1": {"text": good, "color": "green", "index": 1}}
        mappings.append({"type": "value", "options": options})
    steps: list[dict[str, Any]] = [{"color": "green" if "red_from" in panel else "text", "value": None}]
    if "red_from" in panel:
        steps.append({"color": "red", "value": panel["red_from"]})
    thresholds = {"mode": "absolute", "steps": steps}
    defaults = {"unit": panel.get("unit", "short"), "mappings": mappings, "thresholds": thresholds}
    if "nothing" in panel:
        defaults["noValue"] = panel["nothing"]
    last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    options = {
        "colorMode": "value",
        "graphMode": "none",
        "textMode": panel.get("shows", "value"),
        "reduceOptions": last,
    }
    return {"fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}


def _table(panel: dict[str, Any]) -> dict[str, Any]:
    """`hides`: columns without use; `columns`: their names, those of values after the query's `refId`: "Value #A"."""
    organize = {
        "excludeByName": dict.fromkeys(["Time", *panel.get("hides", [])], True),
        "renameByName": panel.get("columns", {}),
    }
    return {
        "fieldConfig": {"defaults": {"unit": panel.get("unit", "short")}, "overrides": []},
        "options": {"showHeader": True, "cellHeight": "sm"},
        "transformations": [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}],
    }


def _heatmap(panel: dict[str, Any]) -> dict[str, Any]:
    """Of a histogram's buckets, summed by `le`."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 32, "reverse": False, "exponent": 0.5},
        "yAxis": {"unit": panel.get("unit", "short")},
        "rowsFrame": {"layout": "auto"},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False},
    }
    return {"fieldConfig": {"defaults": {}, "overrides": []}, "options": options}


KINDS = {"timeseries": _timeseries, "stat": _stat, "table": _table, "heatmap": _heatmap}


def written(made: dict[str, Any], between: str = ", ") -> str:
    """JSON with one panel a line, so that a diff shows which ones changed."""

    def value(name: str, of: Any) -> str:
        return "[\n" + ",\n".join(map(written, of)) + "\n]" if name == "panels" and of else json.dumps(of)

    return "{" + between.join(f'"{name}": {value(name, of)}' for name, of in made.items()) + "}"


def main() -> int:
    text = written(dashboard(), ",\n") + "\n"
    if "--check" not in sys.argv:
        OUT.write_text(text)
        return 0
    if OUT.read_text() == text:
        return 0
    print("deploy/grafana/kvserver.json is not what panels.yaml makes: make dashboard", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
