"""Lookups through a real daemon, from a client process, beside a bare echo of the same bytes.

    python bench/rpc.py [--samples 2000] [--chunks 1000000]

Columns: tokens looked up (256 per chunk, all hit), bytes of the request on the wire, p50 and p99 in
milliseconds from before the send to after the decode, and the p50 of a ROUTER that sends the same
frames back, in a process of its own. First of all, what a prefill of 128k tokens sends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
import uuid
from array import array
from collections.abc import Callable

import zmq
from common import percentile, table
from msgspec import structs
from rig import BenchDaemon, BenchWorker, CountingRelay, idle_cpu, make_keys, rss_bytes

from kvserver.protocol import KEY_BYTES, Lookup, LookupReply, encode
from kvserver.protocol.client import Client

CHUNK_TOKENS = 256
BLOCK_TOKENS = 32
FILL_CHUNKS = 1024  # in one message


def samples_of(count: int, action: Callable[[], object]) -> list[float]:
    for _ in range(50):
        action()
    found = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        found.append((time.perf_counter() - began) * 1000)
    return found


def echo_server(endpoint: str) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(endpoint)
    while True:
        router.send_multipart(router.recv_multipart())


def echo_p50(size: int, count: int) -> float:
    with tempfile.TemporaryDirectory(prefix="kve-") as folder:
        endpoint = f"ipc://{folder}/e"
        server = multiprocessing.Process(target=echo_server, args=(endpoint,), daemon=True)
        server.start()
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(endpoint)
        payload = bytes(size)

        def once() -> None:
            socket.send_multipart([b"12345678", payload])
            socket.recv_multipart()

        found = percentile(samples_of(count, once), 0.5)
        socket.close(0)
        server.kill()  # it may have a handler of SIGTERM from this process
        server.join()
        return found


def closed_loop(endpoint: str, message: Lookup, started: object, seconds: float) -> None:
    """Another client that looks up without pause."""
    with Client(endpoint) as client:
        client.ask(message, LookupReply)
        started.set()  # type: ignore[attr-defined]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            client.ask(message, LookupReply)


PREFILL_TOKENS, STEP_TOKENS, PREFILL_BLOCK_TOKENS = 131072, 2048, 16


def prefill_bytes(shuffled: bool) -> tuple[int, int]:
    """(messages, bytes) that one prompt of 128k tokens sends in steps of 2k: one Lookup, the Stores, EndRequest."""
    blocks = array("I", range(1, 1 + PREFILL_TOKENS // PREFILL_BLOCK_TOKENS))
    if shuffled:
        random.Random(1).shuffle(blocks)
    keys = make_keys(f"prefill {shuffled}", PREFILL_TOKENS // CHUNK_TOKENS)
    step_keys, step_blocks = STEP_TOKENS // CHUNK_TOKENS * KEY_BYTES, STEP_TOKENS // PREFILL_BLOCK_TOKENS
    daemon = BenchDaemon(l1_size=64 << 20, chunk_tokens=CHUNK_TOKENS)
    with tempfile.TemporaryDirectory(prefix="kvr-") as folder:
        relay = CountingRelay(daemon.endpoint, folder)
        worker = BenchWorker(
            relay.endpoint,
            planes=1,
            run=64,
            num_blocks=len(blocks) + 1,
            block_tokens=PREFILL_BLOCK_TOKENS,
            incarnation=uuid.uuid4().hex,
            request_id=f"cmpl-{uuid.uuid4().hex}-0",
            variant=uuid.uuid4().hex[:30],
        )
        messages, size = relay.messages, relay.payload_bytes
        assert worker.lookup(keys) == 0
        for step in range(PREFILL_TOKENS // STEP_TOKENS):
            worker.store(
                keys[step * step_keys : (step + 1) * step_keys], blocks[step * step_blocks : (step + 1) * step_blocks]
            )
        worker.end_request()
        assert worker.lookup(keys) == len(keys) // KEY_BYTES
        found = relay.messages - messages - 1, relay.payload_bytes - size - len(encode(worker.lookup_message(keys))) - 8
        relay.close()
    daemon.close()
    return found


def fill(ranks: list[BenchWorker], name: str, count: int) -> bytes:
    """Store `count` chunks; returns their keys."""
    keys = make_keys(name, count)
    for first in range(0, count, FILL_CHUNKS):
        number = min(FILL_CHUNKS, count - first)
        ids = array("I", range(1, 1 + number * ranks[0].chunk_blocks))
        for worker in ranks:
            worker.store(keys[first * KEY_BYTES : (first + number) * KEY_BYTES], ids)
    return keys


def lookup_row(ranks: list[BenchWorker], name: str, tokens: int, samples: int) -> list[object]:
    """Wire bytes, p50, p99 and the echo's p50, of looking up what was just stored."""
    chunks = tokens // (ranks[0].chunk_blocks * ranks[0].groups[0].block_tokens)
    keys = fill(ranks, f"{name} {tokens}", chunks)
    assert ranks[0].lookup(keys) == chunks
    wire = len(encode(ranks[0].lookup_message(keys))) + 8
    times = samples_of(samples, lambda: ranks[0].lookup(keys))
    return [wire, percentile(times, 0.5), percentile(times, 0.99), echo_p50(wire, samples)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    options = parser.parse_args()
    prefills: list[list[object]] = []
    for order in ("ascending", "shuffled"):
        messages, sent = prefill_bytes(shuffled=order == "shuffled")
        prefills.append([order, messages, PREFILL_TOKENS // CHUNK_TOKENS * KEY_BYTES * 2, sent])
    print(table(["block ids of 128k tokens", "messages", "bytes of keys", "bytes in all"], prefills), end="\n\n")
    size = options.chunks * 4096 + (128 << 20)
    daemon = BenchDaemon(l1_size=size, chunk_tokens=CHUNK_TOKENS)
    idle_rss, idle = rss_bytes(daemon.process.pid), idle_cpu(daemon.process.pid)
    worker = BenchWorker(
        daemon.endpoint,
        planes=1,
        run=64,
        num_blocks=FILL_CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS + 1,
        block_tokens=BLOCK_TOKENS,
    )
    rows: list[list[object]] = []
    held = 0
    for step in sorted({10_000, 100_000, options.chunks}):
        before = rss_bytes(daemon.process.pid)
        fill([worker], f"fill {step}", step - held)
        per_chunk = (rss_bytes(daemon.process.pid) - before) / (step - held) - 4096
        held = step
        for tokens in (1024, 8192, PREFILL_TOKENS):
            rows.append([step, 1, tokens, *lookup_row([worker], f"hot {step}", tokens, options.samples)])
        print(f"{step} chunks in L1: {per_chunk:.0f} bytes of resident memory per chunk beside its page")
    ranks = [
        BenchWorker(
            daemon.endpoint,
            planes=1,
            run=64,
            num_blocks=FILL_CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS + 1,
            block_tokens=BLOCK_TOKENS,
            instance_id="eight",
            rank=rank,
            world_size=8,
        )
        for rank in range(8)
    ]
    rows.append([held, 8, PREFILL_TOKENS, *lookup_row(ranks, "eight", PREFILL_TOKENS, options.samples)])
    keys = fill([worker], "beside", 512)
    started = multiprocessing.Event()
    looper = multiprocessing.Process(
        target=closed_loop,
        args=(daemon.endpoint, structs.replace(worker.lookup_message(keys), request_id="looper"), started, 60),
        daemon=True,
    )
    looper.start()
    started.wait(20)
    times = samples_of(options.samples, lambda: worker.lookup(keys[: 4 * 32]))
    rows.append([held, 1, "1024 beside 128k", "", percentile(times, 0.5), percentile(times, 0.99), ""])
    looper.terminate()
    looper.join()
    print(table(["chunks", "ranks", "tokens", "wire bytes", "p50 ms", "p99 ms", "echo p50 ms"], rows))
    print(f"start to ready {daemon.seconds_to_ready:.2f} s, idle RSS {idle_rss / 1e6:.0f} MB, idle CPU {idle:.1%}")
    daemon.close()


if __name__ == "__main__":
    main()
