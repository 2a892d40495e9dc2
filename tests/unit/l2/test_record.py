"""A record: what is packed is unpacked exactly, or does not match."""

from __future__ import annotations

import ctypes
import itertools
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from kvserver._native import RECORD_HEADER_BYTES, HostRegion, Record, RecordMatch
from kvserver.cache import PagePool

PAGE = 4096
PAGES = 64


@dataclass(frozen=True)
class Fields:
    namespace: bytes = b"n" * 32
    group: int = 1
    key: bytes = b"k" * 32
    coverage: bytes = b"c" * 16
    generation: int = 7
    slot_bytes: tuple[int, ...] = (PAGE + 1, 3 * PAGE)


class L1:
    def __init__(self) -> None:
        self.region = HostRegion(PAGES * PAGE)
        self.memory = (ctypes.c_char * (PAGES * PAGE)).from_address(self.region.address)
        self.memory.raw = random.Random(1).randbytes(PAGES * PAGE)

    def record(self, fields: Fields, slots: tuple[bytes, ...]) -> Record:
        return Record(
            self.region, PAGE, fields.namespace, fields.group, fields.key, fields.coverage, fields.generation,
            slots, fields.slot_bytes,
        )  # fmt: skip

    def read(self, slot: bytes, count: int) -> bytes:
        raw = self.memory.raw
        pages = memoryview(slot).cast("I").tolist()
        joined = b"".join(
            raw[first * PAGE : (first + n) * PAGE] for first, n in zip(pages[::2], pages[1::2], strict=True)
        )
        return joined[:count]


def extents(*pairs: tuple[int, int]) -> bytes:
    return b"".join(first.to_bytes(4, "little") + count.to_bytes(4, "little") for first, count in pairs)


SLOTS = (extents((9, 1), (3, 1)), extents((20, 1), (22, 2)))
OTHER_SLOTS = (extents((40, 2)), extents((50, 1), (47, 1), (53, 1)))


def test_slots_in_pieces_are_one_buffer_and_slots_in_pieces_again() -> None:
    l1 = L1()
    packed = l1.record(Fields(), SLOTS).pack()
    assert packed[RECORD_HEADER_BYTES:] == l1.read(SLOTS[0], PAGE + 1) + l1.read(SLOTS[1], 3 * PAGE)
    assert l1.record(Fields(), OTHER_SLOTS).unpack(packed) is RecordMatch.MATCH
    assert l1.read(OTHER_SLOTS[0], PAGE + 1) == l1.read(SLOTS[0], PAGE + 1)
    assert l1.read(OTHER_SLOTS[1], 3 * PAGE) == l1.read(SLOTS[1], 3 * PAGE)


def test_unpacking_writes_no_byte_behind_a_slots_bytes() -> None:
    l1 = L1()
    before = l1.memory.raw
    l1.record(Fields(), OTHER_SLOTS).unpack(l1.record(Fields(), SLOTS).pack())
    behind = slice(41 * PAGE + 1, 42 * PAGE)
    assert l1.memory.raw[behind] == before[behind]


def test_packing_into_a_buffer_gives_the_same_bytes_as_packing() -> None:
    l1 = L1()
    record = l1.record(Fields(), SLOTS)
    buffer = bytearray(record.packed_bytes)
    record.pack_into(memoryview(buffer))
    assert bytes(buffer) == record.pack()
    with pytest.raises(ValueError, match="size"):
        record.pack_into(memoryview(buffer)[1:])


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (Fields(namespace=b"m" * 32), RecordMatch.CORRUPT),
        (Fields(namespace=b"n" * 64), RecordMatch.CORRUPT),
        (Fields(group=2), RecordMatch.CORRUPT),
        (Fields(key=b"l" * 32), RecordMatch.CORRUPT),
        (Fields(coverage=b"d" * 16), RecordMatch.OTHER),
        (Fields(generation=8), RecordMatch.OTHER),
        (Fields(slot_bytes=(PAGE + 2, 3 * PAGE)), RecordMatch.OTHER),
        (Fields(slot_bytes=(PAGE + 2, 3 * PAGE - 1)), RecordMatch.OTHER),
    ],
)
def test_a_record_of_another_header_is_refused_and_l1_is_untouched(other: Fields, match: RecordMatch) -> None:
    l1 = L1()
    packed = l1.record(Fields(), SLOTS).pack()
    before = l1.memory.raw
    assert l1.record(other, OTHER_SLOTS).unpack(packed) is match
    assert l1.record(other, OTHER_SLOTS).match_written(packed[:RECORD_HEADER_BYTES]) is match
    assert l1.memory.raw == before


@given(st.integers(0, 1 << 20), st.integers(0, 7))
@examples(300)
def test_a_flipped_bit_is_found_wherever_it_is(at: int, bit: int) -> None:
    l1 = L1()
    packed = bytearray(l1.record(Fields(), SLOTS).pack())
    at %= len(packed)
    packed[at] ^= 1 << bit
    found = l1.record(Fields(), OTHER_SLOTS).unpack(packed)
    reserved = 272 <= at < 336  # for a seal
    assert (found is RecordMatch.MATCH) == reserved


@pytest.mark.parametrize("cut", [0, 1, RECORD_HEADER_BYTES - 1, RECORD_HEADER_BYTES, -1])
def test_a_record_that_ends_early_is_corrupt(cut: int) -> None:
    l1 = L1()
    record = l1.record(Fields(), SLOTS)
    assert record.unpack(record.pack()[:cut]) is RecordMatch.CORRUPT
    assert record.unpack(record.pack() + b"x") is RecordMatch.CORRUPT


@given(st.lists(st.integers(0, RECORD_HEADER_BYTES + 4 * PAGE + 1)), st.randoms(use_true_random=False))
@examples(100)
def test_a_record_in_pieces_of_any_order_is_as_a_whole_one(cuts: list[int], shuffle: random.Random) -> None:
    l1 = L1()
    packed = l1.record(Fields(), SLOTS).pack()
    record, before, header = l1.record(Fields(), OTHER_SLOTS), l1.memory.raw, bytearray(RECORD_HEADER_BYTES)
    ends = sorted([0, *cuts, len(packed)])
    pieces = list(itertools.pairwise(ends))
    shuffle.shuffle(pieces)
    for begin, end in pieces:
        record.unpack_piece(header, begin, packed[begin:end])
    assert record.match_written(header) is RecordMatch.MATCH
    written = l1.memory.raw
    l1.memory.raw = before
    assert record.unpack(packed) is RecordMatch.MATCH
    assert l1.memory.raw == written


@pytest.mark.parametrize("at", [0, 100, RECORD_HEADER_BYTES, RECORD_HEADER_BYTES + PAGE, -1])
def test_a_byte_of_a_piece_that_is_wrong_or_not_there_is_found(at: int) -> None:
    l1 = L1()
    packed = bytearray(l1.record(Fields(), SLOTS).pack())
    record, header = l1.record(Fields(), OTHER_SLOTS), bytearray(RECORD_HEADER_BYTES)
    record.unpack_piece(header, 0, packed)
    at %= len(packed)
    packed[at] ^= 1
    record.unpack_piece(header, at, packed[at : at + 1])
    assert record.match_written(header) is RecordMatch.CORRUPT
    packed[at] ^= 1
    record.unpack_piece(header, at, packed[at : at + 1])
    assert record.match_written(header) is RecordMatch.MATCH


def test_a_piece_behind_the_record_is_refused_before_a_byte_moves() -> None:
    l1 = L1()
    record, header, before = l1.record(Fields(), SLOTS), bytearray(RECORD_HEADER_BYTES), l1.memory.raw
    for at in (record.packed_bytes - 1, record.packed_bytes + 1, (1 << 64) - 1):
        with pytest.raises(ValueError, match="behind the record"):
            record.unpack_piece(header, at, b"xy")
    with pytest.raises(ValueError, match="another size"):
        record.unpack_piece(header[1:], 0, b"xy")
    assert l1.memory.raw == before


@pytest.mark.parametrize(
    ("fields", "slots", "reason"),
    [
        (Fields(), (extents((PAGES - 1, 2)), SLOTS[1]), "do not lie in L1"),
        (Fields(), (extents(((1 << 32) - 1, 2)), SLOTS[1]), "do not lie in L1"),
        (Fields(), (extents((1, 0), (2, 2)), SLOTS[1]), "do not lie in L1"),
        (Fields(), (extents((1, 1)), SLOTS[1]), "too few pages"),
        (Fields(), (SLOTS[0], SLOTS[1][:-1]), "whole pairs"),
        (Fields(), SLOTS[:1], "has its bytes"),
        (Fields(slot_bytes=()), (), "1 to 448 slots"),
        (Fields(slot_bytes=(1,) * 449), (SLOTS[0],) * 449, "1 to 448 slots"),
        (Fields(slot_bytes=(0, 1)), SLOTS, "without bytes"),
        (Fields(slot_bytes=((1 << 64) - 1, 1)), SLOTS, "too few pages"),
        (Fields(namespace=b""), SLOTS, "namespace"),
        (Fields(namespace=b"n" * 129), SLOTS, "namespace"),
        (Fields(key=b"k" * 31), SLOTS, "key"),
        (Fields(coverage=b"c" * 17), SLOTS, "coverage"),
    ],
)  # fmt: skip
def test_invalid_record_is_refused_before_a_byte_moves(fields: Fields, slots: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        L1().record(fields, slots)


def test_fragmented_slots_of_many_ranks_round_trip() -> None:
    l1 = L1()
    pool = PagePool(PAGES * PAGE, PAGE)
    singles = [pool.allocate_pages(1) for _ in range(PAGES)]
    for page in singles[::2]:
        assert page is not None
        pool.free_pages(page)
    slots = tuple(pool.allocate_pages(5) or b"" for _ in range(6))
    assert all(len(slot) == 5 * 8 for slot in slots)
    fields = replace(Fields(), slot_bytes=(5 * PAGE, 4 * PAGE + 1, 5 * PAGE - 1, 1, PAGE, 2 * PAGE))
    record = l1.record(fields, slots)
    before = [l1.read(slot, count) for slot, count in zip(slots, fields.slot_bytes, strict=True)]
    packed = record.pack()
    l1.memory.raw = bytes(PAGES * PAGE)
    assert record.unpack(packed) is RecordMatch.MATCH
    assert [l1.read(slot, count) for slot, count in zip(slots, fields.slot_bytes, strict=True)] == before
