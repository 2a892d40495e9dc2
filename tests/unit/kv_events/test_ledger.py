"""Blocks are published once when they are stored and once when they are removed, whatever chunks share them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from support.properties import examples, walks

from kvserver.kv_events.ledger import Ledger
from kvserver.kv_events.types import Description


def chunk(*names: str) -> Description:
    hashes = b"".join(name.encode().ljust(32, b".") for name in names)
    return Description(32, hashes, b"", bytes(4 * 16 * len(names)), 16)


def test_chunks_that_part_share_their_first_blocks():
    ledger = Ledger()
    one, other = chunk("a", "b", "c"), chunk("a", "b", "x")
    assert ledger.stored(one) == [(0, 3)]
    assert ledger.stored(other) == [(2, 3)]
    assert ledger.removed(one) == [(2, 3)]
    assert ledger.removed(other) == [(0, 3)]
    assert (len(ledger), ledger.unbalanced) == (0, 0)


def test_runs_are_split_where_a_block_is_resident_already():
    ledger = Ledger()
    ledger.stored(chunk("b"))
    assert ledger.stored(chunk("a", "b", "c", "d")) == [(0, 1), (2, 4)]


def test_a_removal_without_a_store_is_counted():
    ledger = Ledger()
    assert ledger.removed(chunk("a", "b")) == []
    assert ledger.unbalanced == 2


@given(steps=walks(100))
@examples(20)
def test_random_chunks_agree_with_a_counter(steps):
    ledger, model, there = Ledger(), Counter(), []
    for generator in steps:
        if there and generator.random() < 0.5:
            names = there.pop(generator.randrange(len(there)))
            model.subtract(names)
            ended = [at for at, name in enumerate(names) if model[name] == 0]
            assert [at for first, last in ledger.removed(chunk(*names)) for at in range(first, last)] == ended
        else:
            names = [f"{generator.randrange(30)}" for _ in range(4)]
            if len(set(names)) < 4:
                continue
            fresh = [at for at, name in enumerate(names) if model[name] == 0]
            model.update(names)
            there.append(names)
            assert [at for first, last in ledger.stored(chunk(*names)) for at in range(first, last)] == fresh
        assert len(ledger) == sum(count > 0 for count in model.values())
    assert ledger.unbalanced == 0
