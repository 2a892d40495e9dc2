"""What the size of a chunk costs: lookups, bytes on the wire, memory, KV events, copies.

    .venv/bin/python bench/chunks.py [--sizes 16 32 64 128 256] [--only PART ...]

Each part measures all sizes in turn in one run, or beside a ceiling of the same run. What small chunks gain is measured by
`engine.py --ends`. See README.md for the columns.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
import tempfile
import threading
import time
from array import array
from contextlib import ExitStack

import zmq
from common import MemcpyCeiling, alternate, median, percentile, table
from daemon import Subject
from gpu_descriptors import MODELS as GPU_MODELS
from gpu_descriptors import Board
from index_memory import PAGE_BYTES, fresh, whole
from rig import BenchDaemon, BenchWorker, cpu_seconds
from rpc import FILL_CHUNKS, PREFILL_TOKENS, echo_p50, fill, prefill_bytes, samples_of

from kvserver.cache import PagePool
from kvserver.protocol import KEY_BYTES, TOKEN_BYTES, ChunkContents, encode

BLOCK = 16
TIB = 1 << 40
# Bytes of a token, all ranks, and the slots of a chunk. From the models' configurations, KV in 16 bits.
SHAPES = {
    "Llama-3-8B": (32 * 2 * 8 * 128 * 2, 1),
    "Llama-70B TP 8": (80 * 2 * 8 * 128 * 2, 8),
    "DeepSeek MLA": (61 * 576 * 2, 1),
    "Qwen2.5-0.5B": (24 * 2 * 2 * 64 * 2, 1),
}

# ---- lookups and bytes on the wire --------------------------------------------------------------

TURNS = 10


def lookups(sizes: list[int], samples: int, tokens_in_l1: int) -> str:
    """Of 128k tokens that are all there, among `tokens_in_l1` of one namespace; the sizes in turn."""
    took: dict[int, list[float]] = {size: [] for size in sizes}
    echo: dict[int, list[float]] = {size: [] for size in sizes}
    cpu = dict.fromkeys(sizes, 0.0)  # seconds, of daemon and client
    done = dict.fromkeys(sizes, 0)
    rows: list[list[object]] = []
    with ExitStack() as stack:
        daemons, workers, keys = {}, {}, {}
        for size in sizes:
            count = tokens_in_l1 // size
            l1_size = (count + 2 * PREFILL_TOKENS // size) * PAGE_BYTES + (64 << 20)
            daemons[size] = BenchDaemon(l1_size=l1_size, chunk_tokens=size)
            stack.callback(daemons[size].close)
            workers[size] = worker = BenchWorker(
                daemons[size].endpoint, planes=1, run=64, num_blocks=FILL_CHUNKS * size // BLOCK + 1, block_tokens=BLOCK
            )
            fill([worker], f"fill {size}", count)
            keys[size] = fill([worker], f"hot {size}", PREFILL_TOKENS // size)
            assert worker.lookup(keys[size]) == PREFILL_TOKENS // size

        def look_up(size: int) -> None:
            workers[size].lookup(keys[size])
            done[size] += 1

        wire = {size: 8 + len(encode(workers[size].lookup_message(keys[size]))) for size in sizes}
        for _ in range(TURNS):
            for size in sizes:
                pid = daemons[size].process.pid
                began = cpu_seconds(pid) + time.process_time()
                took[size] += samples_of(-(-samples // TURNS), lambda n=size: look_up(n))
                cpu[size] += cpu_seconds(pid) + time.process_time() - began
                echo[size].append(echo_p50(wire[size], 100))
    for size in sizes:
        ordered, shuffled = (prefill_bytes(shuffled, size)[1] for shuffled in (False, True))
        p50, p99 = (percentile(took[size], share) for share in (0.5, 0.99))
        rows.append([
            size, PREFILL_TOKENS // size, tokens_in_l1 // size, p50, p99, median(echo[size]), 1000 * cpu[size] / done[size],
            wire[size] / 1000, ordered / 1000, shuffled / 1000,
        ])  # fmt: skip
    head = [
        "chunk", "keys", "chunks in L1", "p50 ms", "p99 ms", "echo p50", "CPU ms", "lookup KB", "prefill KB",
        "shuffled",
    ]  # fmt: skip
    return table(head, rows)


# ---- memory -------------------------------------------------------------------------------------


def memory(sizes: list[int], chunks: int) -> str:
    """Of a daemon whose L1 of 1 TiB is full. Measured at `chunks` chunks; bytes a chunk grow little beyond."""
    base = {ranks: fresh(whole, chunks, ranks, False)[1] for ranks in (1, 8)}
    rows: list[list[object]] = []
    for size in sizes:
        described = fresh(whole, min(chunks, (1 << 21) // size), 1, True, size // BLOCK)[0]
        row: list[object] = [size, base[1], base[8], described]
        for token, ranks in SHAPES.values():
            count = TIB / (token * size)
            row.append(f"{count / 1e6:.2f} M: {count * base[ranks] / 1e6:,.0f}")
        rows.append(row)
    head = ["chunk", "bytes", "8 slots", "with KV events", *(f"{name}, MB" for name in SHAPES)]
    return table(head, rows)


# ---- KV events ----------------------------------------------------------------------------------

STEP = 2048  # tokens of a store


class Listener:
    """Counts the bytes that a daemon publishes."""

    def __init__(self, endpoint: str) -> None:
        self.bytes = self.batches = 0
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self._socket.poll(100):
                self.bytes += sum(len(frame) for frame in self._socket.recv_multipart())
                self.batches += 1
        self._socket.close(0)

    def connected(self) -> None:
        """Wait for the batch that a new subscriber receives first."""
        while not self.batches:
            time.sleep(0.01)

    def quiet(self) -> None:
        """Wait until nothing was received for a second."""
        before = -1
        while before != self.bytes:
            before = self.bytes
            time.sleep(1)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()


def kv_events(sizes: list[int], tokens: int) -> str:
    rows: list[list[object]] = []
    for size in sizes:
        quiet, _, _ = _stored(size, tokens, published=False)
        busy, sent, batches = _stored(size, tokens, published=True)
        thousand = tokens / 1000
        rows.append([
            size, quiet / thousand * 1e6, busy / thousand * 1e6, (busy - quiet) / thousand * 1e6, sent / tokens,
            batches / thousand,
        ])  # fmt: skip
    head = ["chunk", "stores us", "with KV events us", "KV events us", "bytes a token", "batches"]
    return table(head, rows)


def _stored(size: int, tokens: int, published: bool) -> tuple[float, int, int]:
    """(seconds of the daemon's CPU, bytes published, batches) for stores of so many tokens, STEP at a time."""
    dice = random.Random(size)
    with tempfile.TemporaryDirectory(prefix="kve-") as folder, ExitStack() as stack:
        endpoint = f"ipc://{folder}/events"
        flags = {"kv_events_endpoint": endpoint, "kv_events_memory": "4GiB"} if published else {}
        daemon = BenchDaemon(l1_size=tokens // size * PAGE_BYTES + (64 << 20), chunk_tokens=size, **flags)
        stack.callback(daemon.close)
        worker = BenchWorker(daemon.endpoint, planes=1, run=64, num_blocks=STEP // BLOCK + 1, block_tokens=BLOCK)
        listener = None
        if published:
            worker.describe_scheduler()
            listener = Listener(endpoint)
            stack.callback(listener.close)
            listener.connected()
        ids = array("I", range(1, STEP // BLOCK + 1))
        step, began, parent = size // BLOCK, cpu_seconds(daemon.process.pid), b""
        for _ in range(tokens // STEP):
            hashes = [dice.randbytes(KEY_BYTES) for _ in ids]
            contents = ChunkContents(KEY_BYTES, b"".join(hashes), dice.randbytes(TOKEN_BYTES * STEP), parent)
            worker.store(b"".join(hashes[step - 1 :: step]), ids, contents=contents if published else None)
            parent = hashes[-1]
        if listener is not None:
            listener.quiet()
        found = cpu_seconds(daemon.process.pid) - began
        return found, listener.bytes if listener else 0, listener.batches if listener else 0


# ---- copies -------------------------------------------------------------------------------------

COPIED = 4096  # tokens
RANKS = {  # planes and bytes of a token in each, of one rank: K and V of each layer apart, or the latent
    "Llama-3-8B": (64, 8 * 128 * 2),
    "Llama-70B TP 8": (160, 128 * 2),
    "DeepSeek MLA": (61, 576 * 2),
}


def copies(sizes: list[int], rounds: int) -> str:
    """Through a daemon with one copying thread, the sizes and memcpy in turn."""
    rows: list[list[object]] = []
    for name, (planes, token) in RANKS.items():
        with ExitStack() as stack:
            subjects = []
            for size in sizes:
                blocks = COPIED // BLOCK
                subjects.append(Subject(1, planes, BLOCK * token, blocks=blocks, block_tokens=BLOCK, chunk_tokens=size))
                stack.callback(subjects[-1].daemon.close)
            ceiling = MemcpyCeiling(subjects[0].payload, 1)
            moves = [move for each in subjects for move in (each.store, each.load)]
            memcpy, *found = alternate(rounds, ceiling.gb_per_second, *moves)
        pool = PagePool(1 << 30, PAGE_BYTES)
        for number, size in enumerate(sizes):
            stores, loads = (
                median([each / top for each, top in zip(of, memcpy, strict=True)])
                for of in found[2 * number : 2 * number + 2]
            )
            slot = size * planes * token
            lost = pool.pages_for(slot) * PAGE_BYTES / slot - 1
            rows.append([name, size, slot / (1 << 20), BLOCK * token, median(memcpy), stores, loads, f"{lost:.1%}"])
    head = ["rank of", "chunk", "slot MiB", "run", "memcpy GB/s", "store/memcpy", "load/memcpy", "L1 lost"]
    return table(head, rows)


def pieces(sizes: list[int]) -> str:
    """Of a DMA copy of 8192 tokens to a GPU, whose slots lie one behind the other, or apart."""
    board = Board()
    rows: list[list[object]] = []
    for model in GPU_MODELS[:3]:
        for one in (True, False):
            planes = board.planes(model, one)
            ordered = list(range(1, model.blocks + 1))
            scattered = random.Random(0).sample(ordered, model.blocks)
            row: list[object] = [model.name, "one" if one else "one a layer"]
            for size in sizes:
                fits = size >= model.block_tokens
                kinds = ((ordered, False), (ordered, True), (scattered, True))
                row.append(
                    " ".join(str(board.pieces(model, planes, ids, size, apart)) for ids, apart in kinds) if fits else ""
                )
            rows.append(row)
    return table(["model", "allocations", *(str(size) for size in sizes)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--only", nargs="+", default=["lookups", "memory", "events", "copies", "pieces"])
    parser.add_argument("--samples", type=int, default=1000, help="lookups")
    parser.add_argument("--rounds", type=int, default=5, help="of copies")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    sizes, llama = options.sizes, SHAPES["Llama-3-8B"][0]
    parts = {
        "lookups": lambda: lookups(sizes, options.samples, TIB // llama),
        "memory": lambda: memory(sizes, 100_000),
        "events": lambda: kv_events(sizes, 1 << 20),
        "copies": lambda: copies(sizes, options.rounds),
        "pieces": lambda: pieces(sizes),
    }
    assert math.lcm(*sizes, BLOCK) == max(sizes), "each size holds the smaller ones, and whole blocks"
    for name in options.only:
        print(f"-- {name}", parts[name](), sep="\n", end="\n\n", flush=True)


if __name__ == "__main__":
    main()
