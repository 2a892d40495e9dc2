"""`kvserver`, run as an operator runs it."""

from __future__ import annotations

import os
import subprocess

from support.daemon import KVSERVER


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`kvserver ...` to its end."""
    return subprocess.run(
        [KVSERVER, *arguments], capture_output=True, text=True, timeout=20, env={**os.environ, **(env or {})}
    )
