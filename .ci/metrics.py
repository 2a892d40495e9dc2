"""Print a real daemon's /metrics after an engine has stored, looked up and loaded. Needs tests/ on its path."""

from __future__ import annotations

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
