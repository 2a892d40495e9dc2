"""Write the dashboard's queries as recording rules, for promtool to check."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

DASHBOARD = Path(__file__).parent.parent / "deploy/grafana/kvserver.json"
WINDOWS = {"$__rate_interval": "5m", "$__range": "3h"}  # what Grafana puts in; other variables are text in quotes

rules = []
top = json.loads(DASHBOARD.read_text())["panels"]
for panel in [inner for outer in top for inner in (outer, *outer.get("panels", []))]:
    for target in panel.get("targets", []):
        query = target["expr"]
        for name, window in WINDOWS.items():
            query = query.replace(name, window)
        rules.append({"record": f"panel{panel['id']}:{target['refId']}", "expr": query})
print(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
