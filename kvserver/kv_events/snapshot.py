"""What the audience of a topic knows now, as bytes: for routers that start late, or lost their state.

A snapshot is a header and then one BlockStored for each chunk, tier and KV cache group: the blocks that are held after
batch `sequence` of the stream; whoever then follows the stream from `sequence` + 1 on misses nothing, nor the
`pending_chunks` that a reader just brought and that the stream has yet to tell of. A block may be named more than once,
because chunks may share it: it is a set, in no order.

As JSON it is one object a line, with hashes as integers where the stream has them so, else in hexadecimal. As msgpack it
is one array of them, with maps as on the wire.

Owns: the two forms, compression, how many are made at once. Refuses to know: HTTP, how the state was had.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from kvserver.kv_events.publisher import Snapshot
from kvserver.kv_events.wire import Form, stored_events

Encoding = Literal["json", "msgpack"]
FORMAT = "kvserver-kv-snapshot/1"
_AT_ONCE = threading.BoundedSemaphore(4)
_SLICE = 256  # chunks
MOST_SNAPSHOT_SECONDS = 300.0  # for a slow reader


class Busy(Exception):
    """So many are made now that this one must be asked for later."""


@contextmanager
def snapshot_parts(snapshot: Snapshot, encoding: Encoding, gzip: bool) -> Iterator[Iterator[bytes]]:
    """The body, in slices, of which TimeoutError is the end if they are not taken in time. Busy if there are too many."""
    if not _AT_ONCE.acquire(blocking=False):
        raise Busy
    try:
        slices = _encoded(snapshot, encoding)
        yield _in_time(_compressed(slices) if gzip else slices)
    finally:
        _AT_ONCE.release()


def _in_time(slices: Iterator[bytes]) -> Iterator[bytes]:
    deadline = time.monotonic() + MOST_SNAPSHOT_SECONDS
    for each in slices:
        if time.monotonic() > deadline:
            raise TimeoutError("the snapshot was read too slowly")
        yield each


def _encoded(snapshot: Snapshot, encoding: Encoding) -> Iterator[bytes]:
    encode = _json_line if encoding == "json" else msgspec.msgpack.encode
    form: Form = "hex" if encoding == "json" and snapshot.hash_form == "bytes" else snapshot.hash_form
    events = len(snapshot.chunks) * max(1, len(snapshot.groups))
    if encoding == "msgpack":
        yield b"\xdd" + (1 + events).to_bytes(4, "big")  # an array of so many
    yield encode(
        {
            "format": FORMAT,
            "boot_id": snapshot.boot_id,
            "model": snapshot.model_name,
            "hash_form": snapshot.hash_form,
            "topic": snapshot.topic,
            "sequence": snapshot.sequence,
            "events": events,
            "pending_chunks": snapshot.pending,
        }
    )
    for at in range(0, len(snapshot.chunks), _SLICE):
        yield b"".join(
            encode(event)
            for tier, chunk in snapshot.chunks[at : at + _SLICE]
            for event in stored_events(chunk, (0, chunk.blocks), tier, snapshot.groups, form)
        )
        time.sleep(0)  # lets other threads run


def _json_line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _compressed(slices: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(level=1, wbits=31)  # 31: as gzip
    for each in slices:
        if packed := packer.compress(each):
            yield packed
    yield packer.flush()
