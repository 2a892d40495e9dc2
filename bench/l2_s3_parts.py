"""Objects of S3 behind connections of a given rate: read in parts beside read by one request each, in turn, in one run.

    .venv/bin/python bench/l2_s3_parts.py [--size MB ...] [--rate MB]

The store is a process that answers each connection at this rate and counts requests. `whole` is the tier with parts as large as
the value; it reads the same objects. `of rate`: of what so many connections may carry.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import median, table
from support.l1_memory import PAGE, name, within
from support.s3 import CREDENTIALS
from support.shared_tiers import TierDaemon

from kvserver.l2 import TierOutcome
from kvserver.l2.remote import s3

ROUNDS, TURN_BYTES = 5, 64 << 10


class RatedStore:
    """S3 as far as the tier needs it, from memory. `busiest`: connections that answered with bytes at once."""

    def __init__(self, rate: float) -> None:
        self._rate, self._objects = rate, dict[str, bytes]()
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
                body = stream.read(int(headers.get("content-length", 0)))
                self._answer(client, method, path.partition("?")[0], headers, body)
        except OSError:
            pass

    def _answer(self, client: socket.socket, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        with self._lock:
            self.counts[method] += 1
        if method == "PUT":
            self._objects[path] = body
            client.sendall(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n')
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
        with self._lock:
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        began = time.perf_counter()
        for at in range(0, len(body), TURN_BYTES):
            client.sendall(body[at : at + TURN_BYTES])
            time.sleep(max(0.0, began + min(at + TURN_BYTES, len(body)) / self._rate - time.perf_counter()))
        with self._lock:
            self.busy -= 1


def serve(rate: float, pipe: Connection) -> None:
    store = RatedStore(rate)
    pipe.send(store.port)
    while pipe.recv():
        pipe.send((dict(store.counts), store.busiest))
        store.counts.clear()
        store.busiest = 0


class Reader:
    """A tier; `part`: the least bytes of a part."""

    def __init__(self, url: str, size: int, count: int, part: int, pipe: Connection) -> None:
        self.daemon = TierDaemon(url, pages=(count + 1) * (size // PAGE + 2))
        self.daemon.until_open()
        self._part, self._pipe, self._size = part, pipe, size
        self._memory = [self.daemon.l1.object(size) for _ in range(count)]
        self.requests: dict[str, int] = {}
        self.busiest = 0

    def put(self) -> None:
        for number, memory in enumerate(self._memory):
            assert self.daemon.put(name(number), memory, 100) is TierOutcome.DONE

    def get(self) -> float:
        """MB/s."""
        s3._PART_BYTES = self._part
        self._ask()
        began = time.perf_counter()
        tickets = [
            self.daemon.tier.get(name(number), memory, within(100)) for number, memory in enumerate(self._memory)
        ]
        for ticket in tickets:
            assert self.daemon.ends.of(ticket).outcome is TierOutcome.DONE
        seconds = time.perf_counter() - began
        self.requests, self.busiest = self._ask()
        return self._size * len(self._memory) / seconds / 1e6

    def buffer_bytes(self) -> int:
        return sum(lane.buffer.bytes for lane in self.daemon.tier._lanes._lanes)  # type: ignore[attr-defined]

    def _ask(self) -> tuple[dict[str, int], int]:
        self._pipe.send(True)
        counts, busiest = self._pipe.recv()
        return counts, busiest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, nargs="+", default=[8, 84], help="MB of an object")
    parser.add_argument("--rate", type=float, default=60, help="MB/s of a connection")
    arguments = parser.parse_args()
    os.environ.update(CREDENTIALS)
    context = multiprocessing.get_context("spawn")
    rows: list[list[object]] = []
    for megabytes in arguments.size:
        size = int(megabytes * 1e6)
        for count in (1, max(6, int(400 / megabytes))):
            pipe, theirs = context.Pipe()
            server = context.Process(target=serve, args=(arguments.rate * 1e6, theirs), daemon=True)
            server.start()
            url = f"s3://bucket/bench?endpoint=http://127.0.0.1:{pipe.recv()}&region=us-east-1&timeout=60s"
            readers = [Reader(url, size, count, part, pipe) for part in (1 << 40, s3_part)]
            readers[0].put()
            found: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                for reader, speeds in zip(readers, found, strict=True):
                    speeds.append(reader.get())
            for what, reader, speeds in zip(("whole", "parts"), readers, found, strict=True):
                gets = reader.requests.get("GET", 0) / count
                ceiling = reader.busiest * arguments.rate
                rows.append([megabytes, count, what, median(speeds), median(speeds) / median(found[0]), reader.busiest])
                rows[-1] += [median(speeds) / ceiling, gets * 1000, reader.buffer_bytes() / 1e6]
                reader.daemon.tier.close(within(5))
            pipe.send(False)
            server.join()
    print(
        table(
            ["MB", "objects", "", "MB/s", "times", "connections", "of rate", "GETs a 1000", "buffers MB"],
            rows,
        )
    )


s3_part = s3._PART_BYTES

if __name__ == "__main__":
    main()
