"""What several ranks or messages do for one thing is counted once, and what has ended is forgotten in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.worker import Worker, make_keys

from kvserver.protocol import Retrieved, Stored


def counts(daemon: Any, worker: Worker) -> dict[str, Any]:
    (found,) = [i for i in daemon.status()["instances"] if i["instance_id"] == worker.instance_id]
    requests: dict[str, Any] = found["requests"]
    return requests


def test_tokens_that_every_rank_loads_are_saved_once(make_daemon: Any, make_worker: Callable[..., Worker]) -> None:
    daemon = make_daemon()
    names = {"instance_id": "two-ranks", "incarnation": "one"}
    ranks = [make_worker(daemon, rank=rank, world_size=2, **names) for rank in range(2)]
    keys = make_keys(3)
    for rank in ranks:
        assert rank.store(keys, rank.blocks_for(3)) == Stored(stored=3, skipped=0)
    for rank in reversed(ranks):
        assert rank.load(keys, rank.blocks_for(3)) == Retrieved(chunks=3)
    tokens = 3 * ranks[0].chunk_blocks * 16
    found = counts(daemon, ranks[0])
    assert (found["saved_tokens"], found["loads"], found["loaded_chunks"]) == (tokens, 2, 6)


def test_chunks_that_a_store_skips_are_not_stored(make_daemon: Any, make_worker: Callable[..., Worker]) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys, blocks = make_keys(5), worker.blocks_for(5)
    assert worker.store(keys[:2], blocks[: 2 * worker.chunk_blocks]) == Stored(stored=2, skipped=0)
    assert worker.store(keys, blocks) == Stored(stored=3, skipped=2)
    assert worker.store(keys, blocks) == Stored(stored=0, skipped=5)
    found = counts(daemon, worker)
    assert (found["stored_chunks"], found["avoided_chunks"]) == (5, 7)
    assert daemon.status()["totals"]["stored_bytes"] == 5 * worker.chunk_bytes
