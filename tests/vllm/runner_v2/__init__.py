"""The worker that vLLM gives GPUs, on a CPU: model runner V2 with asynchronous scheduling.

vLLM has the runner for CPUs too, where Triton has a backend of the name `cpu`. PyPI's Triton has none, but its interpreter runs
vLLM's kernels on tensors of the CPU. `build.py` makes a folder of Triton without its backends, and this package as `cpu`, which
compiles nothing, and as vLLM's plugin, which leaves asynchronous scheduling on. The folder is on the PYTHONPATH of engines only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "runner_v2"  # of `make`
RUNNERS = ("v1", "v2")
CHECKED = "runner_v2: this engine has model runner V2 with asynchronous scheduling"  # in its log
DEFAULT = os.environ.get("KVSERVER_TEST_RUNNER", "v2")


def environment(runner: str = DEFAULT) -> dict[str, str]:
    """The variables of an engine's process that choose the runner. PYTHONPATH goes on with this process's own."""
    assert runner in RUNNERS, f"KVSERVER_TEST_RUNNER is {runner!r}, not one of {RUNNERS}"
    if runner == "v1":
        return {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert (FOLDER / ".built").exists(), f"{FOLDER} is missing: `make {FOLDER.parent.name}/{FOLDER.name}/.built`"
    path = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}
