"""`kvserver`, run as an operator runs it."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from support.daemon import KVSERVER


def run(
    *arguments: str, env: dict[str, str] | None = None, timeout: float = 60, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`kvserver ...` to its end."""
    environ = os.environ | (env or {})
    return subprocess.run(
        [KVSERVER, *arguments], capture_output=True, text=True, timeout=timeout, env=environ, **options
    )
