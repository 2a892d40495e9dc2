"""Protected chunks stay in L1, within a bound, until the last protection that names them ends; what that costs others is exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from random import Random

import pytest
from hypothesis import given
from support.properties import Dice, examples, walks
from support.turns import repeat

from kvserver.cache import POLICIES, Cache, Groups, MissReason, PagePool, Protection, ProtectionEnd, one_group, tails_of
from kvserver.protocol import KEY_BYTES, ObjectGroup
from kvserver.restart.keeping import pins_of, restore_pins
from unit.cache.small_cache import PAGE, keys

NAMESPACES = {"a": b"a" * 32, "b": b"b" * 32}
FOREVER = 1e9
PROBE = ("probe", "probe")


def make(pages: int = 10, fraction: float = 1.0, policy: str = "lru", **shares: str) -> Cache:
    fractions = {model: Decimal(share) for model, share in shares.items()}
    cache = Cache(PagePool(pages * PAGE, PAGE), POLICIES[policy](), fractions)
    cache.protections.fraction = fraction
    return cache


def store(cache: Cache, names: str, model: str = "a", pages: int = 1, tenant: str = "") -> int:
    """Returns how many found no space."""
    plan = cache.plan_store(NAMESPACES[model], one_group(1), keys(names), pages * PAGE, model_name=model, tenant=tenant)
    cache.finish_store(plan, copied=True)
    return plan.no_space


def protect(
    cache: Cache, names: str, id: str = "p", model: str = "a", deadline: float = FOREVER, wanted: str = ""
) -> Protection | None:
    protection = Protection(id, "operator", NAMESPACES[model], cache.index.model(model), deadline, 0.0)
    cache.protect(protection, keys(names), lambda _: b"", lambda _: keys(wanted))
    return cache.protections.get(id)


def end(cache: Cache, id: str) -> None:
    protection = cache.protections.get(id)
    assert protection is not None
    cache.protections.end(protection, ProtectionEnd.DELETED)
    repeat(cache.step)


def resident(cache: Cache, names: str, model: str = "a") -> str:
    """The READY ones, without a use of them."""
    found = cache.index.find_chunks(NAMESPACES[model], keys(names))
    return "".join(name for name, chunk in zip(names, found, strict=True) if chunk is not None and chunk.ready)


def audit(cache: Cache) -> None:
    repeat(cache.step)
    cache.audit()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chunk_stays_until_the_last_protection_that_names_it_ends(policy: str) -> None:
    cache = make(policy=policy)
    store(cache, "abcd")
    assert protect(cache, "ab", "one")
    assert protect(cache, "abc", "two")
    for name in "stuvwxyz":
        store(cache, name)
    assert resident(cache, "abcd") == "abc"
    end(cache, "two")
    for name in "STUVWXYZ":
        store(cache, name)
    assert resident(cache, "abcd") == "ab"
    end(cache, "one")
    for name in "0123456789":
        store(cache, name)
    assert resident(cache, "abcd") == ""
    audit(cache)


def test_the_bound_clips_a_prompt_and_counts_a_chunk_once(cache_of_bound: Callable[[float], Cache]) -> None:
    cache = cache_of_bound(0.4)
    store(cache, "abcdef")
    assert protect(cache, "abcdef", "one").tokens == 4
    assert protect(cache, "abcdef", "two").tokens == 4, "both name the same chunks"
    store(cache, "xy")
    assert protect(cache, "xy", "three") is None
    end(cache, "one")
    audit(cache)
    assert protect(cache, "xy", "three") is None, "the other one still names them"
    end(cache, "two")
    audit(cache)
    assert protect(cache, "xy", "three").tokens == 2
    audit(cache)


@pytest.fixture
def cache_of_bound() -> Callable[[float], Cache]:
    return lambda fraction: make(fraction=fraction)


def test_protections_of_others_leave_a_model_its_share() -> None:
    cache = make(fraction=1.0, a="0.5")
    store(cache, "abcdefgh", "b")
    assert protect(cache, "abcdefgh", "others", "b").tokens == 5
    assert store(cache, "vwxyz", "a") == 0
    assert protect(cache, "vwxyz", "own", "a").tokens == 5
    assert store(cache, "q", "b") == 1, "all of L1 is protected: skipped as if all were leased, and no error"
    audit(cache)


def test_a_share_of_a_model_bounds_its_own_protections() -> None:
    cache = make(fraction=0.5, a="0.4")
    store(cache, "abcdef", "a")
    assert protect(cache, "abcdef").tokens == 2
    assert cache.protections.bound_pages == 5


def test_a_protection_uses_the_room_of_the_tenants_whose_chunks_it_protects() -> None:
    cache = make(fraction=0.5, **{"tenant:t": "0.4", "tenant:u": "0.2"})
    store(cache, "abc", tenant="t")
    store(cache, "de", tenant="u")
    store(cache, "fgh")
    assert protect(cache, "abc", "of t")
    assert protect(cache, "fgh", "of the model")
    assert protect(cache, "de", "of u")
    assert [protection.pages for protection in cache.protections] == [2, 2, 1]
    assert protect(cache, "c", "no room") is None
    end(cache, "of t")
    assert protect(cache, "cde", "of both") is not None, "of c and d: d is protected already"
    assert cache.protections.protected_pages == 4
    audit(cache)


def test_what_a_tenants_request_will_store_is_bounded_by_the_tenants_share() -> None:
    cache = make(fraction=0.5, a="0.2", **{"tenant:t": "0.4"})
    protection = Protection(
        "p", "request", NAMESPACES["a"], cache.index.model("a"), FOREVER, 0.0, tenant=cache.index.tenants["t"]
    )
    assert cache.protections.bound_of(protection) == 2
    store(cache, "x")
    assert protect(cache, "x", "the model's room is used")
    cache.protect(protection, b"", lambda _: b"", lambda _: keys("abc"))
    store(cache, "abc", tenant="t")
    assert (protection.pages, protection.note[:8]) == (2, "no_room:")
    audit(cache)


def test_protections_end_at_their_deadline_and_a_use_does_not_extend_them() -> None:
    cache = make()
    store(cache, "ab")
    protect(cache, "ab", "one", deadline=10.0)
    protect(cache, "ab", "two", deadline=20.0)
    cache.lookup(NAMESPACES["a"], keys("ab"), PROBE, 15.0)
    left = []
    for now in (9.99, 10.0, 30.0):
        cache.expire_leases(now)
        left.append(len(cache.protections))
    assert left == [2, 1, 0]
    assert cache.protections.ended == {ProtectionEnd.EXPIRED: 2}
    audit(cache)


def test_a_clear_ends_the_protections_of_its_namespaces() -> None:
    cache = make()
    store(cache, "ab", "a")
    store(cache, "cd", "b")
    protect(cache, "ab", "one", "a")
    protect(cache, "cd", "two", "b")
    cache.clear_namespaces(NAMESPACES["a"])
    assert [each.id for each in cache.protections] == ["two"]
    assert cache.protections.ended == {ProtectionEnd.CLEARED: 1}
    audit(cache)
    assert cache.pool.used_pages == 2
    cache.clear_namespaces()
    audit(cache)
    assert cache.pool.used_pages == 0


def test_what_l1_lacks_is_protected_when_it_arrives() -> None:
    cache = make(fraction=0.3)
    store(cache, "a")
    assert protect(cache, "ab", wanted="bcd").wanted
    for name in "bcd":
        store(cache, name)
    for name in "stuvwxyz01":
        store(cache, name)
    assert resident(cache, "abcd") == "abc", "the last one did not fit"
    (protection,) = cache.protections
    assert not protection.wanted
    assert protection.note.startswith("no_room")
    audit(cache)


def test_a_protection_that_names_nothing_does_not_begin() -> None:
    cache = make()
    assert protect(cache, "abc") is None
    store(cache, "bc")
    assert protect(cache, "abc") is None, "what is behind a hole is of no use"
    audit(cache)


def test_a_chunk_that_is_wanted_twice_is_freed_at_the_end() -> None:
    cache = make()
    store(cache, "a")
    protect(cache, "a", "keeper")
    protect(cache, "a", wanted="hh")
    audit(cache)
    end(cache, "p")
    store(cache, "h")
    (chunk,) = cache.index.find_chunks(NAMESPACES["a"], keys("h"))
    assert chunk is not None
    assert chunk.leases == 0
    audit(cache)


def test_a_clipped_protection_wants_nothing() -> None:
    cache = make(fraction=0.2)
    store(cache, "abcd")
    clipped = protect(cache, "abcdef", wanted="ef")
    assert clipped is not None
    assert (clipped.tokens, clipped.wanted) == (2, set())
    assert protect(cache, "abcdef", "two", wanted="ef").tokens == 2
    store(cache, "x")
    assert protect(cache, "xyz", "none", wanted="yz") is None, "nothing fits"
    assert protect(cache, "yz", "none", wanted="yz") is None, "nothing would fit"
    audit(cache)


def test_a_chunk_that_does_not_fit_ends_the_wish_for_those_behind_it() -> None:
    cache = make(fraction=0.2)
    store(cache, "a")
    protection = protect(cache, "abcd", wanted="bcd")
    store(cache, "bc")
    assert protection is not None
    assert (protection.tokens, protection.wanted) == (2, set())
    audit(cache)


def test_blocks_behind_the_last_chunk_that_do_not_fit_are_noted() -> None:
    cache = make(fraction=0.2)
    store(cache, "ab")
    groups = Groups([ObjectGroup("full", (0,), 1)], 1, 1, tails=True)
    plan = cache.plan_store(tails_of(NAMESPACES["a"]), groups, keys("xy"), PAGE, model_name="a")
    cache.finish_store(plan, copied=True)
    protection = Protection("p", "operator", NAMESPACES["a"], cache.index.model("a"), FOREVER, 0.0)
    assert cache.protect(protection, keys("ab"), lambda _: keys("xy")) == 2
    assert protection.note.startswith("no_room: 2 blocks")
    audit(cache)


def test_all_names_of_protections_are_counted_until_their_chunks_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make()
    room = cache.protections.room_for_names
    store(cache, "ab")
    protect(cache, "abc", wanted="c")
    protect(cache, "ab", "two")
    assert room - cache.protections.room_for_names == 5
    protection = cache.protections.get("p")
    assert protection is not None
    cache.protections.end(protection, ProtectionEnd.DELETED)
    assert room - cache.protections.room_for_names == 4
    audit(cache)
    kept = pins_of(cache)
    other = make()
    monkeypatch.setattr("kvserver.cache.protections.MOST_NAMES", 1)
    restore_pins(other, kept)
    assert (len(other.protections), other.protections.ended[ProtectionEnd.NOT_KEPT]) == (0, 1)
    monkeypatch.setattr("kvserver.cache.protections.MOST_NAMES", 2)
    restore_pins(other, kept)
    assert [each.id for each in other.protections] == ["two"]
    audit(other)


def test_chunks_of_a_sessions_lora_that_l2_has_are_wanted_after_a_restart() -> None:
    """They are in a namespace of their own. What no tier has is forgotten, in each namespace."""
    cache = make()
    session = Protection("p", "operator", NAMESPACES["a"], cache.index.model("a"), FOREVER, 0.0)
    cache.protections.add(session, [(NAMESPACES[model], keys(name)) for model, name in ("aa", "ab", "ba", "bb")])
    other = make()
    restore_pins(other, pins_of(cache))
    in_l2 = {(NAMESPACES["a"], keys("a")), (NAMESPACES["b"], keys("b"))}

    def present(namespace: bytes, _: int, asked: bytes) -> tuple[bytes, ...]:
        names = [asked[at : at + KEY_BYTES] for at in range(0, len(asked), KEY_BYTES)]
        return (b"".join([name for name in names if (namespace, name) in in_l2]),)

    other.protections.forget_lost(present)
    (protection,) = other.protections
    assert protection.wanted == in_l2
    assert protection.note.startswith("lost: 2 chunks")


def test_the_end_of_a_protection_does_not_make_its_chunks_younger() -> None:
    cache = make(4)
    store(cache, "abcd")
    protect(cache, "d")
    end(cache, "p")
    store(cache, "x")
    assert resident(cache, "abcd") == "abc"


# ---- what it costs others ---------------------------------------------------------------------------


def request(cache: Cache, names: str) -> MissReason | None:
    """Look a prompt up as a request does, and store what is missed. Returns why its first missed chunk is missed."""
    outcome = cache.lookup(NAMESPACES["a"], keys(names), PROBE, FOREVER)
    cache.end_lease(PROBE)
    if outcome.hit_chunks == len(names):
        return None
    store(cache, names)
    return outcome.missed[0][0]


OTHERS = "abcdefghijklmnopqr"


@pytest.mark.parametrize("prompts", [OTHERS, [*OTHERS, *["PQRS"] * 3], [*OTHERS, *["PQRS", "PQ"] * 3]])
@given(walks(120))
@examples(60)
def test_misses_that_pins_caused_are_those_that_l1_without_pins_would_not_have(
    prompts: list[str], steps: list[Dice]
) -> None:
    """Least recently used and chunks of one size: then it is exact, also while the pinned prompt is read."""
    with_pins, without = make(12), make(12)
    for cache in (with_pins, without):
        store(cache, "PQRS")
    protect(with_pins, "PQRS")
    for dice in steps:
        names = dice.choice(prompts)
        reason, other = request(with_pins, names), request(without, names)
        assert (reason is MissReason.PINNED_OUT) == (other is None and reason is not None), (names, reason, other)
    audit(with_pins)
    end(with_pins, "p")
    audit(with_pins)
    assert not any(with_pins.protections.displaced((NAMESPACES["a"], key)) for key in map(keys, OTHERS))


@pytest.mark.parametrize("share_of_pinned", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_count_of_misses_that_pins_caused_is_close_with_every_policy(policy: str, share_of_pinned: float) -> None:
    with_pins, without, source = make(100, policy=policy), make(100, policy=policy), Random(1)
    prompt = "".join(map(chr, range(0x4E00, 0x4E00 + 30)))
    for cache in (with_pins, without):
        store(cache, prompt)
    protect(with_pins, prompt)
    counted = caused = 0
    for _ in range(3000):
        names = prompt if source.random() < share_of_pinned else chr(0x5E00 + source.randrange(150))
        reason, other = request(with_pins, names), request(without, names)
        counted += reason is MissReason.PINNED_OUT
        caused += reason is not None and other is None
    assert caused > 300 if not share_of_pinned else caused < 100
    assert abs(counted - caused) <= 0.02 * caused + 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_prompt_that_is_read_grows_old_and_is_passed_over_again(policy: str) -> None:
    cache = make(12, policy=policy)
    store(cache, "PQRS")
    protect(cache, "PQRS")
    assert request(cache, "PQRS") is None
    for name in OTHERS * 2:
        request(cache, name), request(cache, name)
    assert cache.protections.passed_over == 4
    assert request(cache, "PQRS") is None
    for name in OTHERS * 2:
        request(cache, name), request(cache, name)
    assert cache.protections.passed_over == 8
    audit(cache)


# ---- a plain model ----------------------------------------------------------------------------------


@dataclass
class Plain:
    model: str
    names: frozenset[str]
    deadline: float


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=walks(60))
@examples(40)
def test_a_random_walk_never_loses_what_a_protection_names(policy: str, steps: list[Dice]) -> None:
    cache = make(16, 0.5, policy, a="0.4")
    bounds = {"a": int(0.5 * int(Decimal("0.4") * 16)), "b": int(0.5 * (16 - int(Decimal("0.4") * 16)))}
    live: dict[str, Plain] = {}
    now, number = 0.0, 0
    prompts = {"a": ["abcde", "abcxy", "mn"], "b": ["ABCDEF", "ABZ", "Q"]}

    def used(model: str) -> int:
        return len(frozenset().union(*(plain.names for plain in live.values() if plain.model == model)))

    def protect_some(dice: Dice) -> None:
        nonlocal number
        model = dice.choice("ab")
        prompt, id = dice.choice(prompts[model]), f"p{number}"
        number += 1
        there = resident(cache, prompt, model)
        leading = prompt[: next((at for at, name in enumerate(prompt) if name not in there), len(prompt))]
        already = frozenset().union(*(plain.names for plain in live.values() if plain.model == model))
        room, fits = bounds[model] - used(model), ""
        for name in leading:
            room -= name not in already
            if room < 0:
                break
            fits += name
        deadline = now + dice.choice([1.0, 5.0, FOREVER])
        found = protect(cache, prompt, id, model, deadline)
        assert (found.tokens if found is not None else 0) == len(fits)
        if fits:
            live[id] = Plain(model, frozenset(fits), deadline)

    def store_some(dice: Dice) -> None:
        model = dice.choice("ab")
        store(cache, dice.choice([*prompts[model], "".join(dice.sample("0123456789", 4))]), model)

    def look_up(dice: Dice) -> None:
        model = dice.choice("ab")
        cache.lookup(NAMESPACES[model], keys(dice.choice(prompts[model])), ("e", dice.choice("xyz")), now + 3)

    def pass_time(dice: Dice) -> None:
        nonlocal now, live
        now += dice.choice([0.5, 2.0])
        cache.expire_leases(now)
        live = {id: plain for id, plain in live.items() if plain.deadline > now}

    def end_one(dice: Dice) -> None:
        if live:
            id = dice.choice(sorted(live))
            end(cache, id)
            del live[id]

    def clear(dice: Dice) -> None:
        nonlocal live
        model = dice.choice("ab")
        cache.clear_namespaces(NAMESPACES[model])
        live = {id: plain for id, plain in live.items() if plain.model != model}

    def step(_: Dice) -> None:
        cache.step(1)

    actions = {store_some: 20, protect_some: 8, look_up: 8, pass_time: 3, end_one: 3, clear: 1, step: 4}
    for dice in steps:
        dice.choices(list(actions), list(actions.values()))[0](dice)
        assert {each.id for each in cache.protections} == live.keys()
        for plain in live.values():
            names = "".join(sorted(plain.names))
            assert resident(cache, names, plain.model) == names, f"{names} of {plain.model} left L1"
        for model, bound in bounds.items():
            assert used(model) <= bound
        repeat(cache.step) if dice.random() < 0.3 else None
    cache.end_leases_of("e")
    audit(cache)
    assert cache.protections.protected_pages == used("a") + used("b")


assert KEY_BYTES == 32
