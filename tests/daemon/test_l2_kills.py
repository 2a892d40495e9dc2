"""A daemon that is killed while it writes to its folder and reads from it: the next one has right bytes or misses, and its accounting balances."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from support.daemon import Daemon
from support.memory import awkward
from support.worker import Worker, make_keys

from kvserver.protocol import AwaitFill

PROMPTS, CHUNKS = 12, 5
Versions = defaultdict[bytes, list[bytes]]  # by key, what was stored under it


class Killed:
    """Daemons one after the other on one folder, which is too small for all prompts."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.daemon = Daemon(l2=f"file://{folder}?size=3MiB", l1_size="2MiB")
        self.counts: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._versions: Versions = defaultdict(list)

    def run(self) -> None:
        """One daemon's time, from its start to its kill."""
        self.daemon.start()
        self.daemon.wait_for_tiers()
        with Worker(self.daemon.endpoint, geometry=awkward(scale=8)) as worker:
            self._look(worker)
            tier = self.daemon.tier()
            assert (tier["corrupt"], tier["errors"]) == (0, 0), "a killed process leaves whole records"
            assert tier["used_bytes"] <= tier["size_bytes"]
            self._write_until_killed(worker)

    def _look(self, worker: Worker) -> None:
        """Read what earlier daemons wrote."""
        for prompt in self._dice.sample(range(PROMPTS), PROMPTS // 2):
            keys = make_keys(CHUNKS, prompt)
            for key, chunk in zip(keys, worker.found_in_l2(keys), strict=False):
                assert chunk in self._versions[key], "WRONG BYTES"
                self.counts["found"] += 1
        self.daemon.wait_for_accounting(tickets=0, pins=0, leases=0)
        self.daemon.audit()

    def _write_until_killed(self, worker: Worker) -> None:
        """Stores of the same blocks under many keys, and fills; nothing waits for a reply."""
        worker.memory.fill()
        blocks = worker.blocks_for(CHUNKS, first=1 + CHUNKS * worker.chunk_blocks)
        chunks = worker.chunks_in(blocks)
        end = time.monotonic() + self._dice.uniform(0.0, 0.15)
        while time.monotonic() < end:
            keys = make_keys(CHUNKS, self._dice.randrange(PROMPTS))
            for key, chunk in zip(keys, chunks, strict=True):
                self._versions[key].append(chunk)
            worker.begin_store(keys, blocks)
            worker.send(AwaitFill(worker.lookup_message(make_keys(CHUNKS, self._dice.randrange(PROMPTS))), 1000))
            time.sleep(self._dice.uniform(0.0, 0.01))
        self.daemon.kill()
        self.counts["kills"] += 1


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.long)])
def test_what_killed_daemons_wrote_comes_back_byte_for_byte_or_is_missing(tmp_path: Path, kills: int) -> None:
    killed = Killed(tmp_path / "l2", seed=kills)
    try:
        for _ in range(kills + 1):
            killed.run()
    finally:
        killed.daemon.close()
    print(dict(killed.counts))
    assert killed.counts["found"] > kills, "hits come back"
