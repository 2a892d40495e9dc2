"""Block ids from the wire."""

from __future__ import annotations

import random
import time
from array import array

import msgspec
import pytest

from kvserver import _native
from kvserver.protocol import ErrorCode, KVServerError, Plane, block_bytes, group_count, parse_block_ids
from kvserver.protocol.planes import MAX_GROUPS


def wire(*ids: int) -> bytes:
    return b"".join(id.to_bytes(4, "little") for id in ids)


def refused(raw: bytes, num_blocks: int, least: int, most: int) -> str:
    with pytest.raises(KVServerError) as caught:
        parse_block_ids(raw, num_blocks, least, most)
    assert caught.value.code is ErrorCode.BAD_BLOCKS
    return caught.value.message


def test_ids_keep_their_order() -> None:
    assert parse_block_ids(wire(3, 1, 2), 4, 3, 3) == array("I", [3, 1, 2])


@pytest.mark.parametrize("count", [2, 3, 4])
def test_any_count_between_the_bounds_is_taken(count: int) -> None:
    assert len(parse_block_ids(wire(*range(count)), 10, 2, 4)) == count


@pytest.mark.parametrize("raw", [b"", wire(1), wire(1, 2, 3, 4, 5), wire(1, 2) + b"\0", wire(1, 2)[:-1]])
def test_a_wrong_length_is_named_with_the_right_one(raw: bytes) -> None:
    message = refused(raw, 10, 2, 4)
    assert f"{len(raw)} bytes" in message
    assert "2 to 4" in message


def test_an_id_out_of_range_is_named_with_the_bound() -> None:
    message = refused(wire(1, 7, 2), 7, 3, 3)
    assert "7" in message
    assert "registered 7 blocks" in message
    refused(wire(2**32 - 1), 7, 1, 1)


def test_an_id_named_twice_is_named_in_the_error() -> None:
    assert "block id 5 " in refused(wire(4, 5, 6, 5), 10, 4, 4)


def test_finding_the_repeated_id_of_very_many_does_not_take_long() -> None:
    count = 1 << 17  # a search per id would take minutes, and the loop would stop meanwhile
    ids = array("I", range(count))
    random.Random(1).shuffle(ids)
    ids[-1] = ids[-2]
    began = time.monotonic()
    refused(ids.tobytes(), count, count, count)
    assert time.monotonic() - began < 10


def test_the_bytes_of_a_block_are_those_of_all_planes() -> None:
    assert block_bytes([Plane(0, 0, 100, 10), Plane(3, 7, 5, 3)]) == 13


def test_only_the_null_block_may_repeat_and_only_if_allowed() -> None:
    holed = wire(0, 3, 0, 4, 0, 5)
    assert parse_block_ids(holed, 9, 6, 6, null_may_repeat=True) == array("I", [0, 3, 0, 4, 0, 5])
    assert "block id 0 " in refused(holed, 9, 6, 6)
    with pytest.raises(KVServerError, match="block id 3 is named more than once"):
        parse_block_ids(wire(0, 3, 0, 3, 0, 0), 9, 6, 6, null_may_repeat=True)


@pytest.mark.parametrize(("groups", "count"), [([0], 1), ([0, 0, 0], 1), ([1, 0], 2), ([2, 0, 1, 2], 3)])
def test_groups_are_counted_by_their_numbers(groups: list[int], count: int) -> None:
    assert group_count([Plane(0, 0, 8, 8, group) for group in groups]) == count


@pytest.mark.parametrize(("groups", "missing"), [([1], 0), ([0, 2], 1), ([3, 0, 1], 2)])
def test_a_gap_in_the_groups_is_named(groups: list[int], missing: int) -> None:
    with pytest.raises(KVServerError, match=f"no plane is of group {missing}") as caught:
        group_count([Plane(0, 0, 8, 8, group) for group in groups])
    assert caught.value.code is ErrorCode.BAD_PLANES


def test_the_native_module_copies_as_many_groups_as_a_registration_may_name() -> None:
    assert _native.MAX_GROUPS == MAX_GROUPS
    for group in (-1, MAX_GROUPS):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"memory": 0, "offset": 0, "stride_bytes": 8, "run_bytes": 8, "group": group}, Plane)


@pytest.mark.parametrize("field", ["memory", "offset", "stride_bytes", "run_bytes"])
def test_planes_with_negative_or_boundless_numbers_are_refused(field: str) -> None:
    plane = {"memory": 0, "offset": 0, "stride_bytes": 8, "run_bytes": 8}
    for value in (-1, 1 << 63):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**plane, field: value}, Plane)
