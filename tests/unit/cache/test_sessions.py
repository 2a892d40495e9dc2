"""Sessions: what only deleted ones used leaves L1 first, what is shared does not, and records stay small."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

import pytest
from hypothesis import given
from support.properties import Dice, examples, walks

from kvserver.cache import POLICIES, Cache, Groups, PagePool, SessionKey, SessionRecord, one_group
from kvserver.cache import sessions as sessions_module
from kvserver.cache.sessions import RECORD_BYTES
from kvserver.protocol import ObjectGroup

PAGE = 4096
NAMESPACE = b"n" * 32
Path = tuple[int, ...]
User = tuple[SessionKey, int] | None  # a session and how many of its name were deleted before it
every_policy = pytest.mark.parametrize("policy", POLICIES)


def key(id: str, salt: bytes = b"") -> SessionKey:
    return SessionKey(NAMESPACE, salt, id)


@dataclass
class Known:
    """A resident chunk in the plain model. `owner`: the only session that used it, the `number`-th chunk that a session got."""

    owner: User
    number: int


class World:
    """Requests over a small L1, one after the other, and a plain model beside it."""

    def __init__(self, policy: str, pages: int) -> None:
        self.cache = Cache(PagePool(pages * PAGE, PAGE), POLICIES[policy]())
        self.names: dict[bytes, Path] = {}
        self.known: dict[Path, Known] = {}
        self.live: set[SessionKey] = set()
        self.leased: set[Path] = set()
        self.deletions: Counter[SessionKey] = Counter()
        self.number = 0
        self.evicted: list[Path] = []
        self.counts: Counter[str] = Counter()

    def keys(self, path: Path) -> bytes:
        keys = []
        for end in range(1, len(path) + 1):
            name = bytes([end, *path[:end]]).ljust(32, b"\0")
            self.names[name] = path[:end]
            keys.append(name)
        return b"".join(keys)

    def request(
        self,
        path: Path,
        session: SessionKey | None,
        pieces: int = 0,
        store: bool = True,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> int:
        """Look the prompt up and store it, whole or in pieces that follow one another; returns its hits."""
        keys = self.keys(path)
        hits = self.cache.lookup(NAMESPACE, keys, ("e", "r"), 1e9, session).hit_chunks
        if session is not None:
            self.live.add(session)
        found = [path[:place] for place in range(1, hits + 1)]
        self.use(found, self.user(session))
        self.leased = set(found)
        meanwhile()
        if store:
            begin, step = (hits, pieces) if pieces else (0, len(path))
            for first in range(begin, len(path), step):
                self.store(path, first, min(first + step, len(path)), session)
        self.cache.end_lease(("e", "r"))
        self.leased = set()
        return hits

    def store(self, path: Path, first: int, end: int, session: SessionKey | None) -> None:
        if session is not None and not self.deletions[session]:
            self.live.add(session)
        keys, user = self.keys(path)[first * 32 : end * 32], self.user(session)
        named = [path[:place] for place in range(first + 1, end + 1)]
        self.use([name for name in named if name in self.known], user)
        busy = self.leased | set(named)
        plan = self.cache.plan_store(NAMESPACE, one_group(1), keys, PAGE, session=session)
        for victim in [self.names[name] for _, name in plan.evicted]:
            self.evict(victim, busy, user)
        self.cache.finish_store(plan, copied=True)
        for name in [self.names[chunk.key] for chunk in plan.chunks]:
            self.own(name, user)

    def evict(self, victim: Path, busy: set[Path], user: User) -> None:
        """A session that is deleted while its request runs may leave after that."""
        owner = self.known[victim].owner
        waiting = {
            path: known.number
            for path, known in self.known.items()
            if self.is_deleted(known.owner) and known.owner != user and path not in busy
        }
        if self.is_deleted(owner):
            self.counts["deleted"] += 1
            of_owner = [number for path, number in waiting.items() if self.known[path].owner == owner]
            assert owner == user or self.known[victim].number == max(of_owner), "another one was got later"
        else:
            self.counts["other"] += 1
            assert not waiting, f"{victim} left before {waiting}"
        self.evicted.append(victim)
        del self.known[victim]

    def use(self, names: list[Path], user: User) -> None:
        for name in names:
            owner = self.known[name].owner
            if owner not in (None, user):
                self.own(name, user if self.is_deleted(owner) else None)

    def own(self, path: Path, user: User) -> None:
        self.number += 1
        self.known[path] = Known(user, self.number)

    def user(self, session: SessionKey | None) -> User:
        """The session that is live, or the last one of its name."""
        return None if session is None else (session, self.deletions[session] - (session not in self.live))

    def is_deleted(self, user: User) -> bool:
        return user is not None and user != (user[0], self.deletions[user[0]])

    def delete(self, session: SessionKey) -> None:
        found = self.cache.sessions.session(session)
        assert (found is not None) == (session in self.live)
        if found is not None:
            self.cache.sessions.delete(found)
            self.live.remove(session)
            self.deletions[session] += 1

    def drain(self) -> None:
        self.cache.clear_namespaces()
        while self.cache.step():
            pass
        self.known.clear()


def record(cache: Cache, session: SessionKey) -> SessionRecord:
    found = cache.sessions.session(session)
    assert found is not None
    return found


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


def test_records_of_many_short_sessions_use_at_most_24_bytes_a_chunk() -> None:
    chunks = 60_000
    cache = Cache(PagePool(chunks * PAGE, PAGE), POLICIES["slru"]())

    def fill(first: int, session_chunks: int, sessions: bool) -> None:
        for number in range(first, first + chunks // session_chunks // 2):
            keys = b"".join((number * 1000 + n).to_bytes(32, "big") for n in range(session_chunks))
            user = key(f"session {number:200}") if sessions else None
            cache.lookup(NAMESPACE, keys, ("e", "r"), 1e9, user)
            cache.finish_store(cache.plan_store(NAMESPACE, one_group(1), keys, PAGE, session=user), copied=True)
            cache.end_lease(("e", "r"))

    fill(0, 300, sessions=True)
    tracemalloc.start()
    try:
        fill(10_000, 2, sessions=True)
        gc.collect()
        records = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/cache/sessions.py")])
    finally:
        tracemalloc.stop()
    used = sum(statistic.size for statistic in records.statistics("filename"))
    assert 0 < used <= cache.sessions.record_bytes <= RECORD_BYTES * chunks * 9 / 8
    assert RECORD_BYTES * 9 / 8 + 8 <= 24, "and a reference of each chunk"


def test_a_list_of_chunks_that_left_or_are_shared_stays_short() -> None:
    world = World("lru", 1500)
    cache = world.cache
    for turn in range(40):
        keys = b"".join((1000 * turn + place).to_bytes(32, "big") for place in range(500))
        cache.lookup(NAMESPACE, keys, ("e", "r"), 1e9, key("a"))
        cache.finish_store(cache.plan_store(NAMESPACE, one_group(1), keys, PAGE, session=key("a")), copied=True)
        cache.end_lease(("e", "r"))
        cache.lookup(NAMESPACE, keys[: 250 * 32], ("e", "other"), 1e9)
        cache.end_lease(("e", "other"))
        session = record(cache, key("a"))
        assert len(session.listed) <= 1.2 * session.chunks + 64
    cache.sessions.delete(session)
    world.drain()
    assert not session.listed
    assert not cache.sessions.record_bytes - session.bytes


def finish_after(cache: Cache, meanwhile: Callable[[], None]) -> None:
    """Plan a store of a session, finish it after what happens meanwhile, and end all chunks."""
    keys = b"".join(number.to_bytes(32, "big") for number in range(4))
    cache.lookup(NAMESPACE, keys, ("e", "r"), 1e9, key("a"))
    plan = cache.plan_store(NAMESPACE, one_group(1), keys, PAGE, session=key("a"), steps=0)
    meanwhile()
    cache.extend_plan(plan, 1000)
    cache.finish_store(plan, copied=True)
    cache.audit()
    cache.clear_namespaces()
    while cache.step():
        pass
    cache.audit()


def test_records_of_deletions_are_bounded_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_MOST_DELETED", 2)
    cache = Cache(PagePool(64 * PAGE, PAGE), POLICIES["slru"]())

    def delete_and_forget() -> None:
        for name in "abcd":
            cache.lookup(NAMESPACE, b"x" * 32, ("e", "other"), 1e9, key(name))
            cache.sessions.delete(record(cache, key(name)))

    for _ in range(3):
        finish_after(cache, delete_and_forget)
    assert cache.sessions.record_bytes < 4 * 1024, "of two deletions and of the session that the store made"


def test_sessions_without_chunks_give_way_and_one_that_does_not_fit_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_LEAST_CHUNKS", 250)
    cache = Cache(PagePool(64 * PAGE, PAGE), POLICIES["slru"]())

    def crowd_out() -> None:
        for number in range(9):
            cache.lookup(NAMESPACE, b"x" * 32, ("e", f"{number}"), 1e9, key(f"{number}"))
            cache.end_lease(("e", f"{number}"))
        assert cache.sessions.session(key("a")) is None
        assert cache.sessions.record_bytes <= RECORD_BYTES * 250

    for _ in range(3):
        finish_after(cache, crowd_out)
    for number in range(9):
        keys = b"".join((10 * number + place).to_bytes(32, "big") for place in range(2))
        cache.finish_store(cache.plan_store(NAMESPACE, one_group(1), keys, PAGE, session=key(f"{number}")), copied=True)
    cache.audit()
    owned = sum(one.chunks for one in cache.sessions)
    assert 0 < owned < 18 == cache.index.chunk_count, "some sessions have no record, and their chunks no owner"


def test_a_session_gets_only_the_chunks_for_which_its_list_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_LEAST_CHUNKS", 60)
    cache, sessions = Cache(PagePool(64 * PAGE, PAGE), POLICIES["slru"]()), sessions_module.Sessions(lambda: 0)
    keys = b"".join(number.to_bytes(32, "big") for number in range(20))
    cache.finish_store(cache.plan_store(NAMESPACE, one_group(1), keys, PAGE), copied=True)
    chunks = [chunk for chunk in cache.index.find_chunks(NAMESPACE, keys) if chunk is not None]
    session = sessions.of_lookup(key("a"), 0.0, None)
    assert session is not None
    sessions.add(session, chunks)
    assert 0 < session.chunks == session.pages < 20
    assert [chunk.session is session for chunk in chunks] == [place < session.chunks for place in range(20)]
    sessions.use(None, chunks)
    assert (session.chunks, session.pages, session.listed) == (0, 0, [])
    assert sessions.record_bytes == session.bytes <= RECORD_BYTES * 60


@pytest.mark.parametrize("looked_up", [False, True])
def test_old_sessions_with_chunks_do_not_keep_later_ones_from_a_record(looked_up: bool) -> None:
    cache = Cache(PagePool(2000 * PAGE, PAGE), POLICIES["slru"]())

    def store(name: str, number: int) -> None:
        keys = b"".join((4 * number + place).to_bytes(32, "big") for place in range(4))
        if looked_up:
            cache.lookup(NAMESPACE, keys, ("e", name), 1e9, key(name))
        cache.finish_store(cache.plan_store(NAMESPACE, one_group(1), keys, PAGE, session=key(name)), copied=True)

    for number in range(4):
        store(f"old {number}", number)
        cache.lookup(NAMESPACE, (4 * number).to_bytes(32, "big"), ("e", f"old {number}"), 1e9, key(f"old {number}"))
    recorded = 0
    for number in range(4, 1504):
        store(f"short {number}", number)
        cache.end_lease(("e", f"short {number}"))
        recorded += number >= 504 and cache.sessions.session(key(f"short {number}")) is not None
    assert recorded > 100


@pytest.mark.parametrize("ended_by", ["a clear", "another session"])
def test_deleted_sessions_without_chunks_are_forgotten(ended_by: str) -> None:
    cache = Cache(PagePool(100 * PAGE, PAGE), POLICIES["lru"]())
    for number in range(50):
        keys, session = (number if ended_by == "a clear" else 0).to_bytes(32, "big"), key(f"s{number}")
        cache.lookup(NAMESPACE, keys, ("e", "r"), 1e9, session)
        cache.finish_store(cache.plan_store(NAMESPACE, one_group(1), keys, PAGE, session=session), copied=True)
        cache.end_lease(("e", "r"))
        found = cache.sessions.session(session)
        assert found is not None
        cache.sessions.delete(found)
    if ended_by == "a clear":
        cache.clear_namespaces()
        while cache.step():
            pass
    assert len(cache.sessions.leaving) == (ended_by == "another session")


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
