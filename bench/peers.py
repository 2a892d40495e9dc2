"""LMCache's multiprocess server beside kvserver, in one run and in turn.

    KVSERVER_PEER_PYTHON=/path/to/venv/bin/python .venv/bin/python bench/peers.py [--samples 1000] [--rounds 9]

The peer is installed in an environment of its own and is never a dependency: `python -m venv V && V/bin/pip
install lmcache==0.5.6` (on a machine without GPU first `V/bin/pip install torch` of its CPU build). Both
sides are measured as their engines' adapters use them: the peer with its own adapters, lookups polled
every 0.1 ms, and with its server's defaults but for the sizes here. Without the peer this prints that and exits with 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from array import array
from pathlib import Path
from typing import Any

from common import MemcpyCeiling, alternate, median, percentile, table
from daemon import PAYLOAD, TOKENS, Subject
from rig import BenchDaemon, BenchWorker, CountingRelay, idle_cpu, make_keys, rss_bytes
from rpc import (
    CHUNK_TOKENS,
    PREFILL_BLOCK_TOKENS,
    PREFILL_TOKENS,
    STEP_TOKENS,
    echo_p50,
    prefill_bytes,
    samples_of,
)

from kvserver.protocol import REQUEST_ID_BYTES, encode

LAYERS, HEADS, BLOCK_TOKENS = 32, 8, 32
RUN = BLOCK_TOKENS * HEADS * 128 * 2  # one layer's K or V of a block: both sides see [2, blocks, tokens, heads, 128]
LOOKUP_BLOCKS = PREFILL_TOKENS // BLOCK_TOKENS + 1
L1_GIB = 2
TURNS = 10  # the two sides of a lookup are measured in so many turns
START_SECONDS = 120
HOW = "pip install lmcache==0.5.6 into a venv of its own, then KVSERVER_PEER_PYTHON=that/bin/python or --peer-python"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Peer:
    """The peer's server, and a process with its adapters from connect() on. What both log stays in a file."""

    def __init__(self, python: str, l2: dict[str, Any] | None = None) -> None:
        """`l2`: of its `--l2-adapter`."""
        self._python = python
        self._environ = os.environ | {"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven", "LMCACHE_DISABLE_BANNER": "1"}
        self._log = Path(tempfile.gettempdir(), f"kvserver-peer-{os.getpid()}.log").open("w")  # noqa: SIM115
        self._driver: subprocess.Popen[str] | None = None
        port, self._http = free_port(), f"http://127.0.0.1:{free_port()}"
        self.url = f"tcp://127.0.0.1:{port}"
        flags = {"port": port, "http-port": self._http.rsplit(":", 1)[1], "l1-size-gb": L1_GIB}
        flags |= {"eviction-policy": "LRU", "chunk-size": CHUNK_TOKENS}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        words += ["--l2-adapter", json.dumps(l2)] if l2 else []
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [python, "-m", "lmcache.cli.main", "server", *words],
            stdout=self._log,
            stderr=self._log,
            env=self._environ,
        )
        while not self._healthy():
            if self.process.poll() is not None or time.perf_counter() - began > START_SECONDS:
                raise RuntimeError(f"the peer's server did not start: {self._log.name}")
            time.sleep(0.01)
        self.seconds_to_ready = time.perf_counter() - began

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._http}/healthcheck", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def connect(self, url: str, worker_url: str, **geometry: int) -> None:
        """Its two adapters, at these addresses, with KV of this geometry; replaces the ones before."""
        if self._driver is None:
            self._driver = subprocess.Popen(
                [self._python, str(Path(__file__).with_name("peer_lmcache.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=self._environ,
            )
        self.ask("connect", url=url, worker_url=worker_url, **geometry)

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        assert self._driver is not None
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self._driver.stdin.flush()
        answer: dict[str, Any] = json.loads(self._driver.stdout.readline() or '{"error": "its process ended"}')
        if "error" in answer:
            raise RuntimeError(f"the peer: {answer['error']}: {self._log.name}")
        return answer

    def clear(self) -> None:
        """L1, but for what is being copied; what lies behind it stays."""
        urllib.request.urlopen(urllib.request.Request(f"{self._http}/cache/clear", method="POST"), timeout=30).close()

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._http}/status", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._driver, self.process):
            if process is not None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._log.close()


class PeerCopies:
    """Store and load of the same prompt and geometry as daemon.Subject's, through the peer."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._names = itertools.count()
        self._name = ""
        blocks = TOKENS // BLOCK_TOKENS + 1
        peer.connect(peer.url, peer.url, layers=LAYERS, heads=HEADS, blocks=blocks, block_tokens=BLOCK_TOKENS)

    def store(self) -> float:
        self._peer.clear()
        self._name = f"copy {next(self._names)}"
        return PAYLOAD / self._peer.ask("store", name=self._name, count=TOKENS, step=TOKENS)["seconds"] / 1e9

    def load(self) -> float:
        return PAYLOAD / self._peer.ask("load", name=self._name, count=TOKENS)["seconds"] / 1e9


def processes(peer: Peer, daemon: BenchDaemon) -> None:
    rows: list[list[object]] = []
    for what, ours, theirs in (
        ("start to ready s", daemon.seconds_to_ready, peer.seconds_to_ready),
        ("idle RSS MB", rss_bytes(daemon.process.pid) / 1e6, rss_bytes(peer.process.pid) / 1e6),
        ("idle CPU % of a core", 100 * idle_cpu(daemon.process.pid), 100 * idle_cpu(peer.process.pid)),
    ):
        rows.append([what, ours, theirs, theirs / ours if ours else "-"])
    print(table(["process", "kvserver", "LMCache", "LMCache / kvserver"], rows), end="\n\n")


def wire(peer: Peer) -> None:
    messages, ours = prefill_bytes(shuffled=False)
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        relays = CountingRelay(peer.url, folder), CountingRelay(peer.url, folder)
        blocks = PREFILL_TOKENS // PREFILL_BLOCK_TOKENS + 1
        peer.connect(*(r.endpoint for r in relays), layers=1, heads=1, blocks=blocks, block_tokens=PREFILL_BLOCK_TOKENS)
        before = [(r.messages, r.payload_bytes) for r in relays]
        peer.ask("prefill", name="prefill", count=PREFILL_TOKENS, step=STEP_TOKENS)
        counts = [(r.messages - m, r.payload_bytes - b) for r, (m, b) in zip(relays, before, strict=True)]
        peer.connect(peer.url, peer.url, layers=1, heads=1, blocks=LOOKUP_BLOCKS, block_tokens=BLOCK_TOKENS)
        for relay in relays:
            relay.close()
    theirs = sum(size for _, size in counts)
    rows = [[messages, ours, sum(number for number, _ in counts), theirs, theirs / ours]]
    header = ["128k prefill: kvserver messages", "bytes", "LMCache messages", "bytes", "LMCache / kvserver"]
    print(table(header, rows), end="\n\n")


def lookups(peer: Peer, daemon: BenchDaemon, samples: int) -> None:
    """REQUIRES: the peer is connected with LOOKUP_BLOCKS blocks."""
    worker = BenchWorker(daemon.endpoint, planes=1, run=64, num_blocks=LOOKUP_BLOCKS, block_tokens=BLOCK_TOKENS)
    rows: list[list[object]] = []
    for tokens in (1024, 8192, 131072):
        keys, name = make_keys(f"lookup {tokens}", tokens // CHUNK_TOKENS), f"lookup {tokens}"
        worker.store(keys, array("I", range(1, 1 + tokens // BLOCK_TOKENS)))
        peer.ask("store", name=name, count=tokens, step=tokens)
        peer.ask("await", name=name, count=tokens)
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(TURNS):
            ours += samples_of(samples // TURNS, lambda k=keys: worker.lookup(k))
            theirs += peer.ask("lookup", name=name, count=tokens, samples=samples // TURNS)["milliseconds"]
        echo = echo_p50(len(encode(worker.lookup_message(keys))) + REQUEST_ID_BYTES, samples)
        middle = percentile(ours, 0.5), percentile(theirs, 0.5)
        tail = percentile(ours, 0.99), percentile(theirs, 0.99)
        rows.append([tokens, *middle, middle[1] / middle[0], *tail, tail[1] / tail[0], echo])
    header = [
        "lookup of tokens",
        "kvserver p50 ms",
        "LMCache",
        "ratio",
        "kvserver p99 ms",
        "LMCache",
        "ratio",
        "echo p50",
    ]
    print(table(header, rows), end="\n\n")


def copies(peer: Peer, rounds: int) -> None:
    subject, other, ceiling = Subject(2, planes=2 * LAYERS, run=RUN), PeerCopies(peer), MemcpyCeiling(PAYLOAD, 2)
    memcpy, *found = (
        median(values)
        for values in alternate(rounds, ceiling.gb_per_second, subject.store, other.store, subject.load, other.load)
    )
    rows: list[list[object]] = []
    for what, ours, theirs in (("store", *found[:2]), ("load", *found[2:])):
        rows.append([what, ours, theirs, ours / theirs, memcpy, ours / memcpy, theirs / memcpy])
    header = [f"{TOKENS} tokens, {PAYLOAD >> 20} MiB", "kvserver GB/s", "LMCache", "kvserver / LMCache", "memcpy"]
    print(table([*header, "kvserver / memcpy", "LMCache / memcpy"], rows))
    subject.daemon.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=os.environ.get("KVSERVER_PEER_PYTHON", ""))
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if not options.peer_python or not installed(options.peer_python):
        print(f"LMCache was not measured: it is not installed. {HOW}")
        return
    daemon = BenchDaemon(l1_size=L1_GIB << 30, chunk_tokens=CHUNK_TOKENS)
    with Peer(options.peer_python) as peer:
        processes(peer, daemon)
        wire(peer)
        lookups(peer, daemon, options.samples)
    daemon.close()
    with Peer(options.peer_python) as peer:  # it gives the last registered layout to all
        copies(peer, options.rounds)


def installed(python: str) -> bool:
    """Whether the peer's package is there; importing it would take seconds."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lmcache') is None)"
    return Path(python).exists() and subprocess.run([python, "-c", program]).returncode == 0


if __name__ == "__main__":
    main()
