"""The tables of deliberate faults fit the code as it is; whether tests notice them is `mutants.py`'s to find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mutants
import pytest
from support.mutation import Mutant, run_tests


def test_every_anchor_fits_the_code() -> None:
    assert mutants.problems() == []


def test_a_fault_that_its_test_notices_is_killed_by_it() -> None:
    (mutant,) = (m for m in mutants.MUTANTS if m.name == "a slot is cut from pages that are in use")
    result = run_tests(mutant.venv, [mutant.tests], mutant)
    assert result.outcome == "killed", result.output
    assert result.by.startswith(mutant.tests)


CODE = """
class Cache:
    def find(self, key):
        if key:
            return key
        return None

def find(key):
    return Cache().find(key)
"""


@pytest.fixture
def problem(tmp_path: Path) -> Callable[..., str | None]:
    """The reason why a mutant of CODE cannot be run, or None."""
    (tmp_path / "code.py").write_text(CODE)

    def problem(symbol: str, old: str, new: str, test: str = "unit/cache/test_clear.py::TestClear") -> str | None:
        return Mutant("a name", test, str(tmp_path / "code.py"), symbol, old, new).problem()

    return problem


def test_the_text_counts_in_its_symbol_only(problem: Callable[..., str | None]) -> None:
    assert problem("find", "key)", "None)") is not None, "it is there twice"
    assert problem("Cache.find", "if key:", "if not key:") is None


@pytest.mark.parametrize(
    ("symbol", "old", "new", "expected"),
    [
        ("Cache.find", "return Cache()", "pass", "0 times"),
        ("Cache.find", "return", "pass", "2 times"),
        ("Cache.lose", "return", "pass", "0 symbols Cache.lose"),
        ("Cache.find", "if key:", "if key:  # the same", "changes nothing"),
        ("Cache.find", "if key:", "if if:", "invalid syntax"),
    ],
)
def test_an_anchor_that_does_not_fit_is_named(
    problem: Callable[..., str | None], symbol: str, old: str, new: str, expected: str
) -> None:
    found = problem(symbol, old, new)
    assert found is not None
    assert found.startswith("a name: ")
    assert expected in found


@pytest.mark.parametrize("test", ["unit/test_nothing.py", "unit/cache/test_clear.py::test_nothing"])
def test_a_test_that_is_not_there_is_named(problem: Callable[..., str | None], test: str) -> None:
    assert problem("Cache.find", "if key:", "if not key:", test) == f"a name: there is no test {test}"
