"""What clients of the status pages wait: a probe beside a scrape and matches of 128k tokens, and eight routers at once. What the page
at / costs: processor time of an idle daemon without it, with it open, and with a scraper, and matches and lookups beside open pages.

    .venv/bin/python bench/pages.py [--program COMMAND ...]

A real daemon with one engine. Every client is a process of its own, on one connection that is kept. `--program`: the daemon's
command up to `serve`, to compare another one.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from common import percentile, table
from rig import BenchDaemon, BenchWorker

from kvserver.protocol import DescribeScheduler

TOKENS, BLOCK_TOKENS, SAMPLES, ROUTERS = 131_072, 16, 1000, 8
IDLE_SECONDS, OPEN_PAGES, LOOK_SECONDS = 20, 10, 2.0
CLIENT = """
import http.client, sys, time
port, method, path, count, pause = sys.argv[1:]
body = sys.stdin.buffer.read()
connection = http.client.HTTPConnection("127.0.0.1", int(port))
for _ in range(int(count)):
    began = time.perf_counter()
    connection.request(method, path, body, {"Content-Type": "application/msgpack"})
    answer = connection.getresponse()
    assert answer.read() and answer.status == 200, answer.status
    print((time.perf_counter() - began) * 1e3)
    time.sleep(float(pause))
"""


# What a browser requests while the page is open, all LOOK_SECONDS; the first looks as if it had just been opened.
PAGE = """
import http.client, json, sys, time
port, pause = int(sys.argv[1]), float(sys.argv[2])
connection, since = http.client.HTTPConnection("127.0.0.1", port), 0
def get(path):
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    return json.loads(body) if answer.status == 200 else {}
for number in range(10**9):
    get("/status")
    found = get(f"/history?since={since}")
    since = found.get("first", 0) + len(found.get("rows", []))
    if number % 8 == 0:
        get("/explain?minutes=60&limit=50")
    print(number, flush=True)
    time.sleep(pause)
"""


class OpenPage:
    """A process that requests what an open page does."""

    def __init__(self, port: int) -> None:
        words = [sys.executable, "-S", "-c", PAGE, str(port), str(LOOK_SECONDS)]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has looked once

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class HttpClient:
    """A process that sends one request after the other."""

    def __init__(self, port: int, request: str, count: int, body: object = None, pause: float = 0.0) -> None:
        words = [sys.executable, "-S", "-c", CLIENT, str(port), *request.split(), str(count), str(pause)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.msgpack.encode(body) if body is not None else b"")
        self._process.stdin.close()

    def millis(self) -> list[float]:
        """Of all its requests, when the last was answered."""
        assert self._process.stdout is not None
        found = [float(line) for line in self._process.stdout]
        assert self._process.wait() == 0
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def idle_percent(pid: int) -> float:
    """Of one processor, of all threads of the process, over IDLE_SECONDS."""

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before, began = ticks(), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    return 100 * (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - began)


def own_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def costs_of_the_page(daemon: BenchDaemon, worker: BenchWorker, show: Callable[[str, list[float]], None]) -> None:
    """Idle processor time and memory; then matches and lookups, in turn without and with pages open."""
    port, pid = daemon.http_port, daemon.process.pid
    rng = random.Random(1)
    hashes = {"block_hashes": rng.randbytes(32 * TOKENS // BLOCK_TOKENS), "hash_bytes": 32}
    rows: list[list[object]] = [["no page open", idle_percent(pid), own_mib(pid)]]
    pages = [OpenPage(port)]
    rows.append(["one page open", idle_percent(pid), own_mib(pid)])
    pages += [OpenPage(port) for _ in range(OPEN_PAGES - 1)]
    rows.append([f"{OPEN_PAGES} pages open", idle_percent(pid), own_mib(pid)])
    for page in pages:
        page.close()
    print(table(["idle daemon", "CPU % of one", "own MiB"], rows))
    match: dict[int, list[float]] = {0: [], OPEN_PAGES: []}
    looked: dict[int, list[float]] = {0: [], OPEN_PAGES: []}
    for _ in range(4):
        for count in match:
            pages = [OpenPage(port) for _ in range(count)]
            match[count] += HttpClient(port, "POST /kv/match", SAMPLES // 4, hashes).millis()
            for _ in range(SAMPLES // 4):
                began = time.perf_counter()
                worker.lookup(hashes["block_hashes"])  # type: ignore[arg-type]
                looked[count].append((time.perf_counter() - began) * 1e3)
            for page in pages:
                page.close()
    for count in match:
        show(f"POST /kv/match of 8,192 hashes, {count} pages open", match[count])
        show(f"lookup of 8,192 chunks, all missed, {count} pages open", looked[count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only-page", action="store_true", help="measure only what the page costs")
    parser.add_argument("--program", nargs=argparse.REMAINDER, default=())
    arguments = parser.parse_args()
    daemon = BenchDaemon(arguments.program, l1_size="64MiB")
    worker = BenchWorker(daemon.endpoint, planes=1, run=4096, num_blocks=64, block_tokens=BLOCK_TOKENS)
    how = {"hash_algorithm": "sha256", "hash_start": bytes(32), "hash_block_tokens": BLOCK_TOKENS, "hash_form": "bytes"}
    who = {"instance_id": worker.instance_id, "incarnation": worker.incarnation, "model_name": "bench", "variant": ""}
    worker.client.channel.send(DescribeScheduler(**who, **how))
    worker.lookup(bytes(32))  # answered after the description was handled
    rng, port = random.Random(0), daemon.http_port
    tokens = {"model": "bench", "tokens": [rng.randrange(128_000) for _ in range(TOKENS)]}
    hashes = {"block_hashes": rng.randbytes(32 * TOKENS // BLOCK_TOKENS), "hash_bytes": 32}
    rows: list[list[object]] = []

    def show(what: str, millis: list[float]) -> None:
        rows.append([what, percentile(millis, 0.5), percentile(millis, 0.99), max(millis)])

    try:
        costs_of_the_page(daemon, worker, show)
        if arguments.only_page:
            print(table(["request", "p50 ms", "p99 ms", "max ms"], rows))
            return
        show("GET /livez", HttpClient(port, "GET /livez", SAMPLES).millis())
        beside = [HttpClient(port, "POST /kv/match", 10**9, tokens), HttpClient(port, "GET /metrics", 10**9)]
        show(
            "GET /livez, beside matches of 128k tokens and scrapes",
            HttpClient(port, "GET /livez", SAMPLES, pause=0.005).millis(),
        )
        for client in beside:
            client.kill()
        routers = [HttpClient(port, "POST /kv/match", SAMPLES, hashes) for _ in range(ROUTERS)]
        show("POST /kv/match of 8,192 hashes, 8 clients", [value for each in routers for value in each.millis()])
        print(table(["request", "p50 ms", "p99 ms", "max ms"], rows))
    finally:
        daemon.close()


if __name__ == "__main__":
    main()
