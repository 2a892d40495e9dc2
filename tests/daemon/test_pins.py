"""Pins of a real daemon: what they protect under pressure, which outcomes and refusals there are, and what ends them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

from kvserver.routing.block_hashes import hash_blocks

START = b"s" * 32
BLOCK, CHUNK_BLOCKS = 16, 4
TOKENS = list(range(500, 500 + 8 * CHUNK_BLOCKS * BLOCK))  # 8 chunks
MakeDaemon, MakeWorker = Callable[..., Daemon], Callable[..., Worker]


def hashes(tokens: list[int] = TOKENS, salt: str = "") -> list[bytes]:
    return list(hash_blocks("sha256", START, BLOCK, tokens, None, salt))


KEYS = hashes()[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]


def describe(worker: Worker, **more: Any) -> None:
    worker.send(worker.description(hash_algorithm="sha256", hash_start=START, hash_block_tokens=BLOCK, **more))


def post(daemon: Daemon, content_type: str = "application/json", **query: Any) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{daemon.http_port}/cache/pins"
    request = urllib.request.Request(url, json.dumps(query).encode(), {"Content-Type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def pin(daemon: Daemon, outcome: str = "accepted", **query: Any) -> dict[str, Any]:
    """Pin once the engine's description has arrived."""
    query = {"tokens": TOKENS, "model": "", "ttl_seconds": 600} | query

    def answered() -> dict[str, Any] | None:
        _, found = post(daemon, **query)
        return None if found.get("reason", "").startswith("no_engine") else found

    found = wait_until(answered, what="the engine is described")
    assert found.get("outcome") == outcome, found
    return found


def pins(daemon: Daemon) -> list[dict[str, Any]]:
    code, text = daemon.http("/cache/pins")
    assert code == 200
    found: list[dict[str, Any]] = json.loads(text)["pins"]
    return found


def press(worker: Worker, daemon: Daemon, evictions: int = 60) -> None:
    """Store other prompts until L1 has evicted so many more chunks."""
    before, number = daemon.status()["l1"]["evictions"], 0
    while daemon.status()["l1"]["evictions"] < before + evictions:
        worker.store(make_keys(4, ("pressure", worker.instance_id, number)), worker.blocks_for(4))
        number += 1


@pytest.fixture
def pressed(make_daemon: MakeDaemon) -> Daemon:
    return make_daemon(l1_size="1MiB", pin_share=0.5)


@pytest.fixture
def engine(pressed: Daemon, make_worker: MakeWorker) -> Worker:
    worker = make_worker(pressed)
    describe(worker)
    worker.store(KEYS, worker.blocks_for(len(KEYS)))
    return worker


def test_a_pinned_prompt_stays_under_pressure_and_leaves_after_its_deletion(pressed: Daemon, engine: Worker) -> None:
    found = pin(pressed)
    assert (found["tokens"], found["tiers"], found["ready_in_seconds"]) == (len(TOKENS), ["l1"], 0)
    assert found["bytes"] == len(KEYS) * pressed.status()["l1"]["used_bytes"] // pressed.status()["l1"]["chunks"]
    press(engine, pressed)
    assert engine.lookup(KEYS, "r1") == len(KEYS)
    engine.end_request("r1")
    (shown,) = pins(pressed)
    assert shown == found
    code, text = pressed.http(f"/cache/pins/{found['id']}", "DELETE")
    assert (code, json.loads(text)["outcome"], json.loads(text)["tokens"]) == (200, "accepted", len(TOKENS))
    assert pins(pressed) == []
    press(engine, pressed)
    assert engine.lookup(KEYS, "r2") == 0
    code, text = pressed.http(f"/cache/pins/{found['id']}", "DELETE")
    assert (code, json.loads(text)["outcome"]) == (404, "missing")


def test_the_same_prompt_unpinned_does_not_stay(pressed: Daemon, engine: Worker) -> None:
    press(engine, pressed)
    assert engine.lookup(KEYS, "r1") == 0
