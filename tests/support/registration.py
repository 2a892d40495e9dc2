"""What a worker registers as, with everything that an engine must state."""

from __future__ import annotations

from typing import Any

from kvserver.protocol import Counted, RegisterWorker, SharedFd

from .memory import Geometry, awkward

WORDS = 256


def identity(**changes: str) -> tuple[Counted, ...]:
    """What a model's engines agree on, as they register it; without changes always the same."""
    values = {
        "model": "test-model@0123",
        "dtype": "bfloat16",
        "kv_dtype": "auto",
        "parallel": "tp=1,pp=1",
        "hash_algorithm": "sha256_cbor",
        **changes,
    }
    return tuple(Counted(name, digest=value, value=value) for name, value in values.items())


def registration(geometry: Geometry | None = None, **changes: Any) -> RegisterWorker:
    """Of an engine of one rank, valid but for the changes."""
    geometry = geometry or awkward()
    fields = {
        "instance_id": "engine",
        "incarnation": "one",
        "model_name": "test/model",
        "rank": 0,
        "world_size": 1,
        "attachment": 0,
        "memory": [SharedFd(index=i, size_bytes=size) for i, size in enumerate(geometry.sizes)],
        "words": WORDS,
        "planes": list(geometry.planes),
        "num_blocks": geometry.num_blocks,
        "block_tokens": geometry.block_tokens,
        "chunk_blocks": 4,
        "counted": identity(),
        **changes,
    }
    return RegisterWorker(**fields)
