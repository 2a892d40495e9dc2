"""Print what a real daemon's /metrics says after an engine has stored, looked up and loaded."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.daemon import Daemon
from support.worker import Worker

daemon = Daemon().start()
try:
    worker = Worker(daemon.endpoint)
    worker.round_trip()
    code, text = daemon.http("/metrics")
    worker.close()
finally:
    daemon.close()
assert code == 200, text
print(text, end="")
