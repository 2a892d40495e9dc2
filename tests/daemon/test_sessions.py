"""Sessions in a real daemon: messages name them, `/sessions` shows and deletes them, and no salt reaches another's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from support.daemon import Daemon, wait_until
from support.worker import Worker

from kvserver.protocol import Error, salt_digest
from kvserver.protocol.client import RequestFailed

TOKENS = 64  # of a chunk
MINE, OTHER = salt_digest("mine"), salt_digest("other")


def keys(name: int, count: int) -> list[bytes]:
    return [bytes([name, number]).ljust(32, b"k") for number in range(count)]


def ask(worker: Worker, prompt: list[bytes], session_id: str, salt: bytes = b"") -> int:
    """Look the prompt up as a request does that ends at once, and store it in two pieces."""
    request = f"{session_id}-{len(prompt)}"
    found = worker.lookup(prompt, request, session_id=session_id, session_salt=salt)
    middle = (found + len(prompt) + 1) // 2
    for first, end in ((found, middle), (middle, len(prompt))):
        if first < end:
            worker.store(
                prompt[first:end], worker.blocks_for(end - first), first_chunk=first,
                after=prompt[first - 1] if first else None, session_id=session_id, session_salt=salt,
            )  # fmt: skip
    worker.end_request(request)
    return found


def sessions(daemon: Daemon) -> list[dict[str, Any]]:
    code, text = daemon.http("/sessions")
    assert code == 200
    found: list[dict[str, Any]] = json.loads(text)["sessions"]
    return found


def delete(daemon: Daemon, path: str) -> tuple[int, dict[str, Any]]:
    code, text = daemon.http(f"/sessions/{path}", "DELETE")
    return code, json.loads(text)


def test_sessions_are_listed_by_size_with_tokens_bytes_and_tiers(daemon: Daemon, worker: Worker) -> None:
    ask(worker, keys(1, 2), "small")
    ask(worker, keys(2, 5), "große Sitzung", MINE)
    ask(worker, keys(2, 7), "große Sitzung", MINE)
    large, small = sessions(daemon)
    assert (large["session_id"], large["tokens"]) == ("große Sitzung", 7 * TOKENS)
    assert large["salt_digest"] == MINE.hex()
    assert (small["tokens"], small["tiers"], small["salt_digest"]) == (2 * TOKENS, ["l1"], "")
    assert large["bytes"] * 2 == small["bytes"] * 7
    assert large["bytes"] + small["bytes"] == daemon.status()["l1"]["used_bytes"]
    assert small["model_name"] == worker.model_name
    assert 0 < small["last_use_seconds"] < 60


def test_a_request_without_a_session_shares_what_it_uses_for_good(daemon: Daemon, worker: Worker) -> None:
    ask(worker, keys(1, 6), "a")
    assert ask(worker, keys(1, 4), "") == 4
    assert sessions(daemon)[0]["tokens"] == 2 * TOKENS
    assert ask(worker, keys(1, 6), "a") == 6
    assert sessions(daemon)[0]["tokens"] == 2 * TOKENS


def test_a_deleted_session_leaves_first_and_that_of_another_salt_stays(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon(l1_size="1MiB")
    worker = make_worker(daemon)
    room = 0
    while (
        worker.store([bytes([99, room]) * 16], worker.blocks_for(1)).stored and not daemon.status()["l1"]["evictions"]
    ):
        room += 1
    assert daemon.http("/cache/clear", "POST")[0] == 200
    part = room // 3
    ask(worker, keys(1, part), "a", MINE)
    ask(worker, keys(2, part), "a", OTHER)
    code, outcome = delete(daemon, "a?cache_salt=other")
    assert (code, outcome["outcome"], outcome["tokens"]) == (200, "accepted", part * TOKENS)
    ask(worker, keys(3, room - part), "")
    assert worker.lookup(keys(2, part)) == 0, "the younger one was deleted, and left"
    assert worker.lookup(keys(1, part), "r2") == part


@pytest.mark.parametrize("path", ["unknown", "a?cache_salt=wrong", "a?model=other"])
def test_deletion_of_an_unknown_session_is_missing(daemon: Daemon, worker: Worker, path: str) -> None:
    ask(worker, keys(1, 3), "a", MINE)
    code, outcome = delete(daemon, path)
    assert (code, outcome["outcome"]) == (404, "missing")
    assert outcome["reason"]
    assert len(sessions(daemon)) == 1


@pytest.mark.parametrize("path", ["", "a" * 257, "%ff", "a?salt=x", "a?model=1&model=2", quote("ü" * 257)])
def test_a_bad_deletion_is_refused_with_a_typed_error(daemon: Daemon, path: str) -> None:
    code, outcome = delete(daemon, path)
    assert (code, outcome["error"]) == (400, "bad_parameter")


@pytest.mark.parametrize("bad", [{"session_id": "x" * 257}, {"session_salt": b"s" * 17}])
def test_a_message_with_a_session_out_of_bounds_gets_a_typed_error(worker: Worker, bad: dict[str, Any]) -> None:
    messages = worker.lookup_message(keys(1, 1), **bad), worker.store_message(keys(1, 1), worker.blocks_for(1), **bad)
    for message in messages:
        with pytest.raises(RequestFailed, match=f"bad_message.*{next(iter(bad))}"):
            worker.ask(message, Error)


def test_a_store_of_a_deleted_session_is_kept_and_revives_nothing(daemon: Daemon, worker: Worker) -> None:
    prompt = keys(1, 4)
    ask(worker, prompt[:3], "a")
    assert delete(daemon, "a")[0] == 200
    stored = worker.store(prompt[3:], worker.blocks_for(1), first_chunk=3, after=prompt[2], session_id="a")
    assert stored.stored == 1
    assert sessions(daemon) == []
    assert ask(worker, prompt, "a") == 4
    assert [one["session_id"] for one in sessions(daemon)] == ["a"]


def test_sessions_end_with_a_clear(daemon: Daemon, worker: Worker) -> None:
    ask(worker, keys(1, 3), "a")
    assert daemon.http("/cache/clear", "POST")[0] == 200
    wait_until(lambda: all(not one["tokens"] for one in sessions(daemon)), what="no session has a chunk")


def test_the_form_of_a_lookup_without_sessions_is_decoded_as_before(worker: Worker) -> None:
    message = worker.lookup_message(keys(1, 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message))[12:17] == ["", None, None, None, ""], (
        "no pin, no hand-over, no tenant"
    )
