"""Block ids as they travel: any packed list is unpacked unchanged, and any other input is refused in bounds."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.properties import damaged, examples
from support.worker import ids, packed

from kvserver._native import pack_blocks, unpack_blocks

TOP = 2**32 - 1


def run(first: int, length: int, step: int) -> list[int]:
    return [id for at in range(length) if 0 <= (id := first + at * step) <= TOP]


IDS = st.integers(0, TOP) | st.integers(0, 200)
RUNS = st.builds(run, IDS, st.integers(1, 40), st.sampled_from((-1, 0, 1, 2)))
LISTS = st.lists(RUNS, max_size=12).map(lambda runs: [*itertools.chain(*runs)])


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def refused(raw: bytes, most: int = 1000) -> str:
    with pytest.raises(ValueError, match="byte ") as caught:
        unpack_blocks(raw, most)
    return str(caught.value)


@given(blocks=LISTS)
@example(blocks=[TOP, 0, TOP])
@example(blocks=[*range(5, -1, -1)])
@example(blocks=[*range(TOP - 5, TOP + 1)])
@examples(300)
def test_any_list_comes_back_and_uses_no_more_than_five_bytes_an_id(blocks: list[int]) -> None:
    raw = packed(blocks)
    assert unpack_blocks(raw, len(blocks)) == ids(blocks)
    assert len(raw) <= 1 + 5 * len(blocks)
    if blocks:
        assert f"more than {len(blocks) - 1} ids" in refused(raw, len(blocks) - 1)


@pytest.mark.parametrize("make", [lambda n: range(9, 9 + n), lambda n: range(9 + n, 9, -1)], ids=["up", "down"])
def test_a_run_uses_a_few_bytes_however_long_it_is(make: Callable[[int], range]) -> None:
    assert len(packed(make(100_000))) <= 8


@pytest.mark.parametrize("wrong", [-1, TOP + 1, 1.5, "1"])
def test_only_ids_of_32_bits_are_packed(wrong: Any) -> None:
    with pytest.raises(TypeError):
        pack_blocks([1, wrong])


HOSTILE = {
    "an unknown form": (b"\2\2", "neither"),
    "a form that is no number": (b"\xff", "cut off"),
    "a number that is cut off": (b"\0\2\x80", "cut off"),
    "a run without a length": (b"\1\2", "cut off"),
    "a number of eleven bytes": (b"\0" + b"\xff" * 10 + b"\1", "too large"),
    "a number that fills 64 bits": (b"\0" + varint(2**64 - 1), "too large"),
    "a number spelt too long": (b"\0\x82\x00", "longer than it need be"),
    "a length spelt too long": (b"\1\2\x82\x80\x00", "longer than it need be"),
    "a run of none": (b"\1\2\0", "no ids"),
    "a descending run of none": (b"\1\2\1", "no ids"),
    "an id below 0": (b"\0" + varint(1), "32 bits"),
    "an id above 32 bits": (b"\0" + varint(2 << 32), "32 bits"),
    "a run that descends below 0": (b"\1" + varint(4 << 1) + varint(6 << 1 | 1), "32 bits"),
    "a run that ascends above 32 bits": (b"\1" + varint(TOP << 1) + varint(2 << 1), "32 bits"),
    "a run of four billion": (b"\1\2" + varint(TOP << 1), "more than 1000 ids"),
    "the longest run there is a number for": (b"\1\2" + varint(2**35 - 1), "more than 1000 ids"),
    "one id too many": (packed(range(1001)), "more than 1000 ids"),
    "one single id too many": (b"\0" + b"\2" * 1001, "more than 1000 ids"),
}


@pytest.mark.parametrize(("raw", "words"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_list_of_at_most_so_many_ids_is_refused(raw: bytes, words: str) -> None:
    assert words in refused(raw)


def test_as_many_ids_as_may_be_are_taken() -> None:
    assert unpack_blocks(packed(range(1000)), 1000) == ids(range(1000))


NOISE = st.binary(max_size=40) | st.binary(max_size=12).map(b"\1".__add__)


@given(raw=NOISE | damaged(LISTS.map(lambda blocks: packed(blocks[:50])) | NOISE))
@examples(500)
def test_noise_is_refused_or_is_ids_in_bounds(raw: bytes) -> None:
    try:
        found = unpack_blocks(raw, 60)
    except ValueError:
        return
    assert len(found) % 4 == 0
    assert len(found) <= 4 * 60
    assert unpack_blocks(packed(array("I", found)), 60) == found
