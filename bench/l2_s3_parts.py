"""Objects of S3 behind connections of a given rate: put and read in parts beside by one request each, in turn, in one run.

    .venv/bin/python bench/l2_s3_parts.py [--size MB ...] [--rate MB]

The store is a process that answers each connection at this rate and counts requests. `whole` is the tier with parts as large as
the value. `of rate`: of what so many connections may carry.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
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
        self._in_turns(len(body), lambda first, last: client.sendall(body[first:last]))

    def _receive(self, stream: io.BufferedReader, size: int) -> bytes:
        turns: list[bytes] = []
        if size:
            self._in_turns(size, lambda first, last: turns.append(stream.read(last - first)))
        return b"".join(turns)

    def _in_turns(self, size: int, move: Callable[[int, int], None]) -> None:
        with self._lock:
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        began = time.perf_counter()
        for at in range(0, size, TURN_BYTES):
            end = min(at + TURN_BYTES, size)
            move(at, end)
            time.sleep(max(0.0, began + end / self._rate - time.perf_counter()))
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


def start_store(rate: float) -> tuple[Connection, SpawnProcess, str]:
    """A pipe to the store, its process and a tier's URL. `rate`: MB/s of a connection."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    server = context.Process(target=serve, args=(rate * 1e6, theirs), daemon=True)
    server.start()
    return pipe, server, f"s3://bucket/bench?endpoint=http://127.0.0.1:{pipe.recv()}&region=us-east-1&timeout=60s"


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
        self._first += len(self._memory)
        return self._run("PUT", lambda which, memory: self.daemon.tier.put(which, memory, b"", within(100)))

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

    def buffer_bytes(self) -> int:
        return sum(lane.buffer.bytes for lane in self.daemon.tier._lanes._lanes)  # type: ignore[attr-defined]

    def _ask(self) -> tuple[dict[str, int], int]:
        self._pipe.send("counts")
        counts, busiest = self._pipe.recv()
        return counts, busiest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, nargs="+", default=[8, 84], help="MB of an object")
    parser.add_argument("--rate", type=float, default=60, help="MB/s of a connection")
    arguments = parser.parse_args()
    os.environ.update(CREDENTIALS)
    rows: list[list[object]] = []
    for megabytes in arguments.size:
        size = int(megabytes * 1e6)
        for count in (1, max(6, int(400 / megabytes))):
            pipe, server, url = start_store(arguments.rate)
            tiers = [Tier(url, size, count, parts, pipe) for parts in ((1 << 40, 1 << 40), PARTS)]
            for what in ("PUT", "GET"):  # both read what the second one put last
                found: list[list[float]] = [[], []]
                for _ in range(ROUNDS):
                    for tier, speeds in zip(tiers, found, strict=True):
                        speeds.append(tier.put() if what == "PUT" else tier.get())
                for how, tier, speeds in zip(("whole", "parts"), tiers, found, strict=True):
                    requests = sum(tier.requests[what].get(each, 0) for each in {what, "POST"})
                    busiest, speed = tier.busiest[what], median(speeds)
                    rows.append([megabytes, count, what, how, speed, speed / median(found[0]), busiest])
                    rows[-1] += [speed / busiest / arguments.rate, requests / count * 1000, tier.buffer_bytes() / 1e6]
            for tier in tiers:
                tier.daemon.tier.close(within(5))
            pipe.send(False)
            server.join()
    print(
        table(
            ["MB", "objects", "", "", "MB/s", "times", "connections", "of rate", "requests a 1000", "buffers MB"],
            rows,
        )
    )


if __name__ == "__main__":
    main()
