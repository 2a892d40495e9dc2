"""L1Lookups: from a message to its reply.

Owns: the checks of a lookup, and what is counted of it. Refuses to know: what is resident, and leases (`cache`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvserver.cache import Cache, LookupOutcome, MissReason
from kvserver.copy import Devices
from kvserver.events import Bus, LookupEnded
from kvserver.protocol import KEY_BYTES, Lookup, LookupReply
from kvserver.server.copy_checks import check_chunk, chunk_count
from kvserver.server.instances import Instance, Instances


@dataclass
class L1Lookups:
    cache: Cache
    devices: Devices
    instances: Instances
    lease_seconds: float
    bus: Bus
    clock: Callable[[], float] = time.monotonic

    def answer(self, request: Lookup) -> LookupReply:
        began_ns = int(self.clock() * 1e9)
        instance = self.instances.instance(request.instance_id, request.incarnation)
        chunks = chunk_count(request.keys)
        spec = instance.any_worker().spec
        check_chunk(request.chunk_blocks, spec)
        namespace = instance.namespace_of(request.variant)
        if namespace is None or self.devices.lost:  # a hit that cannot be loaded only costs the engine
            missed = ((MissReason.UNAVAILABLE, chunks),)
            why = self.devices.lost or instance.ranks_text
            outcome = LookupOutcome(chunks, 0, missed, request.keys[:KEY_BYTES], unavailable=why)
        else:
            owner = (request.instance_id, request.request_id)
            outcome = self.cache.lookup(namespace, request.keys, owner, self.clock() + self.lease_seconds)
        chunk_tokens = spec.chunk_tokens
        _count(instance, outcome, chunk_tokens, request.tokens)
        ended = LookupEnded(
            int(self.clock() * 1e9), instance.instance_id, instance.model_name, request.request_id, began_ns,
            request.keys, outcome, chunk_tokens, namespace or b"", request.tokens, request.traceparent,
        )  # fmt: skip
        self.bus.publish(ended, len(request.keys))
        return LookupReply(hit_chunks=outcome.hit_chunks, full_chunks=outcome.full_chunks)


def _count(instance: Instance, outcome: LookupOutcome, chunk_tokens: int, prompt_tokens: int) -> None:
    counts, looked_up = instance.counts, outcome.chunks * chunk_tokens
    counts.lookups += 1
    counts.hits += outcome.hit_chunks > 0
    counts.lookup_tokens += looked_up
    counts.hit_tokens += outcome.hit_chunks * chunk_tokens
    for reason, chunks in outcome.missed:
        counts.missed_tokens[reason] += chunks * chunk_tokens
    if prompt_tokens > looked_up:
        counts.missed_tokens[MissReason.PARTIAL_CHUNK] += prompt_tokens - looked_up
