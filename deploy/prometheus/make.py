"""Give each alert of kvserver-alerts.yaml its `runbook_url`, the heading of its name in deploy/guides/alerts.md: `make dashboard`.

`make dashboard RUNBOOKS=https://...` names the address at which your people read that page. With --check only report whether the file differs.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ALERTS = Path(__file__).parent / "kvserver-alerts.yaml"
BASE = os.environ.get("RUNBOOKS") or "https://example.com/kvserver/deploy/guides/alerts.md"


def with_urls(text: str) -> str:
    lines: list[str] = []
    name = ""
    for line in text.splitlines():
        if re.match(r"\s+runbook_url:", line):
            continue
        lines.append(line)
        if alert := re.match(r"\s+- alert: (\w+)", line):
            name = alert[1].lower()
        elif indent := re.match(r"\s+(?=runbook:)", line):
            lines.append(f'{indent[0]}runbook_url: "{BASE}#{name}"')
    return "\n".join(lines) + "\n"


def main() -> int:
    text = ALERTS.read_text()
    made = with_urls(text)
    if "--check" not in sys.argv:
        ALERTS.write_text(made)
        return 0
    if made == text:
        return 0
    print("deploy/prometheus/kvserver-alerts.yaml lacks a runbook_url: make dashboard", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
