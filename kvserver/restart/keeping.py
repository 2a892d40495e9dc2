"""The state of L1 at its end: the rows of its chunks, and of those that were not adopted yet.

Owns: which chunks are kept, and the time that their digests may take. Refuses to know: the form of a state (`state`), where it is written.

A chunk is kept if a later start of an engine could find it, as for L2. The time is short where a service manager waits for the end:
the chunks whose digest is not made in time are dropped, those next to be evicted first.
"""

from __future__ import annotations

import os
import time
from array import array

from kvserver import __version__
from kvserver._native import HostRegion, digest_objects
from kvserver.cache import Cache, Chunk, ModelUse, Namespace
from kvserver.restart.state import DIGEST_BYTES, EXTENT_BYTES, PROTECTED, KeptNamespace, State

_DIGEST_SECONDS = 10.0
_NO_DIGEST = bytes(DIGEST_BYTES)


def digest_threads() -> int:
    return min(16, len(os.sched_getaffinity(0)))


class _Rows:
    def __init__(self, model_names: dict[ModelUse, str]) -> None:
        self._model_names = model_names
        self.namespaces: list[KeptNamespace] = []
        self.places, self.ready, self.counts = array("I"), array("I"), array("I")
        self.flags = bytearray()
        self.keys: list[bytes] = []
        self.ends: list[bytes] = []
        self.extents: list[bytes] = []
        self._place_of: dict[Namespace, int] = {}

    def add(self, chunk: Chunk, protected: bool) -> None:
        namespace = chunk.namespace
        place = self._place_of.get(namespace)
        if place is None:
            place = self._place_of[namespace] = len(self.namespaces)
            groups, model_name = namespace.groups, self._model_names[namespace.model]
            self.namespaces.append(
                KeptNamespace(namespace.id, model_name, groups.made_of, groups.ranks, groups.chunk_tokens, groups.tails)
            )
        slots = chunk.joined_slots
        self.places.append(place)
        self.flags.append(PROTECTED if protected else 0)
        self.ready.append(chunk.ready)
        self.keys.append(chunk.key)
        self.ends.append(chunk.slot_ends)
        self.counts.append(len(slots) // EXTENT_BYTES)
        self.extents.append(slots)


def make_state(cache: Cache, region: HostRegion, inode: int) -> State:
    """The state of all kept chunks. REQUIRES: nothing copies to or from L1 any more, and the cache is not used afterwards."""
    rows = _Rows({use: name for name, use in cache.index.models.items()})
    for chunk, protected in cache.kept_by_a_restart():
        for group in range(len(chunk.namespace.groups.masks)):
            if not chunk.ready >> group & 1:
                chunk.remove_object(group)  # a rank's bytes are missing
        rows.add(chunk, protected)
    counts, extents = rows.counts.tobytes(), b"".join(rows.extents)
    deadline_ns = time.monotonic_ns() + int(_DIGEST_SECONDS * 1e9)
    digests = digest_objects(region, cache.pool.page_bytes, counts, extents, digest_threads(), deadline_ns)
    state = State(
        version=__version__,
        page_bytes=cache.pool.page_bytes,
        inode=inode,
        namespaces=rows.namespaces,
        places=rows.places.tobytes(),
        flags=bytes(rows.flags),
        ready=rows.ready.tobytes(),
        keys=b"".join(rows.keys),
        ends=b"".join(rows.ends),
        counts=counts,
        extents=extents,
        digests=digests,
    )
    return state.part(0, _digested(digests))


def _digested(digests: bytes) -> int:
    """How many chunks from the first one on have a digest."""
    at = digests.find(_NO_DIGEST)
    while at >= 0 and at % DIGEST_BYTES:
        at = digests.find(_NO_DIGEST, at + 1)
    return at // DIGEST_BYTES if at >= 0 else len(digests) // DIGEST_BYTES
