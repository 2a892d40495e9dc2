"""The state of L1 at its end: the rows of its chunks, and of those that were not adopted yet; and the pins of prompts.

Owns: which chunks are kept, and the time that their digests may take. Refuses to know: the form of a state (`state`), where it is written.

A chunk is kept if a later start of an engine could find it, as for L2. The time is short where a service manager waits for the end:
the chunks whose digest is not made in time are dropped, those next to be evicted first.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence

from kvserver import __version__
from kvserver._native import HostRegion, digest_objects, pack_chunks
from kvserver.cache import MOST_PROTECTIONS, Cache, Chunk, Namespace, Protection, ProtectionEnd, split_keys
from kvserver.restart.state import DIGEST_BYTES, PROTECTED, KeptNamespace, KeptPin, State

log = logging.getLogger(__name__)

_DIGEST_SECONDS = 10.0
_NO_DIGEST = bytes(DIGEST_BYTES)


def digest_threads() -> int:
    return min(16, len(os.sched_getaffinity(0)))


def verifying_threads() -> int:
    """One fewer: the loop needs a core."""
    return max(1, digest_threads() - 1)


def make_state(cache: Cache, region: HostRegion, inode: int) -> State:
    """The state of all kept chunks. REQUIRES: nothing copies to or from L1 any more, and the cache is not used afterwards."""
    order = cache.kept_by_a_restart()
    chunks = [chunk for of_order, _ in order for chunk in of_order]
    namespaces = list({chunk.namespace for chunk in chunks})
    _drop_incomplete(chunks, namespaces)
    names = {use: name for name, use in cache.index.models.items()}
    tenants = {use: name for name, use in cache.index.tenants.items()}
    kept = [_kept(each, names[each.model], tenants.get(each.owner, "")) for each in namespaces]
    places, ready, keys, ends, counts, extents = pack_chunks(chunks, namespaces, [of.end_bytes for of in kept])
    deadline_ns = time.monotonic_ns() + int(_DIGEST_SECONDS * 1e9)
    digests = digest_objects(region, cache.pool.page_bytes, counts, extents, digest_threads(), deadline_ns)
    state = State(
        version=__version__,
        page_bytes=cache.pool.page_bytes,
        inode=inode,
        namespaces=kept,
        places=places,
        flags=b"".join([bytes([PROTECTED * protected]) * len(of_order) for of_order, protected in order]),
        ready=ready,
        keys=keys,
        ends=ends,
        counts=counts,
        extents=extents,
        digests=digests,
    )
    return state.part(0, _digested(digests))


def pins_of(cache: Cache) -> tuple[KeptPin, ...]:
    """The pins that have not ended, with the chunks that L1 has and those that it lacks."""
    names = {use: name for name, use in cache.index.models.items()}
    pins = []
    for each in cache.protections:
        keys: dict[bytes, list[bytes]] = {}
        for namespace, key in (*((chunk.namespace.id, chunk.key) for chunk in each.protected), *each.wanted):
            keys.setdefault(namespace, []).append(key)
        joined = {namespace: b"".join(found) for namespace, found in keys.items()}
        model_name = names[each.model]
        pins.append(
            KeptPin(
                each.id,
                each.owner,
                each.namespace,
                model_name,
                each.deadline,
                each.expires_at,
                each.note,
                joined,
                each.session,
            )
        )
    return tuple(pins)


def restore_pins(cache: Cache, pins: Sequence[KeptPin]) -> None:
    """Begin the pins anew, as many as may live: a chunk that they name is protected once it is adopted, or comes from L2."""
    protections, left = cache.protections, 0
    for pin in pins if protections.fraction else ():
        protection = Protection(
            pin.id, pin.owner, pin.namespace, cache.index.model(pin.model_name), pin.deadline, pin.expires_at,
            note=pin.note, kept=True, session=pin.session,
        )  # fmt: skip
        names = [(namespace, key) for namespace, keys in pin.keys.items() for (key,) in split_keys(keys)]
        if len(protections) < MOST_PROTECTIONS and len(names) <= protections.room_for_names:
            protections.add(protection, names)
        else:
            left += 1
    protections.ended[ProtectionEnd.NOT_KEPT] += left
    if left:
        log.warning("%d pins were not kept: pins name too many chunks", left)


def _drop_incomplete(chunks: Iterable[Chunk], namespaces: Iterable[Namespace]) -> None:
    """Remove the objects that lack a rank's bytes, in namespaces with several groups."""
    several = {namespace for namespace in namespaces if len(namespace.groups.masks) > 1}
    for chunk in [chunk for chunk in chunks if chunk.namespace in several] if several else ():
        for group in range(len(chunk.namespace.groups.masks)):
            if not chunk.ready >> group & 1:
                chunk.remove_object(group)


def _kept(namespace: Namespace, model_name: str, tenant: str) -> KeptNamespace:
    groups = namespace.groups
    return KeptNamespace(
        namespace.id, model_name, groups.made_of, groups.ranks, groups.chunk_tokens, groups.tails, namespace.durability,
        tenant=tenant,
    )  # fmt: skip


def _digested(digests: bytes) -> int:
    """Number of chunks, from the first one on, that have a digest."""
    at = digests.find(_NO_DIGEST)
    while at >= 0 and at % DIGEST_BYTES:
        at = digests.find(_NO_DIGEST, at + 1)
    return at // DIGEST_BYTES if at >= 0 else len(digests) // DIGEST_BYTES
