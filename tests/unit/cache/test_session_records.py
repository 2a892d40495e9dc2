"""Records of sessions: they stay small and bounded, and old ones leave room for later ones."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from kvserver.cache import POLICIES, Cache, PagePool, one_group
from kvserver.cache import sessions as sessions_module
from kvserver.cache.sessions import RECORD_BYTES
from unit.cache.session_world import NAMESPACE, PAGE, World, key, record


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
