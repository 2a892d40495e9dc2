"""Values by keys: against a dict, and with no reference too many or too few."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples, walks

from kvserver._native import KeyTable


class Value:
    def __init__(self, table: KeyTable[Value] | None = None) -> None:
        self.table = table


def test_values_are_found_in_the_order_of_the_keys() -> None:
    table, one, two = KeyTable(1), Value(), Value()
    table.add(b"1" * 32, one)
    table.add(b"2" * 32, two)
    assert table.find(b"2" * 32 + b"3" * 32 + b"1" * 32) == [two, None, one]
    assert table.find_leading(b"2" * 32 + b"1" * 32 + b"3" * 32 + b"1" * 32) == [two, one]
    assert table.find(b"") == table.find_leading(b"3" * 32 + b"1" * 32) == []
    assert (table.get(b"1" * 32), table.get(b"3" * 32)) == (one, None)


def test_duplicate_and_malformed_keys_are_refused_and_change_nothing() -> None:
    table, value = KeyTable(1), Value()
    table.add(b"k" * 32, value)
    references = sys.getrefcount(value)
    with pytest.raises(ValueError, match="is in the table"):
        table.add(bytes([ord("k")] * 32), value)
    for use in (lambda: table.add(b"short", value), lambda: table.get(b"short"), lambda: table.remove(b"short")):
        with pytest.raises(ValueError, match="32 bytes"):
            use()
    with pytest.raises(ValueError, match="whole keys"):
        table.find(bytes(33))
    with pytest.raises(KeyError):
        table.remove(b"x" * 32)
    assert sys.getrefcount(value) == references
    assert table.values() == [value]
    assert table.pop() is value
    with pytest.raises(KeyError):
        table.pop()


def test_a_table_refers_to_keys_and_values_once_each() -> None:
    table, value, key = KeyTable(1), Value(), bytes(range(32))
    before = sys.getrefcount(value), sys.getrefcount(key)
    for end in ("remove", "pop"):
        table.add(key, value)
        assert (sys.getrefcount(value), sys.getrefcount(key)) == (before[0] + 1, before[1] + 1)
        assert (table.remove(key) if end == "remove" else table.pop()) is value
        assert (sys.getrefcount(value), sys.getrefcount(key)) == before
    table.add(key, value)
    del table
    assert (sys.getrefcount(value), sys.getrefcount(key)) == before


def test_a_table_whose_values_refer_to_it_is_collected() -> None:
    table: KeyTable[Value] = KeyTable(1)
    values = [Value(table) for _ in range(100)]
    for number, value in enumerate(values):
        table.add(number.to_bytes(32, "big"), value)
    gone = weakref.ref(values[0])
    del table, value, values
    gc.collect()
    assert gone() is None


@given(different=st.sampled_from([20, 3000]), seed=st.integers(0, (1 << 64) - 1), steps=walks(100))
@examples(20)
def test_random_changes_agree_with_a_dict(different: int, seed: int, steps: object) -> None:
    names = [number.to_bytes(32, "big") for number in range(different)]
    table, model = KeyTable(seed), {}
    for rng in steps:
        some = rng.sample(names, rng.randint(1, min(different, 300)))
        action = rng.random()
        for key in some:
            if action < 0.5 and key not in model:
                model[key] = Value()
                table.add(key, model[key])
            elif 0.5 <= action < 0.9 and key in model:
                assert table.remove(key) is model.pop(key)
            elif action >= 0.9 and model:
                popped = table.pop()
                model = {name: value for name, value in model.items() if value is not popped}
        found = [model.get(key) for key in some]
        assert table.find(b"".join(some)) == found == [table.get(key) for key in some]
        leading = found.index(None) if None in found else len(found)
        assert table.find_leading(b"".join(some)) == found[:leading]
        assert len(table) == len(model)
    assert set(table.values()) == set(model.values())
    assert len(table.values()) == len(model)
