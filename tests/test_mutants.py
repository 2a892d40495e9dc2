"""The tables of deliberate faults fit the code as it is; whether tests notice them is `mutants.py`'s to find."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import mutants
import mutants_of
import pytest
from support.mutation import ROOT, Mutant

WITHOUT_MUTANTS = {"kvserver/copy"}  # tests of the rooms that use it cover it
TABLES = sorted(path.stem for path in Path(mutants_of.__file__).parent.glob("*.py") if path.stem != "__init__")


def test_every_anchor_fits_the_code():
    assert mutants.problems() == []


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_in_the_list_whole(name):
    """A row of the file that is not in its table would be no mutant, and nothing would state it."""
    path = Path(mutants_of.__file__).with_name(f"{name}.py")
    rows = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    table = importlib.import_module(f"mutants_of.{name}").MUTANTS
    assert len(table) == sum(ast.unparse(row.func) == "Mutant" for row in rows) > 0
    assert not [mutant.name for mutant in table if mutant not in mutants.MUTANTS]


def test_every_room_of_the_code_has_mutants():
    rooms = {path.parent for package in ("kvserver", "adapters") for path in (ROOT / package).glob("*/__init__.py")}
    found = {str(room.relative_to(ROOT)) for room in rooms if not room.is_symlink()}
    assert found - WITHOUT_MUTANTS == {room for room, mine in mutants_of.ROOMS.items() if mine} - {"kvserver"}


def test_a_mutant_in_the_table_of_another_room_is_named(monkeypatch):
    (mutant, *_) = mutants_of.ROOMS["kvserver/cache"]
    monkeypatch.setitem(mutants_of.ROOMS, "kvserver/l2", (mutant,))
    assert f"{mutant.name}: {mutant.file} is not in kvserver/l2" in mutants.problems()


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

    def problem(symbol, old, new, test="unit/cache/test_clear.py::TestClear"):
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


@pytest.mark.parametrize("test", ["unit/test_nothing.py", "unit/cache/test_clear.py::test_nothing"])
def test_a_test_that_is_not_there_is_named(problem, test):
    assert problem("Cache.find", "if key:", "if not key:", test) == f"a name: there is no test {test}"
