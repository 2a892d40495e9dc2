"""Versions of vLLM and SGLang that kvserver is tested with, and the adapter's first log line, which names them.

`make test-versions` runs those of vLLM. `make test` runs SGLang's.
"""

from __future__ import annotations

from kvserver import __version__

ENGINES = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")  # real engines of vLLM on CPUs
PYTHON_ONLY = (
    "0.33.0",
)  # not built for CPUs: real engines of their Python with the compiled modules of the last of ENGINES
SGLANG = ("0.5.23",)  # real engines on CPUs; tests/sglang/requirements.txt installs the last one

_VLLM_LINE = (
    f"vLLM {', '.join(ENGINES)} on CPUs, and of {', '.join(PYTHON_ONLY)} with the compiled modules of {ENGINES[-1]}"
)


def tested_with(running: str) -> tuple[bool, str]:
    """(kvserver is tested with this version of vLLM, log line)."""
    return _tested(running, (*ENGINES, *PYTHON_ONLY), _VLLM_LINE)


def tested_with_sglang(running: str) -> tuple[bool, str]:
    """(kvserver is tested with this version of SGLang, log line)."""
    return _tested(running, SGLANG, f"SGLang {', '.join(SGLANG)} on CPUs")


def _tested(running: str, versions: tuple[str, ...], named: str) -> tuple[bool, str]:
    tested = running.split("+")[0] in versions
    return tested, (
        f"kvserver {__version__} is tested with real engines of {named}; "
        f"this is {running}{'' if tested else ', with which it was never tested'}"
    )
