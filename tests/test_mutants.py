"""The table of deliberate faults fits the code as it is; whether tests notice them is `mutants.py`'s to find."""

from __future__ import annotations

import mutants
import pytest
from support.mutation import Mutant


def test_every_anchor_fits_the_code():
    assert mutants.problems() == []


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
def problem(tmp_path):
    """What is wrong with a mutant of CODE."""
    (tmp_path / "code.py").write_text(CODE)

    def problem(symbol, old, new, test="unit/cache/test_cache.py::TestClear"):
        return Mutant("a name", str(tmp_path / "code.py"), symbol, old, new, (test,)).problem()

    return problem


def test_the_text_counts_in_its_symbol_only(problem):
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
def test_an_anchor_that_does_not_fit_is_named(problem, symbol, old, new, expected):
    found = problem(symbol, old, new)
    assert found is not None
    assert found.startswith("a name: ")
    assert expected in found


@pytest.mark.parametrize("test", ["unit/test_nothing.py", "unit/cache/test_cache.py::test_nothing"])
def test_a_test_that_is_not_there_is_named(problem, test):
    assert problem("Cache.find", "if key:", "if not key:", test) == f"a name: there is no test {test}"
