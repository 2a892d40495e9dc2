"""Write components/monitoring/rules.yaml, for Prometheus Operator, from the rules of deploy/prometheus: `make dashboard`.

With --check only report whether it differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE / "components/monitoring/rules.yaml"
RULES = ("kvserver-alerts", "kvserver-recording")
HEAD = """\
# deploy/kubernetes/make.py wrote this from deploy/prometheus/{name}.yaml: `make dashboard`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {name}
spec:
"""


def objects() -> str:
    """One PrometheusRule for each file, its text indented, so that its comments stay."""
    found = []
    for name in RULES:
        lines = (HERE.parent / f"prometheus/{name}.yaml").read_text().splitlines()
        body = "".join(f"  {line}\n" if line else "\n" for line in lines)
        found.append(HEAD.format(name=name) + body)
    return "---\n".join(found)


def main() -> int:
    if "--check" not in sys.argv:
        OUT.write_text(objects())
        return 0
    if OUT.read_text() == objects():
        return 0
    print("deploy/kubernetes: rules.yaml is not what deploy/prometheus makes: make dashboard", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
