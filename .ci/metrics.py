"""Record a real daemon's /metrics into a folder: `before.txt`, of an engine that has registered, and `after.txt`, when it has stored, looked up,
loaded and ended requests, and L1 and a tier in files have evicted. Needs tests/ on its path.
"""

from __future__ import annotations

import itertools
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from support.block_lifetimes import accessed, allocated, evicted, released
from support.daemon import GPUS, Daemon, wait_until
from support.worker import Worker, ids, make_keys

from kvserver.protocol import MARK, ExactRecords
from kvserver.protocol.client import RequestFailed

CHUNKS = 120  # more than L1 has room for


def report(worker: Worker, *records: list[int], full: bool = False) -> None:
    mark = MARK.pack(0, time.monotonic_ns()) if records else b""
    worker.report(ExactRecords(ids(itertools.chain(*records)), mark, full=full))


def stored(worker: Worker, keys: list[bytes], request: str) -> bool:
    """Whether it is in L1, which has no room while it is written to storage; leased if it is."""
    worker.store(keys, worker.blocks_for(1))
    return worker.lookup(keys, request) == 1


def work(worker: Worker, daemon: Daemon) -> None:
    worker.round_trip()
    for number in range(CHUNKS):
        request, keys = f"request {number}", make_keys(1, number)
        worker.lookup(keys, request)
        wait_until(lambda: stored(worker, keys, request))  # noqa: B023, it is called at once
        if number % 2:
            worker.load(keys, worker.blocks_for(1, first=1 + worker.chunk_blocks), request_id=request)
        ended = {"prompt_tokens": 64, "local_tokens": 16, "loaded_tokens": 32, "loads": 1} if number % 2 else {}
        worker.end_request(request, prefill_tokens_per_second=1000, **ended)
    report(worker, allocated(1), accessed(1), released(1))
    report(worker, accessed(1), released(1), evicted(1))
    totals = dict.fromkeys(("prefix_queries", "prefix_hits", "external_queries", "external_hits", "prompt_tokens"), 100)
    worker.send(worker.stats_message(running=1, finished_requests=CHUNKS, **totals))
    wait_until(lambda: daemon.status()["events"]["queue_depth"] == 0)
    daemon.match(block_hashes=["00" * 32])


def be_refused(daemon: Daemon, worker: Worker) -> None:
    """As an engine with another's name, and as a web page."""
    try:
        Worker(daemon.endpoint, instance_id=worker.instance_id)
    except RequestFailed:
        foreign = urllib.request.Request(
            f"http://127.0.0.1:{daemon.http_port}/status", headers={"Origin": "http://example.com"}
        )
        try:
            urllib.request.urlopen(foreign)
        except urllib.error.HTTPError:
            return
    raise AssertionError("not refused")


def main(folder: Path) -> None:
    daemon = Daemon(
        l1_size="1MiB", l2=f"file://{folder}/l2?size=64MiB", metrics_sample_rate=1, kv_events_endpoint="tcp://127.0.0.1:0", simulated_gpus=1,
        share="tenant:t=0.1",
    ).start()  # fmt: skip
    try:
        with Worker(daemon.endpoint, gpu=GPUS[0]) as worker:
            report(worker, full=True)
            worker.send(worker.description())
            wait_until(lambda: daemon.metric("kvserver_kv_events_bound") == 1)
            (folder / "before.txt").write_text(daemon.http("/metrics")[1])
            work(worker, daemon)
            be_refused(daemon, worker)
            (folder / "after.txt").write_text(daemon.http("/metrics")[1])
    finally:
        daemon.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
