"""Mutants: one deliberate fault in a copy of the package, and the tests that should notice it.

Owns: the place of a fault in the code, the copy, the run of the tests. Refuses to know: which faults there are (`mutants_of`).
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 300  # more than the tests of any mutant need on a busy machine, with the import of vLLM

# The editable install's finder would come before PYTHONPATH.
_SITECUSTOMIZE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
"""


@dataclass(frozen=True)
class Mutant:
    """In `symbol` of `file`, `old`, which is there once, becomes `new`. `name` states what is broken then.

    `symbol` is "Class.method", "function", "Class" or "" for the whole file. `tests` are pytest's node ids below tests/,
    with spaces between them.
    """

    name: str
    tests: str
    file: str
    symbol: str
    old: str
    new: str

    @property
    def venv(self) -> str:
        """The environment that its tests run in."""
        if self.tests.startswith("sglang/"):
            return ".venv-sglang"
        return ".venv-vllm" if "adapters/" in self.tests else ".venv"

    def source(self) -> str:
        """The whole mutated file. ValueError if the anchor does not fit the file as it is."""
        text = (ROOT / self.file).read_text()
        begin, end = _range_of(text, self.symbol)
        if (count := text.count(self.old, begin, end)) != 1:
            raise ValueError(f"{self.file}, {self.symbol}: the text is there {count} times: {self.old!r}")
        return text[:begin] + text[begin:end].replace(self.old, self.new) + text[end:]

    def problem(self) -> str | None:
        """The reason why it cannot be run, or None."""
        try:
            if ast.dump(ast.parse(self.source())) == ast.dump(ast.parse((ROOT / self.file).read_text())):
                return f"{self.name}: it changes nothing"
        except (OSError, ValueError, SyntaxError) as error:
            return f"{self.name}: {error}"
        for test in self.tests.split():
            path, *names = test.split("::")
            found = (ROOT / "tests" / path).read_text() if (ROOT / "tests" / path).is_file() else ""
            if not found or not all(re.search(rf"(def|class) {name}\b", found) for name in names):
                return f"{self.name}: there is no test {test}"
        return None


def _range_of(text: str, symbol: str) -> tuple[int, int]:
    """The offsets of a symbol's begin and end. ValueError unless there is one."""
    lines, nodes = text.splitlines(keepends=True), list(ast.parse(text).body)
    first, last = 1, len(lines)
    for name in symbol.split(".") if symbol else ():
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in nodes if isinstance(node, kinds) and node.name == name]
        if len(found) != 1:
            raise ValueError(f"{len(found)} symbols {symbol}")
        nodes, first, last = found[0].body, found[0].lineno, found[0].end_lineno or 0
    return sum(map(len, lines[: first - 1])), sum(map(len, lines[:last]))


@dataclass(frozen=True)
class Result:
    outcome: str  # killed, timeout (killed, too: the tests did not end), SURVIVED, BROKEN (they could not be run)
    seconds: float
    by: str  # the first test that failed
    output: str


def run_tests(venv: str, tests: Sequence[str], mutant: Mutant | None, seconds: float = SECONDS) -> Result:
    """The outcome of these tests over a copy of the package, with the mutation or (None) as it is."""
    with tempfile.TemporaryDirectory(prefix="kvs-mutant-") as name:
        folder, log = Path(name), Path(name, "log")
        shutil.copytree(ROOT / "kvserver", folder / "kvserver")
        (native,) = (ROOT / ".venv").glob("lib/python3*/site-packages/kvserver/_native*.so")
        (folder / "kvserver" / native.name).symlink_to(native)
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        if mutant is not None:
            inside = "kvserver" if mutant.file.startswith("adapters/") else ""
            (folder / inside / mutant.file).write_text(mutant.source())
        environment = {
            "PYTHONPATH": name,
            "KVSERVER_BIN": str(ROOT / ".venv/bin/kvserver"),
            "KVSERVER_TEST_PROPERTIES": "unshrunk",
        }
        pytest = [ROOT / venv / "bin/pytest", "-x", "-q", "-m", "not long", "-p", "no:cacheprovider"]
        began = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [*pytest, *(f"tests/{test}" for test in tests)], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=os.environ | environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        code: int | str = "timeout"
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a failed test left behind
            process.wait()
        text = log.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", text, re.MULTILINE)
        outcome = {0: "SURVIVED", 1: "killed", "timeout": "timeout"}.get(code, "BROKEN")
        return Result(outcome, time.monotonic() - began, failed[1] if failed else "", text[-4000:])
