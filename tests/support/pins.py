"""A prompt that an operator pins in a real daemon, and the pressure on L1 that it withstands."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from kvserver.routing.block_hashes import hash_blocks
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

START = b"s" * 32
BLOCK, CHUNK_BLOCKS = 16, 4
TOKENS = list(range(500, 500 + 8 * CHUNK_BLOCKS * BLOCK))  # 8 chunks


def hashes(tokens: list[int] = TOKENS, salt: str = "") -> list[bytes]:
    return list(hash_blocks("sha256", START, BLOCK, tokens, None, salt))


KEYS = hashes()[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]


def describe(worker: Worker, **more: Any) -> None:
    worker.send(worker.description(hash_algorithm="sha256", hash_start=START, hash_block_tokens=BLOCK, **more))


def post(
    daemon: Daemon, content_type: str = "application/json", page: str = "/cache/pins", **query: Any
) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{daemon.http_port}{page}"
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
        assert number < 1000, "nothing is evicted"
        worker.store(make_keys(4, ("pressure", worker.instance_id, number)), worker.blocks_for(4))
        number += 1
