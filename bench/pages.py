"""What clients of the status pages wait: a probe beside a scrape and matches of 128k tokens, and eight routers at once.

    .venv/bin/python bench/pages.py [--program COMMAND ...]

A real daemon with one engine. Every client is a process of its own, on one connection that is kept. `--program`: the daemon's
command up to `serve`, to compare another one.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys

import msgspec
from common import percentile, table
from rig import BenchDaemon, BenchWorker

from kvserver.protocol import DescribeScheduler

TOKENS, BLOCK_TOKENS, SAMPLES, ROUTERS = 131_072, 16, 1000, 8
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", nargs=argparse.REMAINDER, default=())
    daemon = BenchDaemon(parser.parse_args().program, l1_size="64MiB")
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
