"""Encodes the blocks that a topic announces now, for routers that start late or lost their state.

A snapshot is a header and then one BlockStored for each chunk, tier and KV cache group. It names the blocks that are
cached after batch `sequence` of the stream, in no order, some more than once: chunks may share blocks. A router that
applies the snapshot and then the batches from `sequence` + 1 on misses nothing. The header's `pending_chunks` of a newly
connected reader are not in the snapshot; later batches announce them.

As JSON a snapshot is one object a line, with hashes as integers if the stream has integers, else in hexadecimal. As
msgpack it is one array of maps, as on the wire.

Owns: the two formats, compression, the number of concurrent snapshots. Refuses to know: HTTP, and how the state is read.
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
from kvserver.kv_events.wire import Form, numbered, stored_events

Encoding = Literal["json", "msgpack"]
FORMAT = "kvserver-kv-snapshot/1"
_AT_ONCE = threading.BoundedSemaphore(4)
_SLICE = 256  # chunks
MOST_SNAPSHOT_SECONDS = 300.0  # for a slow reader


class Busy(Exception):
    """Request for a snapshot while too many are in progress. The client should retry later."""


@contextmanager
def snapshot_parts(snapshot: Snapshot, encoding: Encoding, gzip: bool) -> Iterator[Iterator[bytes]]:
    """The body in slices. Busy if too many snapshots are in progress; the slices raise TimeoutError for a slow reader."""
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
    events = sum(len(numbered(snapshot.groups, chunk.members)) for _, chunk in snapshot.chunks)
    if encoding == "msgpack":
        yield b"\xdd" + (1 + events).to_bytes(4, "big")  # the head of a msgpack array
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
    packer = zlib.compressobj(level=1, wbits=31)  # 31: the gzip format
    for each in slices:
        if packed := packer.compress(each):
            yield packed
    yield packer.flush()
