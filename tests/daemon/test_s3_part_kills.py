"""Objects of S3 that are moved in parts, while parts fail, hang or are flipped, and store and daemon are killed: right bytes or a miss."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from support.daemon import Daemon, wait_until
from support.ill_proxy import IllProxy
from support.memory import awkward
from support.s3 import S3Server, one_server
from support.worker import Worker, make_keys

ROUNDS, PROMPTS, CHUNKS = 24, 4, 2
GEOMETRY = awkward(num_blocks=32, scale=3800)  # a chunk of four blocks has 19 MB: four parts to put, nine to get
OF_PUTS = ["none", "cut", "refused", "flipped", "hangs", "store killed", "daemon killed"]
OF_GETS = ["none", "cut", "short", "flipped", "hangs"]
STEPS = ["begin", "part 1", "part 2", "part 4", "complete"]
LONG_SECONDS = 120.0

pytestmark = pytest.mark.long


@pytest.fixture
def server() -> Iterator[S3Server]:
    yield from one_server()


class Walk:
    """One daemon after the other, each of which writes and reads a few prompts through a proxy with faults."""

    def __init__(self, server: S3Server, seed: int) -> None:
        self._server, self._dice = server, random.Random(seed)
        self._proxy = IllProxy(server.port)
        url = server.url_of("kills", "timeout=3s").replace(str(server.port), str(self._proxy.port))
        self.daemon = Daemon(l2=url, l1_size="192MiB")
        self._release = threading.Event()  # what hangs
        self._stored: defaultdict[bytes, list[bytes]] = defaultdict(list)  # by key, the bytes under it
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        self._release.set()
        self.daemon.close()
        self._proxy.close()

    def round(self) -> None:
        self._release.clear()
        self.daemon.start().wait_for_tiers(LONG_SECONDS)
        with Worker(self.daemon.endpoint, geometry=GEOMETRY) as worker:
            self._read(worker)
            self._write(worker)
        self._release.set()
        self.daemon.kill()
        self._proxy.change, self._proxy.upload = lambda range, body: body, lambda step, body: body

    def _read(self, worker: Worker) -> None:
        """Read what earlier daemons wrote, with one fault in one of its parts."""
        fault, left = self._dice.choice(OF_GETS), [1] * self._dice.choice([1, 100])

        def change(range: str, body: bytes) -> bytes:
            if range.startswith("bytes=0-") or not left:
                return body
            left.pop()
            if fault == "hangs":
                self._release.wait(LONG_SECONDS)
            return {"cut": b"", "short": body[:-1], "flipped": body[:-1] + bytes([body[-1] ^ 1])}.get(fault, body)

        self._proxy.change = change
        for prompt in range(PROMPTS):
            keys = make_keys(CHUNKS, prompt)
            for key, chunk in zip(keys, worker.found_in_l2(keys), strict=False):
                assert chunk in self._stored[key], f"WRONG BYTES after {fault}"
                self.counts[f"found, {fault}"] += 1
        self.daemon.wait_for_accounting(LONG_SECONDS, tickets=0, pins=0, leases=0)
        self.daemon.audit()
        self._proxy.change = lambda range, body: body

    def _write(self, worker: Worker) -> None:
        """One prompt, with one fault in one step of an upload; every object that is there afterwards is whole."""
        fault, ill = self._dice.choice(OF_PUTS), self._dice.choice(STEPS)
        left = [1] * self._dice.choice([1, 100])
        reached, killed = threading.Event(), threading.Event()

        def upload(step: str, body: bytes) -> bytes | int | None:
            if step != ill or not left:
                return body
            left.pop()
            reached.set()
            if fault == "hangs":
                self._release.wait(LONG_SECONDS)
            if fault.endswith("killed"):
                killed.wait(LONG_SECONDS)
            if fault == "flipped" and step.startswith("part"):
                return body[:-1] + bytes([body[-1] ^ 1])
            return {"cut": None, "refused": 500}.get(fault, body)

        self._proxy.upload = upload
        prompt = self._dice.randrange(PROMPTS)
        keys = make_keys(CHUNKS, prompt)
        worker.memory.fill()
        blocks = worker.blocks_for(CHUNKS, first=1 + CHUNKS * worker.chunk_blocks)
        for key, chunk in zip(keys, worker.chunks_in(blocks), strict=True):
            self._stored[key].append(chunk)
        worker.store(keys, blocks)
        self.counts[fault] += 1
        wait_until(lambda: reached.is_set() or not self._writes(), LONG_SECONDS, "the upload")
        if fault == "store killed":
            self._server.kill()
            self._server.start()
        if fault == "daemon killed":
            self.daemon.kill()
        killed.set()
        if fault != "daemon killed":
            self.daemon.wait_for_accounting(LONG_SECONDS, tickets=0, pins=0)
        sizes = {len(self._server.read(where)) for where in self._server.objects()}
        assert all(size >= worker.chunk_bytes for size in sizes), "half an object is visible"

    def _writes(self) -> bool:
        tier = self.daemon.tier()
        return bool(tier["queue_objects"] or self.daemon.accounting()["pins"])


def test_objects_in_parts_are_read_right_or_missed_whatever_fails_or_is_killed(server: S3Server) -> None:
    walk = Walk(server, seed=ROUNDS)
    try:
        for _ in range(ROUNDS):
            walk.round()
    finally:
        walk.close()
    print(dict(walk.counts))
    assert walk.counts["found, none"], "hits come back"
