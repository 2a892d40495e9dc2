"""Versions of vLLM that kvserver is tested with (`make test-versions`), and the connector's first log line, which names them."""

from __future__ import annotations

from kvserver import __version__

ENGINES = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")  # real engines on CPUs
PYTHON_ONLY = (
    "0.33.0",
)  # not built for CPUs: real engines of their Python with the compiled modules of the last of ENGINES


def tested_with(running: str) -> tuple[bool, str]:
    """(kvserver is tested with this version of vLLM, log line)."""
    tested = running.split("+")[0] in (*ENGINES, *PYTHON_ONLY)
    return tested, (
        f"kvserver {__version__} is tested with real engines of vLLM {', '.join(ENGINES)} on CPUs, and of {', '.join(PYTHON_ONLY)} with "
        f"the compiled modules of {ENGINES[-1]}; this is {running}{'' if tested else ', with which it was never tested'}"
    )
