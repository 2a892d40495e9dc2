"""The versions of vLLM that kvserver is tested with, and the connector's first log line, which names them. `make test-versions` runs them."""

from __future__ import annotations

from kvserver import __version__

ENGINES = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")  # real engines on CPUs
SCHEDULERS = ("0.33.0",)  # vLLM's scheduler and the connector, without a model


def tested_with(running: str) -> tuple[bool, str]:
    """Whether kvserver is tested with this version of vLLM; the line."""
    tested = running.split("+")[0] in (*ENGINES, *SCHEDULERS)
    return tested, (
        f"kvserver {__version__} is tested with real engines of vLLM {', '.join(ENGINES)} on CPUs and with the schedulers of "
        f"{', '.join(SCHEDULERS)}; this is {running}{'' if tested else ', with which it was never tested'}"
    )
