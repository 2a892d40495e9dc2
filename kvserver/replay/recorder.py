"""Writes the daemon's lookups to a file, as a trace that `kvserver replay` reads.

A line has two fields beside a trace's. `chunk_tokens` is the tokens of each block of this trace, which is a chunk. `lost` counts
requests that are missing before this line.

Nothing of a prompt is written, and no key. An id is the beginning of a digest of namespace and key, keyed with a random salt that
each start draws and keeps in memory alone. So ids are equal where chunks are, and in no other recording.

Owns: the form of the lines, the file and its bound, and the count of what is missing. Refuses to know: what a lookup means to the
cache.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from kvserver.cache import split_keys
from kvserver.config import Settings, parse_size
from kvserver.events import AppendedFile, Event, LookupEnded, Runner, Subscriber
from kvserver.protocol import ConfigError
from kvserver.protocol.status import RecordingStatus

_QUEUE_COST = 1 << 13  # 32 MiB of keys
_ID_BITS = 53  # also readers that keep numbers as doubles have ids exactly
_CLOSE_SECONDS = 2.0  # for the lines that are queued when the daemon stops


def make_recorder(settings: Settings, dropped: Callable[[], int]) -> Recorder | None:
    """The recorder of these settings, if they name a file; see Recorder."""
    return Recorder(settings.record, parse_size(settings.record_size), dropped) if settings.record else None


class Recorder(Subscriber):
    """Subscriber that records lookups. Its file has a thread of its own: a disk that hangs delays no other subscriber."""

    name = "record"
    handles = frozenset({LookupEnded})

    def __init__(self, path: str, most_bytes: int, dropped: Callable[[], int]) -> None:
        """Appends to the file, which has `most_bytes` at most. ConfigError if it cannot be opened.

        `dropped`: how many LookupEnded the bus has dropped; from any thread.
        """
        try:
            self.file = AppendedFile(path, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}") from None
        self._path = path
        self._most_bytes = most_bytes
        self._dropped = dropped
        self._salt = secrets.token_bytes(32)
        self._wall_ns = time.time_ns() - time.monotonic_ns()
        self._requests = 0
        self._refused = 0  # for which the queue had no space
        self._lost_written = 0  # stated by a line of the file
        self._full = False
        self._runner: Runner[LookupEnded] = Runner(
            "record", self._write, self._flush, self.file.close, limit=_QUEUE_COST
        )
        self._runner.start()

    # ---- the bus's thread -----------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        if isinstance(event, LookupEnded) and event.namespace and not self._runner.put(event, len(event.keys)):
            self._refused += 1

    def close(self) -> None:
        self._runner.finish()
        self._runner.join(time.monotonic() + _CLOSE_SECONDS)

    # ---- any thread -----------------------------------------------------------------------------

    @property
    def lost(self) -> int:
        return self._refused + self._dropped()

    def status(self) -> RecordingStatus:
        return RecordingStatus(
            file=self._path,
            requests=self._requests,
            lost=self.lost,
            bytes=self.file.bytes,
            full=self._full,
            failure=self._runner.reason,
        )

    # ---- the recorder's thread ------------------------------------------------------------------

    def _write(self, event: LookupEnded) -> None:
        self._renew()
        if self._full:
            return
        lost = self.lost
        line = {
            "timestamp": (event.time_ns + self._wall_ns) // 1_000_000,
            "input_length": event.prompt_tokens or event.outcome.chunks * event.chunk_tokens,
            "output_length": 0,
            "hash_ids": [self._id(event.namespace, key) for (key,) in split_keys(event.keys)],
            "chunk_tokens": event.chunk_tokens,
        }
        if lost > self._lost_written:
            line["lost"] = lost - self._lost_written
        text = msgspec.json.encode(line) + b"\n"
        if self.file.bytes + len(text) > self._most_bytes:
            self._full = True
            return
        self.file.write(text)
        self._lost_written = lost
        self._requests += 1

    def _flush(self) -> None:
        self._renew()
        self.file.flush()

    def _renew(self) -> None:
        if self.file.renew():
            self._full = False

    def _id(self, namespace: bytes, key: bytes) -> int:
        digest = blake2b(namespace + key, digest_size=8, key=self._salt).digest()
        return int.from_bytes(digest, "little") >> (64 - _ID_BITS)
