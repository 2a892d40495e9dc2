"""Objects of S3 behind connections of a given rate: put and read in parts beside by one request each, in turn, in one run.

    .venv/bin/python bench/l2_s3_parts.py [--size MB ...] [--rate MB] [--gets]

The store is a process that answers each connection at this rate, by the kernel's pacing, and counts requests. `whole` is the tier with
parts as large as the value. `of rate`: of what so many connections may carry. `plain`: what as many plain sockets read from the same
store of as many bytes, in the same rounds, with no tier; the machine carries no more. A get is faster if all parts begin at once, if
pieces are copied to L1 while others arrive, and if no part is tiny; pieces of 1 MiB, or a part in one piece, are slower.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import median, table
from support.l1_memory import PAGE, name, within
from support.s3 import CREDENTIALS
from support.shared_tiers import TierDaemon

from kvserver.l2 import ObjectMemory, ObjectName, TierOutcome
from kvserver.l2.remote import s3

ROUNDS, TURN_BYTES = 5, 64 << 10
HEADS = ["MB", "objects", "", "", "MB/s", "times", "connections", "of rate", "plain", "of plain", "requests a 1000"]
SO_MAX_PACING_RATE = 47  # of Linux; `socket` has no name for it
PARTS = s3._PART_BYTES, s3._UPLOAD_BYTES


class RatedStore:
    """S3 as far as the tier needs it, from memory. `busiest`: connections that answered with bytes at once."""

    def __init__(self, rate: float) -> None:
        self._rate, self._objects = rate, dict[str, bytes]()
        self._parts: dict[str, dict[int, bytes]] = {}  # of uploads, by name
        self.counts, self.busy, self.busiest = Counter[str](), 0, 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, TURN_BYTES)  # what is sent is away, nearly
            client.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, min(int(self._rate), (1 << 31) - 1))
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        stream = client.makefile("rb")
        try:
            while line := stream.readline():
                method, path, _ = line.decode().split(" ")
                headers = {}
                while (header := stream.readline().strip()) != b"":
                    field, _, value = header.decode().partition(":")
                    headers[field.lower()] = value.strip()
                body = self._receive(stream, int(headers.get("content-length", 0)))
                name, _, query = path.partition("?")
                if "upload" in query:
                    self._upload(client, method, name, query, body)
                else:
                    self._answer(client, method, name, headers, body)
        except OSError:
            pass

    def forget(self) -> None:
        """Drop the objects; those of ids are small, and stay."""
        self._objects = {name: value for name, value in self._objects.items() if len(value) < 1000}

    def take_counts(self) -> tuple[dict[str, int], int]:
        """Requests by method, without those of ids, and `busiest`, both of the time from the last call on."""
        with self._lock:
            counts, self.counts = dict(self.counts), Counter()
            busiest, self.busiest = self.busiest, 0
        return counts, busiest

    def _upload(self, client: socket.socket, method: str, name: str, query: str, body: bytes) -> None:
        text = b""
        with self._lock:
            self.counts[method] += 1
            if method == "PUT":
                self._parts[name][int(re.findall(r"partNumber=(\d+)", query)[0])] = body
            elif query == "uploads=":
                self._parts[name] = {}
                text = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            else:
                self._objects[name] = b"".join(part for _, part in sorted(self._parts.pop(name).items()))
                text = b'<CompleteMultipartUploadResult><ETag>"1"</ETag></CompleteMultipartUploadResult>'
        client.sendall(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: %d\r\n\r\n%s' % (len(text), text))

    def _answer(self, client: socket.socket, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        with self._lock:
            self.counts[method] += "/generations/" not in path
            kept = method == "PUT" and path in self._objects and "if-none-match" in headers
            if method == "PUT" and not kept:
                self._objects[path] = body
        if method == "PUT":
            status = b"412 Precondition Failed" if kept else b"200 OK"
            client.sendall(b'HTTP/1.1 %s\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n' % status)
            return
        found = self._objects.get(path)
        if found is None:
            text = b"" if method == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>"
            client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
            return
        first, last, status, more = 0, len(found) - 1, "200 OK", ""
        if part := re.match(r"bytes=(\d+)-(\d+)", headers.get("range", "")):
            first, last = int(part[1]), min(last, int(part[2]))
            status, more = "206 Partial Content", f"Content-Range: bytes {first}-{last}/{len(found)}\r\n"
        client.sendall(
            f'HTTP/1.1 {status}\r\nETag: "1"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n{more}'
            f"Content-Length: {last + 1 - first}\r\n\r\n".encode()
        )
        if method == "GET":
            self._send(client, memoryview(found)[first : last + 1])

    def _send(self, client: socket.socket, body: memoryview) -> None:
        with self._counted():
            client.sendall(body)

    def _receive(self, stream: io.BufferedReader, size: int) -> bytes:
        turns: list[bytes] = []
        if size == 0:
            return b""
        with self._counted():
            began = time.perf_counter()
            for at in range(0, size, TURN_BYTES):
                end = min(at + TURN_BYTES, size)
                turns.append(stream.read(end - at))
                time.sleep(max(0.0, began + end / self._rate - time.perf_counter()))
        return b"".join(turns)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        yield
        with self._lock:
            self.busy -= 1


def serve(rate: float, pipe: Connection) -> None:
    store = RatedStore(rate)
    pipe.send(store.port)
    while asked := pipe.recv():
        if asked == "forget":
            store.forget()
            continue
        pipe.send(store.take_counts())


class PlainSockets:
    """Read as many bytes by as many connections, without a client of S3."""

    def __init__(self, port: int, connections: int, total: int) -> None:
        self._share = total // connections
        self._clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
        self._threads = ThreadPoolExecutor(connections)
        self._clients[0].sendall(
            b"PUT /plain HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % self._share + bytes(self._share)
        )
        self._clients[0].recv(TURN_BYTES)

    def get(self) -> float:
        """MB/s."""
        began = time.perf_counter()
        list(self._threads.map(self._read, self._clients))
        return self._share * len(self._clients) / (time.perf_counter() - began) / 1e6

    def _read(self, client: socket.socket) -> None:
        buffer = bytearray(1 << 20)
        client.sendall(b"GET /plain HTTP/1.1\r\n\r\n")
        first = client.recv(TURN_BYTES)
        left = self._share - len(first.partition(b"\r\n\r\n")[2])
        while left:
            left -= client.recv_into(buffer, min(left, len(buffer)), socket.MSG_WAITALL)


def start_store(rate: float) -> tuple[Connection, SpawnProcess, int, str]:
    """A pipe to the store, its process and port, and a tier's URL. `rate`: MB/s of a connection."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    server = context.Process(target=serve, args=(rate * 1e6, theirs), daemon=True)
    server.start()
    port = pipe.recv()
    return pipe, server, port, f"s3://bucket/bench?endpoint=http://127.0.0.1:{port}&region=us-east-1&timeout=60s"


class Tier:
    """A tier; `parts`: the least bytes of a part that is read, and of a value that is put in parts."""

    def __init__(self, url: str, size: int, count: int, parts: tuple[int, int], pipe: Connection) -> None:
        self.daemon = TierDaemon(url, pages=(count + 1) * (size // PAGE + 2))
        self.daemon.until_open()
        self._parts, self._pipe, self._size, self._first = parts, pipe, size, 0
        self._memory = [self.daemon.l1.object(size) for _ in range(count)]
        self.requests: dict[str, dict[str, int]] = {}
        self.busiest: dict[str, int] = {}

    def put(self) -> float:
        """MB/s."""
        self._pipe.send("forget")
        self.skip()
        return self._run("PUT", lambda which, memory: self.daemon.tier.put(which, memory, b"", within(100)))

    def skip(self) -> None:
        """Count a put that another tier makes."""
        self._first += len(self._memory)

    def get(self) -> float:
        return self._run("GET", lambda which, memory: self.daemon.tier.get(which, memory, within(100)))

    def _run(self, what: str, begin: Callable[[ObjectName, ObjectMemory], int]) -> float:
        s3._PART_BYTES, s3._UPLOAD_BYTES = self._parts
        self._ask()
        began = time.perf_counter()
        tickets = [begin(name(number), memory) for number, memory in enumerate(self._memory, self._first)]
        for ticket in tickets:
            end = self.daemon.ends.of(ticket)
            assert end.outcome is TierOutcome.DONE, end
        seconds = time.perf_counter() - began
        self.requests[what], self.busiest[what] = self._ask()
        return self._size * len(self._memory) / seconds / 1e6

    def _ask(self) -> tuple[dict[str, int], int]:
        self._pipe.send("counts")
        counts, busiest = self._pipe.recv()
        return counts, busiest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, nargs="+", default=[8, 84], help="MB of an object")
    parser.add_argument("--rate", type=float, default=60, help="MB/s of a connection")
    parser.add_argument("--gets", action="store_true", help="one put, to have something to get")
    arguments = parser.parse_args()
    os.environ.update(CREDENTIALS)
    rows: list[list[object]] = []
    for megabytes in arguments.size:
        for count in (1, max(6, int(400 / megabytes))):
            rows += measure(megabytes, count, arguments.rate, arguments.gets)
    print(table(HEADS, rows))


def measure(megabytes: float, count: int, rate: float, gets: bool) -> list[list[object]]:
    """Rows of one size and number at once."""
    rows: list[list[object]] = []
    size = int(megabytes * 1e6)
    pipe, server, port, url = start_store(rate)
    tiers = [Tier(url, size, count, parts, pipe) for parts in ((1 << 40, 1 << 40), PARTS)]
    for what in ("PUT", "GET"):  # both read what the second one put last
        if gets and what == "PUT":
            tiers[0].skip()
            tiers[1].put()
            continue
        found: list[list[float]] = [[], []]
        plain: list[float] = []
        sockets: PlainSockets | None = None
        for _ in range(ROUNDS):
            for tier, speeds in zip(tiers, found, strict=True):
                speeds.append(tier.put() if what == "PUT" else tier.get())
            if what == "GET":
                sockets = sockets or PlainSockets(port, tiers[1].busiest[what], size * count)
                plain.append(sockets.get())
        for how, tier, speeds in zip(("whole", "parts"), tiers, found, strict=True):
            requests = sum(tier.requests[what].get(each, 0) for each in {what, "POST"})
            busiest, speed = tier.busiest[what], median(speeds)
            carried = median(plain) if plain and how == "parts" else float("nan")
            rows.append([megabytes, count, what, how, speed, speed / median(found[0]), busiest])
            rows[-1] += [speed / busiest / rate, carried, speed / carried]
            rows[-1] += [requests / count * 1000]
    for tier in tiers:
        tier.daemon.tier.close(within(5))
    pipe.send(False)
    server.join()
    return rows


if __name__ == "__main__":
    main()
