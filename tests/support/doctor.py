"""`kvserver doctor`, run as an operator runs it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from .commands import run
from .daemon import Daemon


def doctor(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run("doctor", *arguments, env=env)


def rows(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
    """(exit code, findings by check)."""
    ended = doctor("--json", *arguments, env=env)
    assert ended.stderr == ""
    return ended.returncode, {row["check"]: row for row in json.loads(ended.stdout)}


def flags(daemon: Daemon) -> list[str]:
    """Those that name the daemon."""
    return ["--endpoint", daemon.endpoint, "--http-port", str(daemon.http_port), "--l1-size", "64MiB"]
