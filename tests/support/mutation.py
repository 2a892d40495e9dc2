"""A copy of the package with one mutation, and the tests that should notice it.

Owns: where a mutation's text lies, the copy, and what an outcome is called. Refuses to know: which mutations there are
(`mutants_of`), and how tests are started (`support.forked_tests`).
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = {"core": 120, "adapters": 180}  # more than the tests of any mutant need on a busy machine
_PYTHONS = {"core": ROOT / ".venv/bin/python", "adapters": ROOT / ".venv-vllm/bin/python"}

# The editable install's finder would come before PYTHONPATH.
_SITECUSTOMIZE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
"""


@dataclass(frozen=True)
class Mutant:
    """In `symbol` of `file`, `old`, which is there once, becomes `new`. `name` states what is broken then.

    `symbol` is "Class.method", "function", "Class" or "" for the whole file. `tests` are pytest's node ids below tests/.
    `equivalent` states why no test can fail; such a mutant is not run.
    """

    name: str
    file: str
    symbol: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def venv(self) -> str:
        """Where its tests run."""
        return "adapters" if any("adapters/" in test for test in self.tests) else "core"

    def source(self) -> str:
        """The whole mutated file. ValueError if the anchor does not fit the file as it is."""
        text, _ = _read(self.file)
        begin, end = _range_of(self.file, self.symbol)
        count = text.count(self.old, begin, end)
        if count != 1:
            raise ValueError(
                f"{self.file}, {self.symbol or 'whole file'}: the text is there {count} times: {self.old!r}"
            )
        at = text.index(self.old, begin, end)
        return text[:at] + self.new + text[at + len(self.old) :]

    def problem(self) -> str | None:
        """Why it cannot be run, or None."""
        try:
            mutated = ast.parse(self.source())
        except (OSError, ValueError, SyntaxError) as error:
            return f"{self.name}: {error}"
        if ast.dump(mutated) == _dumped(self.file):
            return f"{self.name}: it changes nothing"
        for test in self.tests:
            path, *names = test.split("::")
            found = _read(f"tests/{path}")[0] if (ROOT / "tests" / path).is_file() else ""
            if not found or not all(re.search(rf"(def|class) {name}\b", found) for name in names):
                return f"{self.name}: there is no test {test}"
        return None if self.tests or self.equivalent else f"{self.name}: no tests and no argument"


@functools.cache
def _read(file: str) -> tuple[str, ast.Module]:
    text = (ROOT / file).read_text()
    return text, ast.parse(text)


@functools.cache
def _dumped(file: str) -> str:
    return ast.dump(_read(file)[1])


def _range_of(file: str, symbol: str) -> tuple[int, int]:
    """Where in the file the symbol begins and ends. ValueError unless there is one."""
    text, tree = _read(file)
    if not symbol:
        return 0, len(text)
    nodes: list[ast.stmt] = list(tree.body)
    for name in symbol.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in nodes if isinstance(node, kinds) and node.name == name]
        if len(found) != 1:
            raise ValueError(f"{len(found)} symbols {symbol}")
        nodes = found[0].body
    lines = text.splitlines(keepends=True)
    first = min(node.lineno for node in (found[0], *found[0].decorator_list))
    assert found[0].end_lineno is not None
    return sum(map(len, lines[: first - 1])), sum(map(len, lines[: found[0].end_lineno]))


def copy_package(folder: Path) -> None:
    """The package as it is installed, in `folder`, which is to come first on sys.path."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvserver", folder / "kvserver", ignore=ignored)
    (native,) = (ROOT / ".venv").glob("lib/python3*/site-packages/kvserver/_native*.so")
    (folder / "kvserver" / native.name).symlink_to(native)
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)


@contextmanager
def mutated_package(mutant: Mutant | None) -> Iterator[Path]:
    """A folder with the copy; None for the code as it is."""
    with tempfile.TemporaryDirectory(prefix="kvs-mutant-") as name:
        folder = Path(name)
        copy_package(folder)
        if mutant is not None:
            file = Path(mutant.file)
            inside = Path("kvserver") / file if file.parts[0] == "adapters" else file
            (folder / inside).write_text(mutant.source())
        yield folder


class Outcome(str, Enum):
    KILLED = "killed"
    TIMEOUT = "timeout"  # killed, too: the tests did not end
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"  # the tests could not be run
    EQUIVALENT = "equivalent"


@dataclass(frozen=True)
class Result:
    outcome: Outcome
    seconds: float
    by: str  # the first test that failed
    output: str


class Tests:
    """A process of one venv that has imported what is slow, and forks for each run. close() at the end."""

    def __init__(self, venv: str, base: Path) -> None:
        """`base`: a copy of the package, without a mutation."""
        self._seconds = SECONDS[venv]
        environment = {
            **os.environ,
            "PYTHONPATH": str(base),
            "KVSERVER_BIN": str(ROOT / ".venv/bin/kvserver"),
            "KVSERVER_TEST_PROPERTIES": "unshrunk",
        }
        self._process = subprocess.Popen(
            [_PYTHONS[venv], ROOT / "tests/support/forked_tests.py", venv],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip

    def run(self, folder: Path, tests: Sequence[str], seconds: float | None = None) -> Result:
        """With the package of this folder first."""
        log = folder / "log"
        order = {
            "folder": str(folder),
            "tests": [f"tests/{test}" for test in tests],
            "seconds": seconds or self._seconds,
            "log": str(log),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = json.loads(
            self._process.stdout.readline() or '{"code": "the process of the tests died", "seconds": 0}'
        )
        outcomes = {0: Outcome.SURVIVED, 1: Outcome.KILLED, "timeout": Outcome.TIMEOUT}
        output = log.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", output, re.MULTILINE)
        return Result(
            outcomes.get(answer["code"], Outcome.BROKEN),
            answer["seconds"],
            failed[1] if failed else "",
            f"{output[-4000:]}\n(ended with {answer['code']})",
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
