"""Time to the first token of a real vLLM engine on CPU: cold, warm from L1, and warm from L2 in a folder.

    KVSERVER_BIN=.venv/bin/kvserver .venv-vllm/bin/python bench/l2_engine.py [FOLDER] [--prompts 9] [--tokens 1500]

One engine stores each fresh prompt, another one that never saw it loads it: first from L1, then, when other prompts have taken its
place in L1, from the folder. Counters of vLLM and of the tier must show where the tokens came from, else the run fails. L1 has room
for one prompt and a half. Expected is 0.5 of cold where the disk allows.

With --peer-vllm-python (or KVSERVER_PEER_VLLM_PYTHON), an interpreter that has vLLM and LMCache both, the same prompts go in the same
turn to two engines with LMCache's multiprocess connector. Its server keeps them in files too, with O_DIRECT; its L1 is cleared in between.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import table
from engine import CHUNK_TOKENS, MODELS, WARM_UPS, Lane, peer_options
from engines import TIMEOUTS, Engines
from peer_files import PeerFiles
from peers import installed
from support.daemon import Daemon, wait_until
from tiny_models import llama, prompt

CHUNK = CHUNK_TOKENS[0]
HEADER = ["cold", "L1", "L2", "L1/cold", "L2/cold", "L2/L1"]


class PeerLanes:
    """Two engines with LMCache's connector, and its server with files."""

    def __init__(self, stack: ExitStack, engines: Engines, python: str, folder: Path) -> None:
        self._files = stack.enter_context(PeerFiles(python, "fs_native", folder))
        started = [engines.get(name, **peer_options(self._files.peer, python)) for name in ("peer cold", "peer warm")]
        self._cold, self._warm = map(Lane, started)

    def cold(self, tokens: list[int], chunks: int) -> float:
        """Returns when its chunks are in files."""
        files = self._files.objects()
        took = self._cold.first_token(tokens)
        self._files.wait_for(files + chunks)
        return took

    def warm(self, tokens: list[int], hit: int) -> float:
        took = self._warm.first_token(tokens, external=hit)
        assert not self._warm.engine.ask("drain", seconds=20)["pending"]
        self._warm.engine.forget()
        return took

    def from_files(self, tokens: list[int], hit: int) -> float:
        self._files.forget()
        return self._warm.first_token(tokens, external=hit)


class Bench:
    def __init__(self, stack: ExitStack, model: Path, folder: Path, tokens: int, peer_python: str = "") -> None:
        self._tokens, self._hit = tokens, (tokens - 1) // CHUNK * CHUNK
        self._seeds = itertools.count()
        l2 = f"file://{folder}/l2?size=8GiB"
        self._daemon = Daemon(l1_size="1GiB", eviction_policy="lru", chunk_tokens=CHUNK, tails="off", l2=l2)
        stack.callback(self._daemon.close)
        self._daemon.start()
        engines = Engines(model, folder, self._daemon.endpoint)
        stack.callback(engines.close)
        started = {name: engines.get(name, extra=TIMEOUTS) for name in ("cold", "warm")}
        self._lanes = {name: Lane(engine) for name, engine in started.items()}
        self._until_registered()
        self._shrink_l1()
        self._peer = PeerLanes(stack, engines, peer_python, folder / "peer") if peer_python else None

    def round(self) -> dict[str, float]:
        """Milliseconds of one fresh prompt."""
        tokens, *others = (prompt(next(self._seeds), self._tokens) for _ in range(3))
        found = {"cold": self._store(tokens)}
        if self._peer:
            found["peer cold"] = self._peer.cold(tokens, self._hit // CHUNK)
            found["peer L1"] = self._peer.warm(tokens, self._hit)
        found["L1"] = self._lanes["warm"].first_token(tokens, external=self._hit)
        self._lanes["warm"].engine.forget()
        for other in others:
            self._store(other)
        before = self._tier()["hits"]
        found["L2"] = self._lanes["warm"].first_token(tokens, external=self._hit)
        assert self._tier()["hits"] - before == self._hit // CHUNK, "L1 had it still"
        if self._peer:
            found["peer L2"] = self._peer.from_files(tokens, self._hit)
        return found

    def _store(self, tokens: list[int]) -> float:
        took = self._lanes["cold"].first_token(tokens)
        self._lanes["cold"].engine.wait_for_stores()
        wait_until(lambda: not self._tier()["queue_objects"], 30, "L2 has it")
        return took

    def _shrink_l1(self) -> None:
        worker = self._daemon.status()["instances"][0]["workers"][0]
        of_prompt = worker["block_bytes"] * self._hit // self._daemon.status()["instances"][0]["block_tokens"]
        self._daemon.terminate()
        self._daemon.flags["l1_size"] = of_prompt * 8 // 5
        self._daemon.start()
        self._until_registered()
        for lane in self._lanes.values():
            wait_until(lambda e=lane.engine: e.counters()["connected"], 30, "the scheduler half connected")
            lane.engine.generate([prompt(next(self._seeds), self._tokens)], max_tokens=1)
            lane.engine.wait_for_stores()

    def _until_registered(self) -> None:
        wait_until(lambda: sum(bool(i["namespace"]) for i in self._daemon.status()["instances"]) == 2, 30, "registered")
        wait_until(lambda: self._tier()["state"] == "ready", 30, "the tier is ready")

    def _tier(self) -> dict[str, Any]:
        found: dict[str, Any] = self._daemon.status()["l2"][0]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peer-vllm-python", default=os.environ.get("KVSERVER_PEER_VLLM_PYTHON", ""))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    peer = options.peer_vllm_python
    peer = peer if peer and installed(peer) else ""
    rows: list[list[object]] = []
    peers: list[list[object]] = []
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="kvserver-bench-", dir=options.folder) as folder, ExitStack() as stack:
            model = llama(Path(folder, "model"), **MODELS[name])
            bench = Bench(stack, model, Path(folder), options.tokens, peer)
            rounds = [bench.round() for _ in range(WARM_UPS + options.prompts)][WARM_UPS:]
        rows.append([name, *medians(rounds, "cold", "L1", "L2")])
        if peer:
            beside = [ratio(rounds, lane, f"peer {lane}") for lane in ("L1", "L2")]
            peers.append([name, *medians(rounds, "peer cold", "peer L1", "peer L2"), *beside])
    print(f"time to first token, ms: {options.tokens} tokens, medians of {options.prompts} prompts, one thread each")
    print(table(["model", *HEADER], rows), end="\n\n")
    if peer:
        print(table(["LMCache", *HEADER, "kvserver/LMCache: L1", "L2"], peers))
    else:
        print("LMCache's tier in files was not measured: no interpreter with vLLM and LMCache; see bench/README.md")


def medians(rounds: list[dict[str, float]], cold: str, l1: str, l2: str) -> list[float]:
    ms = [statistics.median(each[lane] for each in rounds) for lane in (cold, l1, l2)]
    return [*ms, ratio(rounds, l1, cold), ratio(rounds, l2, cold), ratio(rounds, l2, l1)]


def ratio(rounds: list[dict[str, float]], lane: str, other: str) -> float:
    """The median of one lane's time over another's for the same prompt."""
    return statistics.median(each[lane] / each[other] for each in rounds)


if __name__ == "__main__":
    main()
