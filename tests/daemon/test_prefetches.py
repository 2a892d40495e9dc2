"""Prefetches of a real daemon: a prompt comes from a file tier before its request. Refusals are in `test_promise_refusals.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.pins import KEYS, TOKENS, describe, post
from support.worker import Worker

from kvserver.protocol import LookupReply

MakeDaemon, MakeWorker = Callable[..., Daemon], Callable[..., Worker]
PAGE = "/cache/prefetches"


def prefetch(daemon: Daemon, **query: Any) -> tuple[int, dict[str, Any]]:
    """Request it once the engine's description has arrived."""

    def answered() -> tuple[int, dict[str, Any]] | None:
        code, found = post(daemon, page=PAGE, **{"tokens": TOKENS} | query)
        return None if found.get("reason", "").startswith("no_engine") else (code, found)

    return wait_until(answered, what="the engine is described")


def prefetches(daemon: Daemon) -> list[dict[str, Any]]:
    code, text = daemon.http(PAGE)
    assert code == 200
    found: list[dict[str, Any]] = json.loads(text)["prefetches"]
    return found


@pytest.fixture
def daemon(make_daemon: MakeDaemon, tmp_path: Path) -> Daemon:
    return make_daemon(l1_size="16MiB", l2=f"file://{tmp_path}/l2?size=64MiB")


def test_a_prompt_of_a_daemon_before_is_in_l1_before_its_request(daemon: Daemon, make_worker: MakeWorker) -> None:
    with make_worker(daemon) as worker:
        blocks = worker.blocks_for(len(KEYS))
        content = worker.memory.blocks(blocks)
        worker.store(KEYS, blocks)
        wait_until(lambda: daemon.tier()["objects"] >= len(KEYS), what="they are written")
    daemon.terminate()
    daemon.start()
    with make_worker(daemon) as worker:
        describe(worker)
        code, begun = prefetch(daemon)
        assert (code, begun["outcome"], begun["tokens"]) == (200, "accepted", len(TOKENS)), begun
        wait_until(lambda: prefetches(daemon)[0]["ready_in_seconds"] == 0, what="it is read")
        assert prefetches(daemon)[0]["tiers"] == ["l1"]
        reply = worker.ask(worker.lookup_message(KEYS), LookupReply)
        assert (reply.hit_chunks, reply.fill_chunks) == (len(KEYS), 0)
        assert worker.loaded(KEYS) == content
        worker.end_request()
        assert daemon.metric("kvserver_cache_prefetches_total", outcome="accepted") == 1
        assert daemon.metric("kvserver_cache_prefetches_live") == 1
        assert daemon.status()["prefetches"]["requests"]["accepted"] == 1
        code, text = daemon.http(f"{PAGE}/{begun['id']}", "DELETE")
        assert (code, json.loads(text)["outcome"]) == (200, "accepted")
        assert daemon.http(f"{PAGE}/{begun['id']}", "DELETE")[0] == 404
        assert prefetches(daemon) == []
        daemon.audit()
        assert prefetch(daemon)[1]["outcome"] == "accepted"
        assert daemon.http("/cache/clear", "POST")[0] == 200
        assert prefetches(daemon) == []
        assert prefetch(daemon)[0] == 404, "it was cleared from both tiers"
    daemon.wait_for_clean_accounting()
    daemon.audit()
