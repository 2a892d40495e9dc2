"""Refusals of pins, prefetches and deletions of sessions, as tables: the code or the error, its reason, and whether it is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon
from support.pins import BLOCK, CHUNK_BLOCKS, KEYS, TOKENS, describe, pin, post
from support.worker import Worker, make_keys

MakeDaemon, MakeWorker = Callable[..., Daemon], Callable[..., Worker]
PINS, PREFETCHES = "/cache/pins", "/cache/prefetches"
OF_SESSION = {"tokens": None, "session_id": "a"}

# (what is changed of a good request, code, the reason's or the error's first word); a 409 or 404 is counted as rejected or missing.
OF_BOTH: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "unknown"}, 409, "no_engine"),
    ({"instance_ids": ["unknown"]}, 409, "no_engine"),
    ({"tokens": [1] * 64}, 404, "not_cached"),
    ({"tokens": [1] * 20 * 16}, 404, "not_cached"),
    ({"tokens": []}, 404, "not_cached"),
    ({"cache_salt": "other"}, 404, "not_cached"),
    ({"tokens": [1] * ((1 << 14) + 1) * CHUNK_BLOCKS * BLOCK}, 409, "too_large"),
    ({"tokens": None}, 400, "bad_query"),
    ({"tokens": [-1]}, 400, "bad_query"),
    ({"tokens": ["1"]}, 400, "bad_query"),
    ({"block_hashes": []}, 400, "bad_query"),
    ({"tokens": None, "block_hashes": ["zz"]}, 400, "bad_hashes"),
    ({"tokens": None, "block_hashes": [7]}, 400, "short_hashes"),
    ({"tokens": None, "block_hashes": ["00" * 8]}, 400, "short_hashes"),
    ({"tokens": None, "block_hashes": ["00" * 32, "11" * 32, "00" * 32]}, 400, "bad_query"),
    ({"lora_name": "x"}, 400, "bad_query"),
    ({"ttl_seconds": 0}, 400, "bad_query"),
    ({"ttl_seconds": -1}, 400, "bad_query"),
    ({"ttl_seconds": 1e9}, 400, "bad_query"),
    ({"ttl_seconds": "long"}, 400, "bad_query"),
    ({"tenant": "two words"}, 400, "bad_query"),
    ({"ttl_seconds": None}, 400, "bad_query"),
    ({"content_type": "text/plain"}, 415, "media_type"),
]
OF_PINS: list[tuple[dict[str, Any], int, str]] = [
    ({**OF_SESSION, "session_id": "unknown"}, 404, "not_cached"),
    ({**OF_SESSION, "cache_salt": "other"}, 404, "not_cached"),
    ({**OF_SESSION, "model": "unknown"}, 404, "not_cached"),
    ({**OF_SESSION, "instance_ids": ["unknown"]}, 404, "not_cached"),
    ({**OF_SESSION, "session_id": ""}, 400, "bad_query"),
    ({**OF_SESSION, "session_id": "s" * 257}, 400, "bad_query"),
    ({**OF_SESSION, "session_id": 7}, 400, "bad_query"),
    ({**OF_SESSION, "ttl_seconds": 604801}, 400, "bad_query"),
    ({**OF_SESSION, "lora_name": "x", "lora_path": "/x"}, 400, "bad_query"),
    ({"session_id": "a"}, 400, "bad_query"),
    ({**OF_SESSION, "block_hashes": ["00" * 32]}, 400, "bad_query"),
]
OF_PREFETCHES: list[tuple[dict[str, Any], int, str]] = [(OF_SESSION, 400, "bad_query"), ({"ttl_seconds": 601}, 400, "bad_query")]  # fmt: skip
BY_ID: list[tuple[str, int, str]] = [
    *[(f"{page}/{id}", 400, "bad_parameter") for page in (PINS, PREFETCHES) for id in ("", "a" * 65, "..%2f", "a?x=1", "a/b")],
    *[(f"{page}/unknown", 404, "unknown") for page in (PINS, PREFETCHES)],
    ("/sessions/", 400, "bad_parameter"),
    ("/sessions/a?salt=x", 400, "bad_parameter"),
    ("/sessions/unknown", 404, "no session of this name, model and cache_salt has a record"),
    ("/sessions/a?cache_salt=other", 404, "no session of this name, model and cache_salt has a record"),
]  # fmt: skip


def counted(daemon: Daemon) -> dict[str, dict[str, int]]:
    status = daemon.status()
    return {PINS: status["pins"]["requests"], PREFETCHES: status["prefetches"]["requests"]}


def shown(daemon: Daemon) -> list[Any]:
    found = [json.loads(daemon.http(page)[1]) for page in (PINS, PREFETCHES, "/sessions")]
    return [found[0], found[1], [one["session_id"] for one in found[2]["sessions"]]]


def word_of(found: dict[str, Any]) -> str:
    return str(found.get("error") or found["reason"].partition(":")[0])


@pytest.fixture
def daemon(make_daemon: MakeDaemon, tmp_path: Path) -> Daemon:
    return make_daemon(l1_size="1MiB", pin_share=0.5, l2=f"file://{tmp_path}/l2?size=64MiB")


@pytest.fixture
def engine(daemon: Daemon, make_worker: MakeWorker) -> Worker:
    """It is described, has a prompt in L1, and a session beside it."""
    worker = make_worker(daemon)
    describe(worker)
    worker.store(KEYS, worker.blocks_for(len(KEYS)))
    of_session = make_keys(2, "of a session")
    worker.lookup(of_session, "s", session_id="a")
    worker.store(of_session, worker.blocks_for(2), session_id="a")
    worker.end_request("s")
    pin(daemon, "missing", tokens=[1] * 64)
    return worker


@pytest.mark.parametrize("page", [PINS, PREFETCHES])
def test_each_refused_request_is_typed_counted_by_outcome_and_changes_nothing(
    daemon: Daemon, engine: Worker, page: str
) -> None:
    before = shown(daemon)
    for query, code, word in OF_BOTH + (OF_PINS if page == PINS else OF_PREFETCHES):
        counts = counted(daemon)
        found_code, found = post(daemon, page=page, **{"tokens": TOKENS, "ttl_seconds": 600} | query)
        what = str(query)[:80]
        assert (found_code, word_of(found)) == (code, word), what
        outcome = {409: "rejected", 404: "missing"}.get(code)
        assert found.get("outcome") == outcome, what
        if outcome is not None:
            counts[page][outcome] += 1
        assert counted(daemon) == counts, what
    assert shown(daemon) == before
    assert post(daemon, page=page, tokens=TOKENS, ttl_seconds=600)[1]["outcome"] == "accepted", (
        "the one that all change"
    )


def test_each_refused_end_of_one_is_typed_and_ends_nothing(daemon: Daemon, engine: Worker) -> None:
    for page in (PINS, PREFETCHES):
        assert post(daemon, page=page, tokens=TOKENS, ttl_seconds=600)[1]["outcome"] == "accepted"
    before, counts = shown(daemon), counted(daemon)
    for path, code, word in BY_ID:
        found_code, text = daemon.http(path, "DELETE")
        assert (found_code, word_of(json.loads(text))) == (code, word), path
    assert (shown(daemon), counted(daemon)) == (before, counts)


def lookups_pin(engine: Worker, first: int, count: int) -> None:
    for number in range(first, first + count):
        assert engine.lookup(KEYS[:1], f"p{number}", pin_seconds=600) == 1, "it is served, pinned or not"


@pytest.mark.parametrize("state", ["off", "no room", "too many"])
def test_what_the_daemon_refuses_in_a_state_is_counted_as_rejected_for_all_that_ask(
    make_daemon: MakeDaemon, make_worker: MakeWorker, state: str
) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share={"off": 0.0, "no room": 0.001}.get(state, 0.5))
    worker = make_worker(daemon)
    describe(worker)
    worker.lookup(KEYS, "s", session_id="a")
    worker.store(KEYS, worker.blocks_for(len(KEYS)), session_id="a")
    worker.end_request("s")
    words = [state.replace(" ", "_")]
    pin(daemon, "missing" if state == "too many" else "rejected", tokens=[1] * 64 if state == "too many" else TOKENS)
    if state == "too many":
        for _ in range(1024):
            assert post(daemon, session_id="a", ttl_seconds=600)[1]["outcome"] == "accepted"
    rejected = counted(daemon)[PINS]["rejected"]
    for query in ({"tokens": TOKENS}, {"session_id": "a"}):
        code, found = post(daemon, **query, ttl_seconds=600)
        assert (code, found["outcome"], word_of(found)) == (409, "rejected", *words)
    lookups_pin(worker, 0, 1)
    assert counted(daemon)[PINS]["rejected"] == rejected + 3
    assert len(json.loads(daemon.http(PINS)[1])["pins"]) == (256 if state == "too many" else 0), "as many as are listed"


def test_more_prefetches_than_the_bound_and_those_without_l2_are_rejected_and_counted(
    daemon: Daemon, engine: Worker, make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    for _ in range(64):
        assert post(daemon, page=PREFETCHES, tokens=TOKENS)[1]["outcome"] == "accepted"
    code, found = post(daemon, page=PREFETCHES, tokens=TOKENS)
    assert (code, found["outcome"], word_of(found)) == (409, "rejected", "too_many")
    without = make_daemon(l1_size="1MiB", pin_share=0.5)
    describe(make_worker(without))
    pin(without, "missing")
    code, found = post(without, page=PREFETCHES, tokens=TOKENS)
    assert (code, found["outcome"], found["reason"]) == (409, "rejected", "off: there is no --l2")
    assert [counted(each)[PREFETCHES]["rejected"] for each in (daemon, without)] == [1, 1]


def test_engines_that_share_no_kv_or_whose_hashes_are_not_known_are_refused_on_both_pages(
    daemon: Daemon, engine: Worker, make_worker: MakeWorker
) -> None:
    other = make_worker(daemon, layout="HND")
    other.send(other.description(hash_algorithm="of its own"))
    other.lookup(KEYS[:1], "s", session_id="a")
    other.store(KEYS[:1], other.blocks_for(1), session_id="a")
    pin(daemon, "rejected", instance_ids=[other.instance_id])  # once it is described
    counts, both = counted(daemon), [engine.instance_id, other.instance_id]
    for page in (PINS, PREFETCHES):
        for query, word in (
            ({"tokens": TOKENS, "instance_ids": [other.instance_id]}, "unsupported_hashes"),
            ({"tokens": TOKENS, "instance_ids": both}, "several_namespaces"),
        ):
            code, found = post(daemon, page=page, ttl_seconds=600, **query)
            assert (code, found["outcome"], word_of(found)) == (409, "rejected", word)
            counts[page]["rejected"] += 1
    code, found = post(daemon, session_id="a", ttl_seconds=600)
    assert (code, found["outcome"], word_of(found)) == (409, "rejected", "several_namespaces")
    counts[PINS]["rejected"] += 1
    assert counted(daemon) == counts
