"""Planes, and the groups that they belong to."""

from __future__ import annotations

import msgspec
import pytest

from kvserver import _native
from kvserver.protocol import ErrorCode, KVServerError, Plane, block_bytes, group_count
from kvserver.protocol.planes import MAX_GROUPS


def test_the_bytes_of_a_block_are_those_of_all_planes() -> None:
    assert block_bytes([Plane(0, 0, 100, 10), Plane(3, 7, 5, 3)]) == 13


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
