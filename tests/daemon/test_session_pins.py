"""Pins of what a session used: what they protect, which session they are of, and whether they or a deletion win."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon
from support.kept_l1 import restart
from support.pins import post, press
from support.worker import Worker, make_keys

from kvserver.protocol import salt_digest

MakeDaemon, MakeWorker = Callable[..., Daemon], Callable[..., Worker]
TOKENS = 64  # of a chunk
SALT = salt_digest("mine")
PROMPT = make_keys(6, "prompt of a session")


@pytest.fixture
def pressed(make_daemon: MakeDaemon) -> Daemon:
    return make_daemon(l1_size="1MiB", pin_share=0.5, eviction_policy="lru")


@pytest.fixture
def engine(pressed: Daemon, make_worker: MakeWorker) -> Worker:
    return make_worker(pressed)


def ask(worker: Worker, prompt: list[bytes], session_id: str, name: str = "r", **more: Any) -> int:
    """Look the prompt up as a request does, store what is missing, and end."""
    salt, pin_seconds = more.pop("session_salt", None), more.pop("pin_seconds", None)
    of_session = {"session_id": session_id, "session_salt": salt} | more
    found = worker.lookup(prompt, name, pin_seconds=pin_seconds, **of_session)
    if left := prompt[found:]:
        worker.store(left, worker.blocks_for(len(left)), first_chunk=found, **of_session)
    worker.end_request(name)
    return found


def pin(daemon: Daemon, session_id: str = "a", **query: Any) -> dict[str, Any]:
    return post(daemon, **{"session_id": session_id, "ttl_seconds": 600} | query)[1]


def sessions(daemon: Daemon) -> dict[str, dict[str, Any]]:
    code, text = daemon.http("/sessions")
    assert code == 200
    return {one["session_id"]: one for one in json.loads(text)["sessions"]}


def test_what_only_a_pinned_session_used_stays_under_pressure_and_what_it_shares_does_not(
    pressed: Daemon, engine: Worker
) -> None:
    branch = [*PROMPT[:2], *make_keys(3, "branch")]
    ask(engine, PROMPT, "a")
    ask(engine, branch, "a")
    shared = make_keys(2, "shared")
    ask(engine, shared, "a")
    ask(engine, shared, "b")
    found = pin(pressed)
    assert (found["outcome"], found["tokens"], found["tiers"]) == ("accepted", 9 * TOKENS, ["l1"])
    assert found["bytes"] == sessions(pressed)["a"]["bytes"]
    press(engine, pressed)
    assert [engine.lookup(prompt, f"q{n}") for n, prompt in enumerate((PROMPT, branch, shared))] == [6, 5, 0]
    for number in range(3):
        engine.end_request(f"q{number}")
    assert pressed.http(f"/cache/pins/{found['id']}", "DELETE")[0] == 200
    press(engine, pressed)
    assert engine.lookup(PROMPT, "r") == 0
    engine.unregister()
    pressed.wait_for_clean_accounting()
    pressed.audit()


def test_a_pin_outlasts_the_deletion_of_its_session_whose_kv_leaves_first_afterwards(
    pressed: Daemon, engine: Worker
) -> None:
    ask(engine, PROMPT, "a")
    found = pin(pressed)
    code, text = pressed.http("/sessions/a", "DELETE")
    assert (code, json.loads(text)["tokens"]) == (200, 6 * TOKENS)
    press(engine, pressed)
    assert pressed.status()["pins"]["pins"] == 1
    others = make_keys(4, "older")
    engine.store(others, engine.blocks_for(4))
    assert pressed.http(f"/cache/pins/{found['id']}", "DELETE")[0] == 200
    press(engine, pressed, 1)  # at least one, at most four more
    assert engine.lookup(PROMPT, "q") < 6, "younger than the others by its pin's end, it left before them"
    assert engine.lookup(others, "q2") == 4
    assert pin(pressed)["outcome"] == "missing", "a deleted session has no name"


def test_a_session_of_another_salt_or_name_or_model_is_not_pinned(pressed: Daemon, engine: Worker) -> None:
    ask(engine, PROMPT, "a", session_salt=SALT)
    for query in ({}, {"cache_salt": "other"}, {"cache_salt": "mine", "model": "unknown"}, {"session_id": "b"}):
        found = pin(pressed, **query)
        assert (found["outcome"], found["reason"].partition(":")[0]) == ("missing", "not_cached"), query
    assert pin(pressed, cache_salt="mine", model=engine.model_name)["tokens"] == 6 * TOKENS


def test_a_session_is_pinned_within_the_share_from_its_first_chunk_on(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share=0.05)
    worker = make_worker(daemon)
    ask(worker, PROMPT, "a")
    found, limit = pin(daemon), daemon.metric("kvserver_cache_pin_limit_bytes")
    assert (found["outcome"], found["reason"].partition(":")[0]) == ("clipped", "no_room")
    assert limit - worker.chunk_bytes < found["bytes"] <= limit
    press(worker, daemon)
    assert worker.lookup(PROMPT, "q") == found["tokens"] // TOKENS
    ask(worker, PROMPT, "b")
    assert pin(daemon, "b")["reason"].partition(":")[0] == "no_room"


def test_the_pins_of_a_session_are_those_by_its_name_and_those_of_its_requests(pressed: Daemon, engine: Worker) -> None:
    ask(engine, PROMPT[:3], "a", "one", pin_seconds=600)
    ask(engine, make_keys(2, "of b"), "b")
    engine.lookup(make_keys(1, "of none"), "none", pin_seconds=600)
    found = pin(pressed)
    assert {name: one["pins"] for name, one in sessions(pressed).items()} == {"a": 2, "b": 0}
    assert pressed.http(f"/cache/pins/{found['id']}", "DELETE")[0] == 200
    assert sessions(pressed)["a"]["pins"] == 1


def test_a_pin_that_a_restart_kept_is_of_its_session(
    make_daemon: MakeDaemon, make_worker: MakeWorker, path: Path
) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share=0.5, l1_file=path)
    with make_worker(daemon) as worker:
        ask(worker, PROMPT, "a")
        pin(daemon)
    restart(daemon)
    with make_worker(daemon) as worker:
        assert ask(worker, [*PROMPT, *make_keys(1, "new")], "a") == 6
        found = sessions(daemon)["a"]
        assert (found["pins"], found["tokens"]) == (1, TOKENS), "what was kept is shared, and still pinned"


def test_one_pin_has_what_the_session_used_with_a_lora_and_without(pressed: Daemon, engine: Worker) -> None:
    ask(engine, PROMPT, "a", variant="epoch")
    ask(engine, PROMPT[:2], "a", variant="epoch/lora")
    assert pin(pressed)["tokens"] == 8 * TOKENS
    assert sorted(one["pins"] for one in json.loads(pressed.http("/sessions")[1])["sessions"]) == [1, 1]
    press(engine, pressed)
    assert engine.lookup(PROMPT[:2], "q", variant="epoch/lora") == 2


def test_a_session_of_engines_that_share_no_kv_is_pinned_where_one_is_named(
    pressed: Daemon, engine: Worker, make_worker: MakeWorker
) -> None:
    other = make_worker(pressed, layout="HND")
    for worker, chunks in ((engine, 2), (other, 3)):
        ask(worker, PROMPT[:chunks], "a")
    assert pin(pressed)["reason"].startswith("several_namespaces: ")
    assert pin(pressed, instance_ids=[other.instance_id])["tokens"] == 3 * TOKENS
    assert pin(pressed, instance_ids=["unknown"])["outcome"] == "missing"
