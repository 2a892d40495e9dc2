"""Explanations that a daemon gives, by its page."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from kvserver.protocol import Stored
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

CHUNK = 64  # tokens, as Daemon() starts it
MakeDaemon = Callable[..., Daemon]
MakeWorker = Callable[..., Worker]


def page(daemon: Daemon, **query: object) -> tuple[int, dict[str, Any]]:
    code, body = daemon.http("/explain?" + "&".join(f"{name}={quote(str(value))}" for name, value in query.items()))
    found: dict[str, Any] = json.loads(body)
    return code, found


def explained(daemon: Daemon, request_id: str, **expected: object) -> dict[str, Any]:
    """What the page reports of it, once it has these values; the newest of several."""

    def found() -> dict[str, Any] | None:
        code, body = page(daemon, request_id=request_id)
        request: dict[str, Any] = body["requests"][0] if code == 200 else {}
        return request if request and all(request[name] == value for name, value in expected.items()) else None

    return wait_until(found, 10, f"{expected} of {page(daemon, request_id=request_id)}")


def stored(worker: Worker, chunks: int) -> list[bytes]:
    keys = make_keys(chunks)
    assert worker.store(keys, worker.blocks_for(chunks)) == Stored(stored=chunks, skipped=0)
    return keys
