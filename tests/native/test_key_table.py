"""Values by keys: against a dict, and with no reference too many or too few."""

from __future__ import annotations

import gc
import sys
import weakref
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples, walks

from kvserver._native import KeyTable, pack_chunks


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


class Row:
    __slots__ = ("_slots", "key", "namespace", "ready")


class YoungerRow(Row):
    __slots__ = ("more",)


def row(key: bytes, slots: bytes, namespace: object, ready: int = 1, made: type[Row] = Row) -> Row:
    of = made()
    of.key, of._slots, of.namespace, of.ready = key, slots, namespace, ready
    return of


def u32(*numbers: int) -> bytes:
    return array("I", numbers).tobytes()


def keys_of(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def test_columns_of_chunks_are_added_again_as_equal_chunks() -> None:
    one, two = object(), object()
    keys = keys_of(200)
    slots = [u32(*range(2 * (1 + number % 3))) for number in range(200)]
    rows: list[Row] = [row(key, slot, one, number) for number, (key, slot) in enumerate(zip(keys, slots, strict=True))]
    rows[7] = row(keys[7], u32(8, 16, 1, 2, 3, 4), two, 3)
    places, ready, packed, ends, counts, extents = pack_chunks(rows, [one, two], [0, 8])
    assert (places, ready) == (u32(*(n == 7 for n in range(200))), u32(*range(7), 3, *range(8, 200)))
    assert (packed, ends) == (b"".join(keys), u32(8, 16))
    assert counts == u32(*(2 if n == 7 else 1 + n % 3 for n in range(200)))
    assert extents == b"".join([*slots[:7], u32(1, 2, 3, 4), *slots[8:]])

    table: KeyTable[Row] = KeyTable(1)
    prototype = row(b"", b"", two, 5, YoungerRow)
    added = table.add_copies(prototype, bytes([1]) * 200, packed, b"", counts, extents)
    assert all(type(of) is YoungerRow and not hasattr(of, "more") for of in added)
    assert [(of.key, of.namespace, of.ready) for of in added if of] == [(key, two, 5) for key in keys]
    assert b"".join([of._slots for of in added if of]) == extents
    assert table.find(packed) == added


def test_rows_with_ends_get_them_before_their_extents() -> None:
    table: KeyTable[Row] = KeyTable(1)
    added = table.add_copies(row(b"", b"", 0), b"\1\1", bytes(64 - 1) + b"1", u32(1, 2), u32(1, 2), u32(*range(6)))
    assert [of._slots for of in added if of] == [u32(1, 0, 1), u32(2, 2, 3, 4, 5)]


def test_unwanted_and_present_keys_and_the_second_of_two_equal_ones_are_not_added() -> None:
    keys, there = keys_of(100), row(b"", b"", 0)
    table: KeyTable[Row] = KeyTable(1)
    table.add(keys[70], there)
    keys[90] = keys[80]
    wanted = bytes(number != 5 for number in range(100))
    references = sys.getrefcount(there)
    added = table.add_copies(there, wanted, b"".join(keys), b"", u32(*[1] * 100), u32(*range(200)))
    assert [number for number, of in enumerate(added) if of is None] == [5, 70, 90]
    assert table.get(keys[80]) is added[80]
    assert added[91] is not None
    assert added[91]._slots == u32(182, 183)
    assert len(table) == 98
    assert sys.getrefcount(there) == references


def test_rows_are_freed_with_their_references() -> None:
    namespace = Value()
    before = sys.getrefcount(namespace)
    table: KeyTable[Row] = KeyTable(1)
    prototype = row(b"", b"", namespace)
    added = table.add_copies(prototype, b"\1" * 9, b"".join(keys_of(9)), b"", u32(*[1] * 9), u32(*range(18)))
    assert sys.getrefcount(namespace) == before + 10
    pack_chunks(added, [namespace], [0])
    while table:
        table.pop()
    del added, prototype
    assert sys.getrefcount(namespace) == before


@pytest.mark.parametrize(
    "columns",
    [
        (b"\1", bytes(33), b"", u32(1), bytes(8)),
        (b"\1", bytes(32), b"", b"", bytes(8)),
        (b"\1\1", bytes(64), b"1", u32(1, 1), bytes(16)),
        (b"\1", bytes(32), b"", u32(2), bytes(8)),
        (b"\1", bytes(32), b"", u32(1 << 31), bytes(8)),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: tuple[bytes, bytes, bytes, bytes, bytes]) -> None:
    table: KeyTable[Row] = KeyTable(1)
    with pytest.raises(ValueError, match=r"columns|extents"):
        table.add_copies(row(b"", b"", 0), *columns)
    assert len(table) == 0


@pytest.mark.parametrize(
    "of",
    [row(b"short", u32(1, 2), 0), row(bytes(32), b"odd", 0), row(bytes(32), u32(1, 2), 9), row(bytes(32), u32(1, 2), 0, 1, YoungerRow)],
)  # fmt: skip
def test_chunks_of_another_form_are_not_packed(of: Row) -> None:
    with pytest.raises(ValueError, match=r"form|namespace|classes"):
        pack_chunks([row(bytes(32), u32(1, 2), 0), of], [0], [0])


def test_objects_without_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="slot"):
        pack_chunks([object()], [], [])
