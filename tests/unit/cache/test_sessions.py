"""Sessions: what only superseded ends use leaves L1 first, what is shared does not, and records stay small."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import Dice, examples, walks

from kvserver.cache import POLICIES, SUPERSEDED_AFTER, Cache, Groups, PagePool, SessionKey, one_group
from kvserver.cache import sessions as sessions_module
from kvserver.cache.sessions import RECORD_BYTES
from kvserver.protocol import ObjectGroup

PAGE = 4096
NAMESPACE = b"n" * 32
AFTER = 3
Path = tuple[int, ...]
every_policy = pytest.mark.parametrize("policy", POLICIES)


def key(id: str, salt: bytes = b"") -> SessionKey:
    return SessionKey(NAMESPACE, salt, id)


@dataclass
class Known:
    """A resident chunk in the plain model. `user`: the only session that used it, None: shared. `last`: its number of that use.

    `deletions`: of the session, before that use.
    """

    user: SessionKey | None
    last: int
    deletions: int


class World:
    """Requests over a small L1, one after the other, and a plain model beside it."""

    def __init__(self, policy: str, pages: int, after: int = AFTER) -> None:
        self.cache = Cache(PagePool(pages * PAGE, PAGE), POLICIES[policy]())
        self.cache.sessions.superseded_after = self.after = after
        self.names: dict[bytes, Path] = {}
        self.known: dict[Path, Known] = {}
        self.uses: Counter[SessionKey] = Counter()
        self.deletions: Counter[SessionKey] = Counter()
        self.before_a_hole: set[Path] = (
            set()
        )  # a chunk behind these left before the chunks behind it: pieces of a store age apart
        self.evicted: list[Path] = []
        self.counts: Counter[str] = Counter()

    def keys(self, path: Path) -> bytes:
        keys = []
        for end in range(1, len(path) + 1):
            name = bytes([end, *path[:end]]).ljust(32, b"\0")
            self.names[name] = path[:end]
            keys.append(name)
        return b"".join(keys)

    def request(self, path: Path, session: SessionKey | None, pieces: int = 0, store: bool = True) -> int:
        """Look the prompt up and store it, whole or in pieces that follow one another; returns its hits."""
        keys = self.keys(path)
        hits = self.cache.lookup(NAMESPACE, keys, ("e", "r"), 1e9, session).hit_chunks
        if session is not None:
            self.uses[session] += 1
        self.use(path[:hits], session)
        if store:
            begin, step = (hits, pieces) if pieces else (0, len(path))
            for first in range(begin, len(path), step):
                self.store(path, keys, first, min(first + step, len(path)), session)
        self.cache.end_lease(("e", "r"))
        return hits

    def store(self, path: Path, keys: bytes, first: int, end: int, session: SessionKey | None) -> None:
        idle = {known for known in self.known if known != path[: len(known)]}
        plan = self.cache.plan_store(
            NAMESPACE, one_group(1), keys[first * 32 : end * 32], PAGE,
            session=session, behind=keys[(first - 1) * 32 : first * 32] if first else b"",
        )  # fmt: skip
        evicted = [self.names[name] for _, name in plan.evicted]
        superseded = {known for known in idle - self.before_a_hole if self.superseded(known)}
        for victim in evicted:
            first_to_leave = self.superseded(victim)
            self.counts["superseded" if first_to_leave else "other"] += 1
            assert first_to_leave or not superseded, f"{victim} left before {superseded}"
            superseded.discard(victim)
            del self.known[victim]
            if any(known[: len(victim)] == victim for known in self.known):
                self.before_a_hole |= {victim[:end] for end in range(1, len(victim))}
                superseded -= self.before_a_hole
        self.evicted += evicted
        self.cache.finish_store(plan, copied=True)
        for name in [self.names[chunk.key] for chunk in plan.chunks]:
            self.known[name] = self.used_by(session, stores=True)

    def use(self, path: Path, session: SessionKey | None) -> None:
        for end in range(1, len(path) + 1):
            known = self.known[path[:end]]
            self.before_a_hole.discard(path[:end])
            alone = known.user is not None and (self.deleted(known) or known.user == session)
            self.known[path[:end]] = self.used_by(session if alone else None)

    def used_by(self, session: SessionKey | None, stores: bool = False) -> Known:
        if session is None:
            return Known(None, 0, 0)
        revived = not stores or self.cache.sessions.session(session) is not None
        return Known(session, self.uses[session], self.deletions[session] - (not revived))

    def deleted(self, known: Known) -> bool:
        return known.user is not None and self.deletions[known.user] > known.deletions

    def superseded(self, path: Path) -> bool:
        known = self.known[path]
        unused = self.uses[known.user] - known.last if known.user is not None else 0
        return self.deleted(known) or unused >= self.after

    def delete(self, session: SessionKey) -> None:
        if (found := self.cache.sessions.session(session)) is not None:
            self.cache.sessions.delete(found)
            self.deletions[session] += 1


@every_policy
@pytest.mark.hypothesis
def test_superseded_chunks_leave_first_as_in_a_plain_model(policy: str) -> None:
    evictions = Counter[str]()
    users = [None, key("a"), key("b"), key("a", b"salt")]

    @given(steps=walks(60))
    @examples(60)
    def walk(steps: list[Dice]) -> None:
        world = World(policy, 14)
        for dice in steps:
            path = tuple(dice.randrange(2) for _ in range(dice.randint(1, 5)))
            user = dice.choice([*users, key("a"), key("a"), key("b")])
            if user is not None and dice.random() < 0.03:
                world.delete(user)
            world.request(path, user, pieces=dice.randrange(3), store=dice.random() < 0.9)
            world.cache.step()
            world.cache.audit()
        evictions.update(world.counts)

    walk()
    assert min(evictions["superseded"], evictions["other"]) > 100, evictions


def test_a_compacted_context_leaves_before_an_older_prompt_of_no_session() -> None:
    world = World("slru", 12)
    world.request((9, 9, 9), None)
    world.request((1, 1, 1, 1), key("a"))
    for turn in range(2, 2 + AFTER):
        world.request((2,) * min(turn, 4), key("a"))
    world.request((3, 3, 3), None)
    assert world.evicted == [(1, 1, 1, 1), (1, 1, 1)]


def test_a_parent_that_waits_for_fewer_uses_keeps_its_end() -> None:
    world = World("slru", 12, after=8)
    world.request((1, 1, 1, 1), key("a"))
    for turn in range(1, 8):
        world.request((2,) * min(turn, 4), key("a"))
    world.request((1, 1, 1, 1, 1), key("a"))
    for other in range(3, 6):
        world.request((other, other, other, other), None)
    assert world.counts["superseded"] == 0 < world.counts["other"]


def test_a_session_of_another_salt_with_the_same_id_supersedes_nothing() -> None:
    world = World("slru", 12)
    world.request((1, 1, 1), key("a", b"mine"))
    for _ in range(3 * AFTER):
        world.request((2, 2), key("a", b"other"))
    world.delete(key("a", b"other"))
    world.request((3,) * 8, None)
    assert world.evicted == [(2, 2)], "the other salt's own"


@pytest.mark.parametrize("found", [True, False])
def test_a_lookup_that_is_renewed_counts_once(found: bool) -> None:
    world = World("slru", 40)
    world.request((1, 1), key("a"))
    world.request((2, 2), key("a"))
    keys = world.keys((2, 2) if found else (3, 3))
    for turn in range(2 * AFTER):
        world.cache.lookup(NAMESPACE, keys, ("e", "waiting"), 1e9 + turn, key("a"))
    session = world.cache.sessions.session(key("a"))
    assert session is not None
    assert (session.uses, len(session.ends)) == (3, 2)
    assert not world.cache.sessions.superseded
    for _ in range(2 * AFTER):
        world.cache.end_lease(("e", "waiting"))
        world.cache.lookup(NAMESPACE, keys, ("e", "waiting"), 1e9, key("a"))
    assert session.uses == 3 + 2 * AFTER, "the engine uses the id of an ended request again"


def test_a_renewed_lookup_does_not_revive_a_deleted_session_and_a_new_one_does() -> None:
    world = World("slru", 40)
    world.request((1, 1), key("a"))
    world.cache.lookup(NAMESPACE, world.keys((1, 1)), ("e", "waiting"), 1e9, key("a"))
    world.delete(key("a"))
    world.cache.lookup(NAMESPACE, world.keys((1, 1)), ("e", "waiting"), 1e9, key("a"))
    assert world.cache.sessions.session(key("a")) is None
    assert len(world.cache.sessions.superseded) == 1
    world.cache.end_leases_of("e")
    world.cache.lookup(NAMESPACE, world.keys((1, 1)), ("e", "waiting"), 1e9, key("a"))
    assert world.cache.sessions.session(key("a")) is not None, "the engine began anew"
    while world.cache.step():
        pass
    world.cache.audit()


def test_records_of_requests_are_bounded_and_end_with_them() -> None:
    world = World("slru", 40)
    for number in range(3000):
        world.cache.lookup(NAMESPACE, world.keys((1,)), ("e", f"{number}" * 60), 1e9, key("a"))
    assert 0 < world.cache.sessions.record_bytes <= RECORD_BYTES * 8192
    for number in range(3000):
        world.cache.end_lease(("e", f"{number}" * 60))
    world.cache.sessions.delete(world.cache.sessions.session(key("a")))  # type: ignore[arg-type]
    assert world.cache.sessions.record_bytes <= 1024, "of the deletion itself"


def test_a_store_that_ends_after_its_session_was_deleted_does_not_revive_it() -> None:
    world = World("slru", 12)
    world.request((1, 1), key("a"))
    world.delete(key("a"))
    world.store((1, 1, 1), world.keys((1, 1, 1)), 2, 3, key("a"))
    world.store((2,), world.keys((2,)), 0, 1, key("a"))
    assert world.cache.sessions.session(key("a")) is None
    world.request((1, 1), key("a"))
    assert world.cache.sessions.session(key("a")) is not None, "a new request begins a new session"


def test_a_store_of_a_deleted_session_is_superseded_at_once() -> None:
    world = World("slru", 12)
    world.request((1, 1), key("a"))
    world.delete(key("a"))
    for first in range(2, 6):
        world.store((1,) * 6, world.keys((1,) * 6), first, first + 1, key("a"))
    world.store((1, 2), world.keys((1, 2)), 1, 2, key("a"))
    world.request((3,) * 10, None)
    assert world.counts == {"superseded": 5}


FULL, WINDOW = ObjectGroup("full", (0,), 16), ObjectGroup("window", (1,), 16, tokens=64)
REPLICATED = ObjectGroup("full", (0,), 16, replicated=True)
LAYOUTS = {
    "one group": ([FULL], 1, [0]),
    "two ranks": ([FULL], 2, [0]),
    "ranks take turns": ([REPLICATED], 2, [0]),
    "window last": ([FULL, WINDOW], 1, [0, 1]),
    "window first": ([FULL, WINDOW], 1, [1, 0]),
    "window first, two ranks": ([FULL, WINDOW], 2, [1, 0]),
    "window first, ranks take turns": ([REPLICATED, WINDOW], 2, [1, 0]),
    "two full groups, one in turns": ([REPLICATED, FULL], 2, [0, 1]),
    "two full groups, the other first": ([REPLICATED, FULL], 2, [1, 0]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_live_conversation_of_any_layout_is_never_superseded(layout: str) -> None:
    groups, ranks, order = LAYOUTS[layout]
    cache, made_of = Cache(PagePool(4000 * PAGE, PAGE), POLICIES["slru"]()), Groups(groups, ranks, 16)
    chunks = [number.to_bytes(32, "big") for number in range(3 * (SUPERSEDED_AFTER + 8))]
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
                    behind=chunks[first - 1] if first else b"",
                )  # fmt: skip
                cache.finish_store(plan, copied=True)
        cache.end_lease(("e", "r"))
    assert not cache.sessions.superseded
    session = cache.sessions.session(key("a"))
    assert session is not None
    if REPLICATED not in groups:
        assert session.chunks == len(chunks), "all are of the session, whichever group's store made them"


def test_a_store_of_a_window_that_names_no_session_shares_nothing() -> None:
    cache, made_of = Cache(PagePool(64 * PAGE, PAGE), POLICIES["slru"]()), Groups([FULL, WINDOW], 1, 16)
    keys = b"".join(number.to_bytes(32, "big") for number in range(6))
    for group, user in ((0, key("a")), (1, None)):
        plan = cache.plan_store(
            NAMESPACE, made_of, keys, PAGE, group=group, slots=range(group, group + 1), session=user
        )  # fmt: skip
        cache.finish_store(plan, copied=True)
    session = cache.sessions.session(key("a"))
    assert session is not None
    assert session.chunks == 6


def test_a_store_without_a_session_shares_the_chunks_before_it() -> None:
    world = World("slru", 200)
    world.request((1,) * 4, key("a"))
    world.store((1,) * 6, world.keys((1,) * 6), 4, 6, None)
    for _ in range(2 * AFTER):
        world.request((1,) * 6, key("a"))
    assert not world.cache.sessions.superseded
    assert world.cache.sessions.session(key("a")).chunks == 0  # type: ignore[union-attr]


def test_ends_of_a_session_that_only_stores_name_are_bounded() -> None:
    world = World("slru", 60)
    for first in range(40):
        world.store((first,), world.keys((first,)), 0, 1, key("a"))
    session = world.cache.sessions.session(key("a"))
    assert session is not None
    assert len(session.ends) == 2 * AFTER
    assert len(world.cache.sessions.superseded) == 40 - 2 * AFTER


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
    assert 0 < used <= cache.sessions.record_bytes <= RECORD_BYTES * chunks
    assert RECORD_BYTES + 2 * 8 <= 24, "and two references of each chunk"


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


def test_a_record_that_an_open_store_holds_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_MOST_DELETED", 2)
    cache = Cache(PagePool(64 * PAGE, PAGE), POLICIES["slru"]())

    def delete_and_forget() -> None:
        for name in "abcd":
            cache.lookup(NAMESPACE, b"x" * 32, ("e", "other"), 1e9, key(name))
            cache.sessions.delete(cache.sessions.session(key(name)))  # type: ignore[arg-type]

    for _ in range(3):
        finish_after(cache, delete_and_forget)


def test_chunks_of_an_open_store_whose_session_gave_way_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_LEAST_CHUNKS", 250)
    cache = Cache(PagePool(64 * PAGE, PAGE), POLICIES["slru"]())

    def crowd_out() -> None:
        for number in range(9):
            cache.lookup(NAMESPACE, b"x" * 32, ("e", f"{number}"), 1e9, key(f"{number}"))
            cache.end_lease(("e", f"{number}"))
        assert cache.sessions.session(key("a")) is None

    for _ in range(3):
        finish_after(cache, crowd_out)


@given(st.integers(1, 40))
@examples(20)
@pytest.mark.hypothesis
def test_records_end_with_the_chunks_of_their_session(turns: int) -> None:
    world = World("slru", 30)
    for turn in range(1, 1 + turns):
        world.request((1,) * min(turn, 9) + (turn % 5,), key("a"))
    world.delete(key("a"))
    world.cache.clear_namespaces()
    while world.cache.step():
        pass
    assert world.cache.sessions.record_bytes <= 1024, "of the deletion itself"
    assert not world.cache.sessions.superseded
