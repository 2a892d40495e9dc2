"""Who holds which blocks: against a plain dict of counts, prompt by prompt."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plain_match import plain_match
from support.properties import examples, walks

from kvserver._native import PrefixIndex

ROOM = 64 << 20


def hashes_of(seed: int, count: int, hash_bytes: int = 32) -> list[bytes]:
    generator = random.Random(seed)
    return [generator.randbytes(hash_bytes) for _ in range(count)]


def test_leading_blocks_are_found_up_to_the_first_that_is_missing():
    index, blocks = PrefixIndex(1, ROOM), hashes_of(1, 10)
    owner = index.add_owner()
    index.add_blocks(owner, b"".join(blocks[:4] + blocks[5:]), 32)
    assert index.match(b"".join(blocks), 32, [(owner, -1, -1, 1)]) == [(4, 0, 0, 4)]


def test_match_continues_from_one_tier_to_the_next():
    index, blocks = PrefixIndex(1, ROOM), hashes_of(1, 16)
    l0, l1, l2 = index.add_owner(), index.add_owner(), index.add_owner()
    index.add_blocks(l0, b"".join(blocks[0:2] + blocks[8:11]), 32)
    index.add_blocks(l1, blocks[7], 32)  # chunk 1 of 4 blocks
    index.add_blocks(l2, blocks[3], 32)  # chunk 0
    reader = (l0, l1, l2, 4)
    assert index.match(b"".join(blocks), 32, [reader]) == [(2, 0, 4, 11)]
    assert index.match(b"".join(blocks[:7]), 32, [reader]) == [(2, 0, 4, 4)], "half a chunk cannot be loaded"


def test_the_owners_of_the_last_block_of_each_so_many_are_read():
    index, blocks = PrefixIndex(1, ROOM), hashes_of(1, 1000)
    one, two = index.add_owner(), index.add_owner()
    index.add_blocks(one, b"".join(blocks[::3]), 32)
    index.add_blocks(two, b"".join(blocks[::2]), 32)
    for every in (1, 3, 4, 1000, 1001):
        ends = range(every - 1, 1000, every)
        expected = [(end % 3 == 0) << one | (end % 2 == 0) << two for end in ends]
        for hashes, width in ((b"".join(blocks), 32), (b"".join(block[-8:] for block in blocks), 8)):
            assert list(memoryview(index.owners_of(hashes, width, every)).cast("Q")) == expected
    index.clear_owner(two)
    assert set(index.owners_of(b"".join(blocks), 32, 2)) == {0, 1 << one}
    for hashes, width, every in ((bytes(32), 32, 0), (bytes(33), 32, 1), (b"", 0, 1)):
        with pytest.raises(ValueError, match=r"blocks|whole hashes"):
            index.owners_of(hashes, width, every)


def test_match_continues_behind_the_hashes_that_are_looked_up_at_once():
    index, blocks = PrefixIndex(1, ROOM), hashes_of(1, 3000)
    l0, l1 = index.add_owner(), index.add_owner()
    index.add_blocks(l0, b"".join(blocks[:120]), 32)
    index.add_blocks(l1, blocks[999] + blocks[1999], 32)
    assert index.match(b"".join(blocks), 32, [(l0, l1, -1, 1000)]) == [(120, 2000, 0, 2000)]


def test_hashes_of_any_length_are_known_by_their_last_8_bytes():
    index = PrefixIndex(1, ROOM)
    owner = index.add_owner()
    index.add_blocks(owner, b"12345678" * 4, 32)
    for hash_bytes in (8, 16, 32):
        assert index.match(b"-" * (hash_bytes - 8) + b"12345678", hash_bytes, [(owner, -1, -1, 1)])[0][0] == 1


@pytest.mark.parametrize(("hashes", "hash_bytes"), [(b"1234", 4), (b"", 0), (bytes(66), 33), (bytes(33), 32)])
def test_hashes_that_are_not_whole_are_refused(hashes, hash_bytes):
    index = PrefixIndex(1, ROOM)
    owner = index.add_owner()
    for call in (
        lambda: index.add_blocks(owner, hashes, hash_bytes),
        lambda: index.remove_blocks(owner, hashes, hash_bytes),
        lambda: index.match(hashes, hash_bytes, [(owner, -1, -1, 1)]),
    ):
        with pytest.raises(ValueError, match="no whole hashes"):
            call()


def test_a_owner_that_was_not_opened_is_refused():
    index = PrefixIndex(1, ROOM)
    for owner in (-1, 0, 64):
        for call in (lambda h=owner: index.add_blocks(h, bytes(8), 8), lambda h=owner: index.remove_owner(h)):
            with pytest.raises(ValueError, match="no owner"):
                call()
    with pytest.raises(ValueError, match="unknown owners"):
        index.match(bytes(8), 8, [(64, -1, -1, 1)])


def test_a_block_is_absent_after_as_many_removals_as_additions():
    index, (block,) = PrefixIndex(1, ROOM), hashes_of(1, 1)
    one, two = index.add_owner(), index.add_owner()
    index.add_blocks(one, block * 3, 32)
    index.add_blocks(two, block, 32)
    assert (len(index), index.owned_blocks(one), index.owned_blocks(two)) == (1, 1, 1)
    assert index.remove_blocks(one, block * 2, 32) == 0
    assert index.match(block, 32, [(one, -1, -1, 1)])[0][0] == 1
    assert index.remove_blocks(one, block * 2, 32) == 1, "the fourth was not there"
    assert index.match(block, 32, [(one, -1, -1, 1), (two, -1, -1, 1)]) == [(0, 0, 0, 0), (1, 0, 0, 1)]


def test_64_owners_are_distinguished_and_then_there_are_no_more():
    index, blocks = PrefixIndex(1, ROOM), hashes_of(1, 64)
    owners = [index.add_owner() for _ in range(64)]
    assert sorted(owners) == list(range(64))
    assert index.add_owner() == -1
    for number, owner in enumerate(owners):
        index.add_blocks(owner, b"".join(blocks[: number + 1]), 32)
    found = index.match(b"".join(blocks), 32, [(owner, -1, -1, 1) for owner in owners])
    assert [match[0] for match in found] == list(range(1, 65))
    index.remove_owner(owners[7])
    assert index.add_owner() == owners[7]
    assert index.match(b"".join(blocks), 32, [(owners[7], -1, -1, 1)])[0][0] == 0


def test_a_owner_that_is_cleared_leaves_the_others_alone():
    index, blocks = PrefixIndex(1, ROOM), hashes_of(1, 5000)
    one, two = index.add_owner(), index.add_owner()
    index.add_blocks(one, b"".join(blocks) * 2, 32)
    index.add_blocks(two, b"".join(blocks[:3000]), 32)
    index.clear_owner(one)
    readers = [(one, -1, -1, 1), (two, -1, -1, 1)]
    assert [match[0] for match in index.match(b"".join(blocks), 32, readers)] == [0, 3000]
    assert (len(index), index.owned_blocks(one), index.owned_blocks(two)) == (3000, 0, 3000)
    index.add_blocks(one, blocks[0], 32)
    index.remove_blocks(one, blocks[0], 32)
    assert index.owned_blocks(one) == 0, "how often it was added was forgotten too"


def test_blocks_that_exceed_the_memory_are_refused_and_counted():
    index, most = PrefixIndex(1, 1 << 20), 1 << 20
    owner = index.add_owner()
    blocks = hashes_of(1, 100_000, 8)
    refused = index.add_blocks(owner, b"".join(blocks), 8)
    assert 0 < refused == index.refused
    assert index.owned_blocks(owner) == len(index) == len(blocks) - refused
    assert index.memory_bytes <= most
    again = index.add_blocks(owner, b"".join(blocks), 8)
    assert again >= refused
    assert index.memory_bytes <= most
    index.clear_owner(owner)
    assert index.add_blocks(owner, b"".join(blocks[:1000]), 8) == 0


def test_a_block_uses_at_most_32_bytes():
    index = PrefixIndex(1, ROOM)
    owner = index.add_owner()
    generator = random.Random(1)
    for _ in range(40):
        index.add_blocks(owner, generator.randbytes(25_000 * 8), 8)
        if len(index) >= 100_000:
            assert 16 < index.memory_bytes / len(index) <= 32
    assert len(index) == 1_000_000


def test_hashes_that_differ_little_are_found_as_fast_as_any():
    """They share 62 of 64 bits pattern-wise; were their places alike, this would take minutes."""
    index = PrefixIndex(1, ROOM)
    owner = index.add_owner()
    for shift in (0, 16, 44):
        blocks = [(number << shift).to_bytes(8, "little") for number in range(1, 200_000)]
        index.add_blocks(owner, b"".join(blocks), 8)
        assert index.match(b"".join(blocks), 8, [(owner, -1, -1, 1)])[0][0] == len(blocks)


@pytest.mark.parametrize("seed", range(2))
def test_each_block_of_a_crowded_table_is_found_as_long_as_it_is_present(seed):
    """So many that most lines are full, and the blocks behind a full line move up when others go."""
    generator = random.Random(seed)
    index = PrefixIndex(generator.getrandbits(64), ROOM)
    owners = [index.add_owner(), index.add_owner()]
    blocks = hashes_of(seed, 30_000, 8)
    held: list[set[bytes]] = [set(), set()]
    for _ in range(12):
        for owner, known in zip(owners, held, strict=True):
            come = [block for block in generator.sample(blocks, 10_000) if block not in known]
            gone = generator.sample(sorted(known), len(known) // 3)
            assert index.add_blocks(owner, b"".join(come), 8) == 0
            assert index.remove_blocks(owner, b"".join(gone), 8) == 0
            known |= set(come)
            known -= set(gone)
        readers = [(owner, -1, -1, 1) for owner in owners]
        for block in generator.sample(blocks, 3_000):
            found = [match[0] for match in index.match(block, 8, readers)]
            assert found == [int(block in known) for known in held]
        at_once = sorted(held[0] & held[1])
        assert [match[0] for match in index.match(b"".join(at_once), 8, readers)] == [len(at_once)] * 2
    assert len(index) == len(held[0] | held[1]) > 20_000


@given(seed=st.integers(0, (1 << 64) - 1), steps=walks(100))
@examples(15)
def test_random_additions_and_removals_agree_with_a_plain_model(seed, steps):
    index = PrefixIndex(seed, ROOM)
    prompts = [hashes_of(n, 300) for n in range(3)]
    prompts += [prompt[:alike] + hashes_of(3, 200) for prompt, alike in zip(prompts, (1, 150, 299), strict=True)]
    counts: list[Counter[bytes]] = [Counter() for _ in range(64)]
    owners = [index.add_owner() for _ in range(6)]
    for rng in steps:
        owner, prompt = rng.choice(owners), rng.choice(prompts)
        first = rng.choice([0, 0, rng.randrange(len(prompt))])
        part = prompt[first : first + rng.randrange(1, 300)]
        action = rng.random()
        if action < 0.6:
            assert index.add_blocks(owner, b"".join(part), 32) == 0
            counts[owner].update(part)
        elif action < 0.95:
            unknown = 0
            for block in part:
                unknown += counts[owner][block] == 0
                counts[owner][block] = max(0, counts[owner][block] - 1)
            assert index.remove_blocks(owner, b"".join(part), 32) == unknown
        elif action < 0.98:
            index.clear_owner(owner)
            counts[owner].clear()
        else:
            index.remove_owner(owner)
            counts[owner].clear()
            assert index.add_owner() == owner
        readers = [(*(rng.choice([*owners, -1]) for _ in range(3)), rng.choice([1, 3, 16])) for _ in "123"]
        prompt = rng.choice(prompts)
        assert index.match(b"".join(prompt), 32, readers) == [plain_match(prompt, counts, r) for r in readers]
    held = [{block for block, count in counts[owner].items() if count} for owner in owners]
    assert [index.owned_blocks(owner) for owner in owners] == [len(blocks) for blocks in held]
    assert len(index) == len(set().union(*held))
