"""A recording of a real daemon replays to the hit rate that this daemon had."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.commands import run
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

from kvserver.cache import PagePool, page_bytes_for

L1_BYTES = 1 << 20


def prompts(count: int) -> list[list[bytes]]:
    """Prompts that share beginnings, some often and some never."""
    source = random.Random(21)
    roots = [make_keys(6, seed=("root", number)) for number in range(12)]
    return [
        roots[min(source.randrange(12), source.randrange(12))][: source.randint(1, 6)]
        + make_keys(source.randint(0, 3), seed=("end", source.randrange(60)))
        for _ in range(count)
    ]


def serve(worker: Worker, keys: list[bytes], request_id: str) -> None:
    """As an engine does it: look up, load the hit, store the prompt, end."""
    blocks = worker.blocks_for(len(keys))
    found = worker.lookup(keys, request_id)
    if found:
        worker.load(keys[:found], blocks[: found * worker.chunk_blocks])
    worker.store(keys, blocks)
    worker.end_request(request_id)


def replay(path: Path, *arguments: str) -> list[dict[str, float]]:
    done = run("replay", str(path), "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_recording_replays_to_the_true_hit_rate(make_daemon, make_worker, tmp_path, restarts):
    path = tmp_path / "trace.jsonl"
    daemon: Daemon = make_daemon(l1_size=L1_BYTES, record=path, eviction_policy="lru")
    worker: Worker = make_worker(daemon)
    pool = PagePool(L1_BYTES, page_bytes_for(L1_BYTES))
    capacity = pool.pages // pool.pages_for(worker.chunk_bytes)
    found = looked_up = 0
    for begin in (0, 150) if restarts else (0,):
        for number, keys in enumerate(prompts(300)[begin : begin + 150]):
            serve(worker, keys, f"r{number}")
        status = daemon.status()
        assert status["l1"]["evictions"] > 0, "L1 was too large for this test"
        found += status["totals"]["hit_tokens"]
        looked_up += status["totals"]["lookup_tokens"]
        assert daemon.terminate() == 0
        if restarts and not begin:
            worker.hang_up()
            daemon.start()
            worker = make_worker(daemon)
    (result,) = replay(path, "--blocks", str(capacity), "--policy", "lru")
    assert 0.1 < result["hit_rate"] < 0.9
    assert (
        result["hit_rate"] == result["token_hit_rate"] == found / looked_up
    )  # also over restarts: each start has an empty L1, and ids of its own


def test_status_shows_the_recording(make_daemon, make_worker, tmp_path):
    path = tmp_path / "trace.jsonl"
    daemon = make_daemon(record=path)
    worker = make_worker(daemon)
    keys = make_keys(3)
    worker.lookup(keys)
    worker.end_request()
    wait_until(lambda: daemon.status()["recording"]["requests"] == 1, what="the lookup is recorded")
    recording = daemon.status()["recording"]
    size = recording.pop("bytes")
    assert recording == {"file": str(path), "requests": 1, "lost": 0, "full": False, "failure": ""}
    assert daemon.terminate() == 0
    assert path.stat().st_size == size
    written = path.read_bytes()
    assert not any(key in written or key.hex().encode() in written for key in keys)


def test_a_daemon_without_the_setting_has_no_recording(make_daemon):
    assert "recording" not in make_daemon().status()
