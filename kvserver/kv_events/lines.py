"""Writes KV events to a file, one JSON object a line, for people and tests.

Owns: the form of the lines. Token ids are never written.
"""

from __future__ import annotations

import json
import time
from typing import Any

from kvserver.events import AppendedFile
from kvserver.kv_events.types import (
    KVChunk,
    KVEvent,
    KVRemoved,
    KVStored,
    ObserverContext,
    ReaderConnected,
    ReaderDisconnected,
)
from kvserver.protocol import TOKEN_BYTES, ConfigError


def make_lines(context: ObserverContext) -> Lines | None:
    return Lines(context.settings.kv_events_file) if context.settings.kv_events_file else None


class Lines:
    """Observer that appends events to the file. Raises OSError if a write fails."""

    def __init__(self, path: str) -> None:
        try:
            self.file = AppendedFile(path)
        except OSError as error:
            raise ConfigError(f"--kv-events-file {path}: {error.strerror}") from None

    def observe(self, event: KVEvent) -> None:
        wall = time.time() - (time.monotonic_ns() - event.time_ns) * 1e-9
        line = {"number": event.number, "time": round(wall, 6), **_fields(event)}
        self.file.renew()
        self.file.write(json.dumps(line).encode() + b"\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _fields(event: KVEvent) -> dict[str, Any]:
    match event:
        case KVStored():
            return {"type": "stored", "instance_id": event.instance_id, **_chunks(event)}
        case KVRemoved():
            return {"type": "removed", **_chunks(event)}
        case ReaderConnected():
            scheduler = event.scheduler
            return {
                "type": "reader_came",
                "instance_id": scheduler.instance_id,
                "model_name": scheduler.model_name,
                "hash_form": scheduler.hash_form,
                "reach": event.namespace_prefix.hex(),
            }
        case ReaderDisconnected():
            return {"type": "reader_gone", "instance_id": event.instance_id, "model_name": event.model_name}


def _chunks(event: KVStored | KVRemoved) -> dict[str, Any]:
    chunks = [_chunk(chunk) for chunk in event.chunks]
    return {"tier": event.tier.value, "namespace": event.namespace.hex(), "chunks": chunks}


def _chunk(chunk: KVChunk) -> dict[str, Any]:
    description = chunk.description
    tokens = len(description.tokens) // TOKEN_BYTES
    groups = {"groups": list(description.members)} if description.members else {}
    return {"key": chunk.key.hex(), "blocks": description.blocks, "tokens": tokens, **groups}
