"""A daemon process and a worker for benchmarks: real sockets, real shared memory."""

from __future__ import annotations

import os
import threading
import time
import uuid
from pathlib import Path

import zmq

from kvserver.bench.engine import BenchDaemon, BenchWorker, make_keys, shared_memory

__all__ = [
    "BenchDaemon",
    "BenchWorker",
    "CountingRelay",
    "cpu_seconds",
    "idle_cpu",
    "make_keys",
    "rss_bytes",
    "shared_memory",
]


class CountingRelay:
    """Relays between one client and a server on sockets of its own, and counts what the client sends."""

    def __init__(self, endpoint: str, folder: str) -> None:
        self.endpoint = f"ipc://{folder}/{uuid.uuid4().hex[:8]}"
        self.messages = self.payload_bytes = 0
        self._context = zmq.Context()
        self._client, self._server = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        self._client.bind(self.endpoint)
        self._server.connect(endpoint)
        self._peer = b""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._client, zmq.POLLIN)
        poller.register(self._server, zmq.POLLIN)
        while not self._stop.is_set():
            for socket, _ in poller.poll(100):
                if socket is self._client:
                    self._peer, *frames = self._client.recv_multipart()
                    self.messages += 1
                    self.payload_bytes += sum(len(frame) for frame in frames)
                    self._server.send_multipart(frames)
                else:
                    self._client.send_multipart([self._peer, *self._server.recv_multipart()])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


def rss_bytes(pid: int) -> int:
    """Resident memory, shared pages included."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS:"))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_cpu(pid: int, seconds: float = 3.0) -> float:
    """Share of one core that a process takes while it gets no request."""
    began, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - began)
