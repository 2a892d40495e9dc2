"""The state of L1 that one daemon leaves to the next: read back whole, or not at all."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest

from kvserver._native import kept_pages
from kvserver.protocol import KEY_BYTES, ObjectGroup
from kvserver.restart.state import DIGEST_BYTES, EXTENT_BYTES, KeptNamespace, State, StateError, decode
from kvserver.restart.state import encode as parts_of

ONE = KeptNamespace(b"a" * 32, "model", (ObjectGroup("full", (0,), 16),), 1, 64, False)
TWO = KeptNamespace(b"b" * 32, "model", (ObjectGroup("full", (0,), 16),), 2, 64, False)


def encode(of: State) -> bytes:
    return b"".join(parts_of(of))


def state(chunks: int = 12, seed: int = 0) -> State:
    """Chunks of one slot and of two, of one extent or two a slot."""
    source = random.Random(seed)
    places = array("I", [source.randrange(2) for _ in range(chunks)])
    counts = array("I", [(1 + place) * source.randint(1, 2) for place in places])
    return State(
        version="1",
        page_bytes=4096,
        inode=7,
        namespaces=[ONE, TWO],
        places=places.tobytes(),
        flags=source.randbytes(chunks),
        ready=array("I", [1] * chunks).tobytes(),
        keys=source.randbytes(KEY_BYTES * chunks),
        ends=b"".join(source.randbytes(8) for place in places if place),
        counts=counts.tobytes(),
        extents=source.randbytes(EXTENT_BYTES * sum(counts)),
        digests=source.randbytes(DIGEST_BYTES * chunks),
    )


def test_state_is_read_back() -> None:
    assert decode(encode(state())) == state()
    assert decode(encode(state(0))).chunks == 0


def test_state_with_a_flipped_bit_is_refused() -> None:
    raw, source = encode(state()), random.Random(0)
    for _ in range(1000):
        damaged = bytearray(raw)
        bit = source.randrange(8 * len(raw))
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StateError):
            decode(bytes(damaged))


def test_state_that_was_cut_off_is_refused() -> None:
    raw = encode(state())
    for size in range(len(raw)):
        with pytest.raises(StateError):
            decode(raw[:size])


def test_state_of_another_format_is_refused_with_both_formats() -> None:
    raw = bytearray(encode(state()))
    raw[8] += 1
    with pytest.raises(StateError, match="format 4, and this daemon has format 3"):
        decode(bytes(raw))


@pytest.mark.parametrize("column", ["places", "ready", "keys", "ends", "counts", "extents", "digests"])
def test_state_whose_columns_differ_is_refused(column: str) -> None:
    wrong = msgspec.structs.replace(state(), **{column: getattr(state(), column)[:-1]})
    with pytest.raises(StateError):
        decode(encode(wrong))


def test_selected_rows_and_parts_are_those_of_each_column() -> None:
    whole, source = state(), random.Random(1)
    rows = [whole.part(row, row + 1) for row in range(whole.chunks)]
    chosen = bytes(source.randrange(2) for _ in rows)
    expected = whole.part(0, 0)
    for row, one in enumerate(rows):
        if chosen[row]:
            expected = expected.joined(one)
    found = whole.selected(chosen)
    assert [found.keys, found.ends, found.extents] == [expected.keys, expected.ends, expected.extents]
    assert found.chunks == sum(chosen)
    assert decode(encode(found)) == found
    joined = whole.joined(found)
    assert joined.part(whole.chunks, joined.chunks).keys == found.keys
    assert decode(encode(joined)) == joined


def test_namespaces_without_rows_are_dropped_when_rows_are_selected_or_joined() -> None:
    whole = state()
    of_two = whole.in_namespaces([False, True])
    assert of_two.namespaces == [TWO]
    assert set(array("I", of_two.places)) == {0}
    for _ in range(4):  # daemons that end while these rows wait, and those of the first namespace are to be adopted
        left = whole.part(0, 0).joined(whole.in_namespaces([True, False])).joined(of_two)
        assert left.namespaces == [ONE, TWO]
        assert left.chunks == whole.chunks
        assert decode(encode(left)) == left
        whole = left
        of_two = whole.in_namespaces([False, True])


def pages(*objects: list[tuple[int, int]]) -> tuple[bytes, bytes]:
    """The columns of objects with these extents."""
    numbers = [number for extents in objects for extent in extents for number in extent]
    return array("I", map(len, objects)).tobytes(), array("I", numbers).tobytes()


def test_pages_of_no_object_are_free_and_objects_beyond_l1_do_not_fit() -> None:
    assert kept_pages(*pages([(2, 3), (9, 1)], [(7, 1)], [(8, 1), (99, 2)]), 100) == (
        b"\1\1\0",
        [(0, 2), (5, 2), (8, 1), (10, 90)],
    )
    assert kept_pages(b"", b"", 5) == (b"", [(0, 5)])


@pytest.mark.parametrize("objects", [[[(0, 2)], [(1, 1)]], [[(3, 1), (3, 1)]], [[]], [[(3, 0)]]])
def test_objects_that_share_a_page_or_have_none_are_refused(objects: list[list[tuple[int, int]]]) -> None:
    with pytest.raises(ValueError, match="objects"):
        kept_pages(*pages(*objects), 100)
