"""Lookups through a real daemon of its own, and a bare echo of the same bytes by another process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable

import zmq

from kvserver.bench.engine import BenchDaemon, BenchWorker, make_keys
from kvserver.bench.timing import percentile
from kvserver.protocol import KEY_BYTES, LookupReply, encode

BLOCK_TOKENS, CHUNK_TOKENS = 16, 256
_ANSWER_MILLIS = 10_000
_ECHO = """
import sys, zmq
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
while True:
    router.send_multipart(router.recv_multipart())
"""


def millis(action: Callable[[], object], count: int) -> float:
    """The median."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        found.append((time.perf_counter() - began) * 1000)
    return percentile(found, 0.5)


class Echo:
    """A process that sends back what it receives, and nothing else."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kve-")
        endpoint = f"ipc://{self._folder.name}/e"
        self._process = subprocess.Popen([sys.executable, "-c", _ECHO, endpoint], cwd="/")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, _ANSWER_MILLIS)
        self._socket.connect(endpoint)

    def once(self, size: int) -> None:
        """zmq.Again if nothing comes back."""
        self._socket.send_multipart([b"12345678", bytes(size)])
        self._socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._process.kill()  # it may have a handler of SIGTERM from this process
        self._process.wait()
        self._folder.cleanup()


class LookupSubject:
    """A daemon whose L1 has a prompt of so many tokens, of small blocks."""

    def __init__(self, tokens: int) -> None:
        self.daemon = BenchDaemon(l1_size="64MiB", chunk_tokens=CHUNK_TOKENS)
        try:
            blocks = tokens // BLOCK_TOKENS
            self.worker = BenchWorker(
                self.daemon.endpoint, planes=1, run=64, num_blocks=blocks + 1, block_tokens=BLOCK_TOKENS
            )
            self._keys = make_keys("bench", tokens // CHUNK_TOKENS)
            self.worker.store(self._keys, array("I", range(1, blocks + 1)))
        except BaseException:
            self.daemon.close()
            raise

    def wire_bytes(self, tokens: int) -> int:
        return len(encode(self.worker.lookup_message(self._prefix(tokens))))

    def once(self, tokens: int) -> None:
        """Look up the first tokens, all of which are found; end the request, which nothing answers."""
        keys = self._prefix(tokens)
        reply = self.worker.client.ask(self.worker.lookup_message(keys), LookupReply)
        assert reply.hit_chunks * KEY_BYTES == len(keys), reply
        self.worker.end_request()

    def _prefix(self, tokens: int) -> bytes:
        return self._keys[: tokens // CHUNK_TOKENS * KEY_BYTES]

    def close(self) -> None:
        self.worker.client.close()
        self.daemon.close()
