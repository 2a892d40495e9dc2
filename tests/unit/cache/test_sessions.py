"""Sessions: what only deleted ones used leaves L1 first, what is shared does not."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import given
from support.properties import Dice, examples, walks

from kvserver.cache import POLICIES, Cache, Groups, PagePool, SessionKey, one_group
from kvserver.protocol import ObjectGroup
from unit.cache.session_world import NAMESPACE, PAGE, Path, World, key, record

every_policy = pytest.mark.parametrize("policy", POLICIES)


def walked(policy: str, steps: list[Dice], evictions: Counter[str]) -> None:
    users = [None, key("a"), key("b"), key("a", b"salt"), key("a"), key("a"), key("b")]
    world = World(policy, 14)
    for dice in steps:
        path, user = tuple(dice.randrange(2) for _ in range(dice.randint(1, 5))), dice.choice(users)
        pieces, store = dice.randrange(3), dice.random() < 0.9
        before, under_way = (dice.choice(users[1:4]) if dice.random() < 0.1 else None for _ in range(2))

        def meanwhile(
            deleted: SessionKey | None = under_way, user: SessionKey | None = user, path: Path = path
        ) -> None:
            if deleted is not None:
                world.delete(deleted)
                world.cache.lookup(NAMESPACE, world.keys(path), ("e", "r"), 1e9, user)  # renews

        if before is not None:
            world.delete(before)
        world.request(path, user, pieces, store, meanwhile)
        world.cache.step()
        world.cache.audit()
        owners = Counter(known.owner for known in world.known.values() if known.owner is not None)
        for session in world.live:
            assert record(world.cache, session).chunks == owners[session, world.deletions[session]]
    evictions.update(world.counts)
    world.drain()
    world.cache.audit()


@every_policy
@pytest.mark.hypothesis
def test_chunks_of_deleted_sessions_leave_first_as_in_a_plain_model(policy: str) -> None:
    evictions = Counter[str]()

    @given(steps=walks(60))
    @examples(60)
    def walk(steps: list[Dice]) -> None:
        walked(policy, steps, evictions)

    walk()
    assert min(evictions["deleted"], evictions["other"]) > 100, evictions


def test_a_deleted_session_leaves_before_an_older_prompt_its_last_chunk_first() -> None:
    world = World("slru", 12)
    world.request((9, 9, 9), None)
    world.request((1, 1, 1, 1), key("a"))
    world.request((1, 1, 2), key("a"))
    world.delete(key("a"))
    world.request((3,) * 8, None)
    assert world.evicted == [(1, 1, 2), (1, 1, 1, 1), (1, 1, 1), (1, 1)]


def test_a_session_of_another_salt_with_the_same_id_is_another_one() -> None:
    world = World("slru", 12)
    world.request((1, 1, 1), key("a", b"mine"))
    world.request((2, 2), key("a", b"other"))
    world.delete(key("a", b"other"))
    world.request((3,) * 8, None)
    assert world.evicted == [(2, 2)], "the other salt's own"
    assert record(world.cache, key("a", b"mine")).chunks == 3


def test_what_another_session_used_stays_when_one_is_deleted() -> None:
    world = World("slru", 7)
    world.request((1, 1, 1, 1), key("a"))
    world.request((1, 1, 2), key("b"))
    world.delete(key("a"))
    world.request((3,) * 3, None)
    assert world.evicted == [(1, 1, 1, 1)]
    world.request((4,), None)
    assert world.evicted[1:] == [(1, 1, 1)]
    assert (1, 1, 2) in world.known


def test_what_a_session_uses_of_a_deleted_one_is_its_own() -> None:
    world = World("slru", 12)
    world.request((1, 1, 1, 1), key("a"))
    world.delete(key("a"))
    world.request((1, 1, 1), key("b"))
    assert record(world.cache, key("b")).chunks == 3
    world.delete(key("b"))
    world.request((1, 1), None)
    world.request((2,) * 10, None)
    assert set(world.evicted) == {(1, 1, 1, 1), (1, 1, 1)}


@pytest.mark.parametrize("found", [True, False])
def test_a_renewed_lookup_does_not_revive_a_deleted_session_and_a_new_one_does(found: bool) -> None:
    world = World("slru", 40)
    world.request((1, 1), key("a"))
    keys = world.keys((1, 1) if found else (3, 3))

    def look_up() -> None:
        world.cache.lookup(NAMESPACE, keys, ("e", "waiting"), 1e9, key("a"))

    look_up()
    world.delete(key("a"))
    look_up()
    world.cache.lookup(NAMESPACE, keys, ("e", "waiting"), 1e9, shares=False)  # after a fill
    look_up()
    assert world.cache.sessions.session(key("a")) is None
    world.cache.end_leases_of("e")
    look_up()
    assert world.cache.sessions.session(key("a")) is not None, "the engine began anew"
    while world.cache.step():
        pass
    world.cache.audit()


def test_leases_of_requests_that_found_nothing_end_as_others_do() -> None:
    world = World("slru", 40)
    for number in range(100):
        world.cache.lookup(NAMESPACE, b"x" * 32, ("e", f"{number}"), 1.0, key("a"))
    assert world.cache.lease_count == 100
    world.cache.expire_leases(2.0)
    while world.cache.step():
        pass
    assert world.cache.lease_count == 0


def test_a_store_that_ends_after_its_session_was_deleted_leaves_first_and_does_not_revive_it() -> None:
    world = World("slru", 12)
    world.request((1, 1), key("a"))
    world.delete(key("a"))
    world.store((1, 1, 1), 2, 3, key("a"))
    world.store((2,), 0, 1, key("a"))
    assert world.cache.sessions.session(key("a")) is None
    world.request((3,) * 10, None)
    assert world.evicted == [(2,), (1, 1, 1)]
    world.request((1, 1), key("a"))
    assert record(world.cache, key("a")).chunks == 2, "a new request begins a new session"


def test_a_deleted_session_in_use_leaves_once_its_request_has_ended() -> None:
    world = World("slru", 6)
    world.request((9,), None)
    world.request((1, 1, 1, 1), key("a"))
    world.cache.lookup(NAMESPACE, world.keys((1, 1, 1, 1)), ("e", "running"), 1e9, key("a"))
    world.delete(key("a"))
    kept = {path: known for path, known in world.known.items() if path[0] == 1}
    for path in kept:
        world.known[path].owner = None  # as long as it is in use
    world.request((2, 2), None)
    assert world.evicted == [(9,)]
    world.cache.end_lease(("e", "running"))
    world.cache.plan_store(NAMESPACE, one_group(1), world.keys((3,)), PAGE)
    assert world.cache.index.find_chunks(NAMESPACE, world.keys((1, 1, 1, 1)))[-1] is None


FULL, WINDOW = ObjectGroup("full", (0,), 16), ObjectGroup("window", (1,), 16, tokens=64)
REPLICATED = ObjectGroup("full", (0,), 16, replicated=True)
LAYOUTS = {
    "one group": ([FULL], 1, [0]),
    "two ranks": ([FULL], 2, [0]),
    "ranks take turns": ([REPLICATED], 2, [0]),
    "window only": ([WINDOW], 1, [0]),
    "window last": ([FULL, WINDOW], 1, [0, 1]),
    "window first": ([FULL, WINDOW], 1, [1, 0]),
    "window first, two ranks": ([FULL, WINDOW], 2, [1, 0]),
    "window first, ranks take turns": ([REPLICATED, WINDOW], 2, [1, 0]),
    "two full groups, one in turns": ([REPLICATED, FULL], 2, [0, 1]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_session_of_any_layout_owns_all_its_chunks_and_their_pages(layout: str) -> None:
    groups, ranks, order = LAYOUTS[layout]
    cache, made_of = Cache(PagePool(400 * PAGE, PAGE), POLICIES["slru"]()), Groups(groups, ranks, 16)
    chunks = [number.to_bytes(32, "big") for number in range(30)]
    for first in range(0, len(chunks), 3):
        cache.lookup(NAMESPACE, b"".join(chunks[: first + 3]), ("e", "r"), 1e9, key("a"))
        for group in order:
            for rank in range(ranks):
                places, slot = range(3), made_of.first[group] + rank
                if groups[group].replicated:
                    places, slot = range((rank - first) % ranks, 3, ranks), made_of.first[group]
                plan = cache.plan_store(
                    NAMESPACE, made_of, b"".join(chunks[first + place] for place in places), PAGE,
                    group=group, slots=range(slot, slot + 1), places=places, session=key("a"),
                )  # fmt: skip
                cache.finish_store(plan, copied=True)
        cache.end_lease(("e", "r"))
    session = record(cache, key("a"))
    assert (session.chunks, session.pages) == (len(chunks), cache.pool.used_pages)
    cache.audit()


def test_a_store_of_a_window_that_names_no_session_shares_nothing() -> None:
    cache, made_of = Cache(PagePool(64 * PAGE, PAGE), POLICIES["slru"]()), Groups([FULL, WINDOW], 1, 16)
    keys = b"".join(number.to_bytes(32, "big") for number in range(6))
    for group, user in ((0, key("a")), (1, None)):
        plan = cache.plan_store(
            NAMESPACE, made_of, keys, PAGE, group=group, slots=range(group, group + 1), session=user
        )  # fmt: skip
        cache.finish_store(plan, copied=True)
    assert record(cache, key("a")).chunks == 6


@pytest.mark.parametrize("user", [None, key("b")])
def test_a_store_that_finds_chunks_of_another_session_shares_them(user: SessionKey | None) -> None:
    world = World("slru", 40)
    world.request((1,) * 4, key("a"))
    world.store((1,) * 6, 2, 6, user)
    assert record(world.cache, key("a")).chunks == 2


@every_policy
def test_a_deleted_session_leaves_first_where_its_model_has_a_share(policy: str) -> None:
    cache = Cache(PagePool(16 * PAGE, PAGE), POLICIES[policy](), {"m": Decimal(1)})
    evicted: list[int] = []

    def request(prompt: int, count: int, session: SessionKey | None = None) -> None:
        keys = b"".join(bytes([prompt, place]).ljust(32, b"\0") for place in range(count))
        plan = cache.plan_store(NAMESPACE, one_group(1), keys, PAGE, model_name="m", session=session)
        cache.finish_store(plan, copied=True)
        evicted.extend(name[0] for _, name in plan.evicted)

    request(1, 4)
    request(2, 4, key("a"))
    request(3, 4)
    request(4, 4)
    request(5, 1)
    found = cache.sessions.session(key("a"))
    assert found is not None
    cache.sessions.delete(found)
    request(6, 4)
    assert evicted == [1, 2, 2, 2, 2]
    cache.audit()


def test_a_chunk_that_a_lookup_names_twice_is_lost_once() -> None:
    cache = Cache(PagePool(200 * PAGE, PAGE), POLICIES["lru"]())
    names = [number.to_bytes(32, "big") for number in range(4)]
    cache.finish_store(cache.plan_store(NAMESPACE, one_group(1), b"".join(names), PAGE, session=key("a")), copied=True)
    cache.lookup(NAMESPACE, b"".join([*names[:2], names[1], names[1]]), ("e", "r"), 1.0, key("b"))
    cache.end_lease(("e", "r"))
    found = cache.sessions.session(key("a"))
    assert found is not None
    assert found.chunks == 2
    cache.audit()
