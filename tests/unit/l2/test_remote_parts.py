"""The rules of remote tiers that need no store: existence, searches of chains, names, the breaker."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from support.l1_memory import NAMESPACE, key, keys, name
from support.properties import examples

from kvserver.l2 import ObjectName
from kvserver.l2.remote.breaker import FAILURES_TO_OPEN, StoreBreaker
from kvserver.l2.remote.existence import ABSENT_SECONDS, PRESENT_SECONDS, Existence
from kvserver.l2.remote.names import Names, scope_of, scopes_of
from kvserver.l2.remote.search import chain_length

SECOND = 1_000_000_000


def test_answers_about_existence_expire() -> None:
    memory = Existence()
    memory.note(name(1), True, 0)
    memory.note(name(2), False, 0)
    present, absent = int(PRESENT_SECONDS * SECOND), int(ABSENT_SECONDS * SECOND)
    assert (memory.find(name(1), present - 1), memory.find(name(1), present)) == (True, None)
    assert (memory.find(name(2), absent - 1), memory.find(name(2), absent)) == (False, None)
    assert memory.bitmap(NAMESPACE, 0, keys(1, 2, 3), present - 1) == 0b001
    assert memory.bitmap(NAMESPACE, 0, keys(1, 2, 3), present) == 0


def test_the_oldest_answers_of_the_scope_that_rests_are_forgotten_first() -> None:
    memory = Existence(most_answers=3)
    names = [name(1, group=1), name(2, group=1), name(3), name(4)]
    for each in names:
        memory.note(each, True, 0)
    assert [memory.find(each, 1) for each in names] == [None, True, True, True]
    assert len(memory) == 3


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans(), st.booleans()), max_size=60))
@examples(100)
def test_existence_is_a_bounded_dict(steps: list[tuple[int, int, bool, bool]]) -> None:
    memory, plain = Existence(most_answers=1000), dict[ObjectName, bool]()
    for number, group, present, forgets in steps:
        if forgets:
            memory.forget(name(number, group))
            plain.pop(name(number, group), None)
        else:
            memory.note(name(number, group), present, 0)
            plain[name(number, group)] = present
    assert len(memory) == len(plain)
    for number in range(6):
        for group in range(3):
            assert memory.find(name(number, group), 1) == plain.get(name(number, group))
    memory.forget_namespaces(NAMESPACE[:3])
    assert len(memory) == 0


@given(st.integers(0, 3000), st.floats(0, 1), st.integers(2, 600), st.booleans())
@examples(200)
def test_a_chains_length_is_found_in_few_round_trips(count: int, share: float, most: int, first_alone: bool) -> None:
    length = round(count * share)
    trips = 0

    def exist(places: Sequence[int]) -> list[bool]:
        nonlocal trips
        trips += 1
        assert len(places) <= max(most, count.bit_length() + 1)
        assert len(set(places)) == len(places)
        return [place < length for place in places]

    assert chain_length(count, most, exist, first_alone) == length
    assert trips <= max(1, count.bit_length()) + first_alone


def test_a_chain_that_does_not_begin_costs_one_question_where_each_is_a_request() -> None:
    asked: list[int] = []

    def exist(places: Sequence[int]) -> list[bool]:
        asked.extend(places)
        return [False] * len(places)

    assert chain_length(1000, 16, exist, first_alone=True) == 0
    assert asked == [0]


def test_a_chain_that_fits_into_one_round_trip_ends_at_its_first_gap() -> None:
    there = {0, 1, 3, 4}
    assert chain_length(6, 8, lambda places: [place in there for place in places]) == 2


def test_names_separate_all_that_must_differ() -> None:
    names = Names("p", 1)
    base = names.of(name(1), 7)
    assert base == f"p/1/{NAMESPACE.hex()}/0000000000000007/0/{key(1).hex()}"
    others = [names.of(name(2), 7), names.of(name(1, group=1), 7), names.of(name(1, namespace=b"m" * 32), 7)]
    assert len({base, names.of(name(1), 8), Names("p", 2).of(name(1), 7), *others}) == 6


def test_a_namespace_is_in_the_scope_of_each_of_its_parts() -> None:
    namespace = bytes(range(96))
    assert scopes_of(namespace) == [b"", namespace[:32], namespace[:64], namespace]
    assert [scope_of(namespace[:end]) for end in (0, 5, 32, 63, 96)] == [
        b"", b"", namespace[:32], namespace[:32], namespace,
    ]  # fmt: skip


def closed_breaker() -> StoreBreaker:
    breaker = StoreBreaker(random.Random(1))
    breaker.succeeded()
    return breaker


def test_the_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = closed_breaker()
    for _ in range(10):
        assert [breaker.failed(0) for _ in range(FAILURES_TO_OPEN - 1)] == [False] * (FAILURES_TO_OPEN - 1)
        breaker.succeeded()
    assert breaker.passes
    assert [breaker.failed(0) for _ in range(FAILURES_TO_OPEN)] == [False] * (FAILURES_TO_OPEN - 1) + [True]
    assert (breaker.passes, breaker.state, breaker.breaks) == (False, "open", 1)


def test_an_open_breaker_probes_with_growing_jittered_waits() -> None:
    breaker, now = closed_breaker(), 0
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(now)
    waits = []
    for _ in range(8):
        began = now
        while not breaker.begins_probe(now):
            now += SECOND // 100
        assert not breaker.begins_probe(now), "one probe at a time"
        waits.append((now - began) / SECOND)
        breaker.failed(now)
    for wait, middle in zip(waits, [1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert 0.5 * middle <= wait <= 1.5 * middle + 0.02
    while not breaker.begins_probe(now):
        now += SECOND
    breaker.succeeded()
    assert (breaker.passes, breaker.breaks) == (True, 1)
