"""How often hashes are present: against a plain Counter, also where hashes collide in the table."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples, walks

from kvserver._native import HashCounts


def test_a_hash_comes_once_and_goes_once():
    counts = HashCounts(1)
    one, two = b"1" * 32, b"2" * 32
    assert counts.add(one + two + one, 32) == b"\1\1\0"
    assert counts.contains(two + b"3" * 32, 32) == b"\1\0"
    assert counts.remove(one + two, 32) == b"\0\1"
    assert counts.remove(one, 32) == b"\1"
    assert len(counts) == 0


def test_removing_an_absent_hash_is_reported_and_changes_nothing():
    counts = HashCounts(1)
    counts.add(b"a" * 32, 32)
    assert counts.remove(b"b" * 32, 32) == b"\2"
    assert (len(counts), counts.contains(b"a" * 32, 32)) == (1, b"\1")


def test_shorter_hashes_are_filled_up_with_zeros():
    counts = HashCounts(1)
    counts.add(b"x" * 16, 16)
    assert counts.contains(b"x" * 16 + bytes(16), 32) == b"\1"


@pytest.mark.parametrize(("hashes", "hash_bytes"), [(b"12345", 4), (b"", 0), (bytes(66), 33)])
def test_hashes_that_are_not_whole_are_refused(hashes, hash_bytes):
    counts = HashCounts(1)
    for method in (counts.add, counts.remove, counts.contains):
        with pytest.raises(ValueError, match="no whole hashes"):
            method(hashes, hash_bytes)


@given(different=st.sampled_from([20, 2000]), seed=st.integers(0, (1 << 64) - 1), steps=walks(50))
@examples(10)
def test_random_additions_and_removals_agree_with_a_counter(different, seed, steps):
    names = [n.to_bytes(32, "big") for n in range(different)]
    counts, model = HashCounts(seed), Counter()
    for rng in steps:
        part, sign = rng.choices(names, k=rng.randint(1, 200)), rng.choice([1, 1, -1])
        flags = []
        for name in part:
            before, model[name] = model[name], max(0, model[name] + sign)
            flags.append(before == 0 if sign > 0 else 2 if before == 0 else before == 1)
        assert (counts.add if sign > 0 else counts.remove)(b"".join(part), 32) == bytes(flags)
    present = +model
    assert len(counts) == len(present)
    assert counts.contains(b"".join(names), 32) == bytes(name in present for name in names)
    found, cursor = [], 0
    while len(found) <= len(present):
        part, cursor = counts.slice(cursor, 7)
        assert len(part) <= 7 * 32
        if not part:
            break
        found += [part[at : at + 32] for at in range(0, len(part), 32)]
    assert sorted(found) == sorted(present)


def test_memory_is_what_the_header_states():
    counts = HashCounts(1)
    counts.add(random.Random(1).randbytes(32 * 100_000), 32)
    assert counts.memory_bytes / len(counts) <= 40 * 2 / 0.75
    assert len(counts) * 40 / counts.memory_bytes <= 0.75
