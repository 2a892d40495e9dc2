"""L1Lookups: from a message to its reply.

An engine may store single blocks too. Its lookup ends in one of two ways. If all its chunks are found, the blocks behind them are
looked up at once. Else the hit may continue inside the first missed chunk: the reply wants that chunk's blocks, and the lookup is
over once the engine has named them, or has ended the request. Keys of all blocks in the first message would be sixteen times as
many, and most prompts need none. A lookup that waits for stores is over when it is answered again, and counts what it then found.

Owns: the checks of a lookup, what is counted of it, and the lookups that wait for the keys of a tail or for stores. Refuses to know: what is
resident, and leases (`cache`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvserver.cache import Cache, LookupOutcome, MissReason, counted_in_l2
from kvserver.copy import Devices
from kvserver.engines import Instance, Instances
from kvserver.events import Bus, LookupEnded
from kvserver.protocol import KEY_BYTES, ErrorCode, KVServerError, Lookup, LookupReply, LookupTail
from kvserver.server.copy_checks import check_chunk, check_tail, chunk_count, session_of
from kvserver.server.serving import Serving
from kvserver.server.store_waits import StoreWaits
from kvserver.tiering import Storage

_MOST_OPEN = 1024  # the oldest are over then: each keeps its keys


@dataclass(slots=True)
class _Looked:
    """A lookup, and what was found so far."""

    request: Lookup
    instance: Instance
    namespace: bytes
    chunk_tokens: int
    began_ns: int
    outcome: LookupOutcome
    tail_keys: bytes = b""


@dataclass
class L1Lookups:
    cache: Cache
    devices: Devices
    instances: Instances
    lease_seconds: float
    storage: Storage
    serving: Serving
    bus: Bus
    store_waits: StoreWaits
    clock: Callable[[], float] = time.monotonic
    # By (instance id, request id), the oldest first: they have replied that the hit may go on, or that stores may bring more.
    _open: OrderedDict[tuple[str, str], _Looked] = field(default_factory=OrderedDict)

    def answer(self, request: Lookup) -> LookupReply:
        """Count the lookup, and lease what it finds."""
        began_ns = int(self.clock() * 1e9)
        instance = self.instances.instance(request.instance_id, request.incarnation)
        spec = instance.any_worker().spec
        check_chunk(request.chunk_blocks, spec)
        check_tail(request.tail_keys, spec)
        chunks = chunk_count(request.keys) if request.keys or not request.tail_keys else 0
        owner = (request.instance_id, request.request_id)
        self.complete(owner)
        namespace = instance.namespace_of(request.variant)
        if namespace is None or self._unavailable:
            outcome = _nothing(request, chunks, self._unavailable or instance.ranks_text)
            return self._over(_Looked(request, instance, namespace or b"", spec.chunk_tokens, began_ns, outcome))
        outcome = self.cache.lookup(
            namespace, request.keys, owner, self._deadline(), session_of(request, namespace),
            shares=request.session_id is not None, now=began_ns / 1e9,
        )  # fmt: skip
        in_l2 = self.storage.found(instance, namespace, request.keys, outcome.hit_chunks, request.durability)
        if in_l2.known > outcome.hit_chunks:
            outcome = counted_in_l2(outcome, in_l2.known, MissReason.SLOW_L2 if in_l2.slow else MissReason.IN_L2)
        instance.counts.fills_not_begun += in_l2.slow
        looked = _Looked(request, instance, namespace, spec.chunk_tokens, began_ns, outcome)
        if not outcome.missed:
            self._find_tail(looked, request.tail_keys)
        hit_chunks, tail_blocks = outcome.hit_chunks, looked.outcome.tail_blocks
        coming = self.store_waits.coming_chunks(namespace, request, hit_chunks, tail_blocks)
        if in_l2.most > hit_chunks:
            return self._over(looked, max(in_l2.most, coming))
        wants_tail = coming == hit_chunks and spec.tails and bool(outcome.missed) and self.cache.has_tails(namespace)
        if coming == hit_chunks:
            hit_tokens = hit_chunks * spec.chunk_tokens + looked.outcome.tail_tokens
            instance.counts.lost_handovers += self.store_waits.promised_tokens(request, spec.chunk_tokens) > hit_tokens
            if not wants_tail:
                return self._over(looked)
        self._open[owner] = looked
        if len(self._open) > _MOST_OPEN:
            self.complete(next(iter(self._open)))
        fill_chunks = coming if coming > hit_chunks else 0
        return self._with_boundaries(looked, _reply(looked.outcome, wants_tail, fill_chunks))

    def answer_tail(self, request: LookupTail) -> LookupReply:
        """The rest of a lookup. KVServerError(BAD_KEYS) if it is over."""
        instance = self.instances.instance(request.instance_id, request.incarnation)
        check_tail(request.tail_keys, instance.any_worker().spec)
        owner = (request.instance_id, request.request_id)
        looked = self._open.get(owner)
        if looked is None or looked.instance is not instance:
            raise KVServerError(ErrorCode.BAD_KEYS, f"no lookup of request {request.request_id!r} waits for a tail")
        del self._open[owner]
        if self._unavailable:  # since the first half
            looked.outcome = _nothing(looked.request, looked.outcome.chunks, self._unavailable)
        else:
            self._find_tail(looked, request.tail_keys)
        return self._over(looked)

    def complete(self, owner: tuple[str, str]) -> None:
        """The request's lookup is over, if it waits for a tail or a store: it is answered, or the engine no longer needs it."""
        if (looked := self._open.pop(owner, None)) is not None:
            self._over(looked)

    def _find_tail(self, looked: _Looked, keys: bytes) -> None:
        if not keys:
            return
        request = looked.request
        owner = (request.instance_id, request.request_id)
        blocks = self.cache.lookup_tail(looked.namespace, keys, owner, self._deadline())
        tokens = blocks * looked.chunk_tokens // request.chunk_blocks
        looked.tail_keys = keys
        looked.outcome = replace(looked.outcome, tail_blocks=blocks, tail_tokens=tokens)

    def answer_again(self, request: Lookup, filled_tokens: int) -> LookupReply:
        """Lease what L1 has after a fill, which read so many tokens, or after a store. Unless the lookup is open it was counted before."""
        instance = self.instances.by_id.get(request.instance_id)
        if instance is None or instance.incarnation != request.incarnation:  # it has disconnected meanwhile
            return LookupReply(0)
        namespace = instance.namespace_of(request.variant)
        if namespace is None or self._unavailable:
            return LookupReply(0)
        owner = (request.instance_id, request.request_id)
        outcome = self.cache.lookup(
            namespace, request.keys, owner, self._deadline(), session_of(request, namespace),
            shares=request.session_id is not None, now=self.clock(),
        )  # fmt: skip
        looked = _Looked(request, instance, namespace, instance.any_worker().spec.chunk_tokens, 0, outcome)
        if not outcome.missed:
            self._find_tail(looked, request.tail_keys)
        if (before := self._open.get(owner)) is not None:
            before.outcome, before.tail_keys = looked.outcome, looked.tail_keys
        l2_chunks = min(outcome.hit_chunks, filled_tokens // looked.chunk_tokens)
        return replace(self._with_boundaries(looked, _reply(looked.outcome)), l2_chunks=l2_chunks)

    def _with_boundaries(self, looked: _Looked, reply: LookupReply) -> LookupReply:
        if not looked.request.boundaries:
            return reply
        keys = looked.request.keys[: reply.hit_chunks * KEY_BYTES]
        return replace(reply, boundaries=tuple(self.cache.boundaries(looked.namespace, keys)))

    @property
    def _unavailable(self) -> str:
        """Reason why lookups find nothing: no hit could be loaded, or the operator switched them off. "" if they find chunks."""
        return self.devices.lost or self.serving.why_nothing_is_found

    def _deadline(self) -> float:
        return self.clock() + self.lease_seconds

    def _over(self, looked: _Looked, fill_chunks: int = 0) -> LookupReply:
        """Count and publish it."""
        request, instance, outcome = looked.request, looked.instance, looked.outcome
        _count(instance, outcome, looked.chunk_tokens, request.tokens)
        handed_over = self.store_waits.promised_tokens(request, looked.chunk_tokens)
        instance.counts.handed_over_tokens += handed_over
        ended = LookupEnded(
            int(self.clock() * 1e9), instance.instance_id, instance.model_name, request.request_id, looked.began_ns,
            request.keys, outcome, looked.chunk_tokens, looked.namespace, request.tokens, request.traceparent,
            looked.tail_keys, looked.chunk_tokens // request.chunk_blocks, handed_over,
        )  # fmt: skip
        self.bus.publish(ended, len(request.keys) + len(looked.tail_keys))
        return self._with_boundaries(looked, _reply(outcome, fill_chunks=fill_chunks))


def _nothing(request: Lookup, chunks: int, why: str) -> LookupOutcome:
    missed = ((MissReason.UNAVAILABLE, chunks),) if chunks else ()
    return LookupOutcome(chunks, 0, missed, request.keys[:KEY_BYTES], unavailable=why)


def _reply(outcome: LookupOutcome, wants_tail: bool = False, fill_chunks: int = 0) -> LookupReply:
    return LookupReply(outcome.hit_chunks, outcome.full_chunks, outcome.tail_blocks, wants_tail, fill_chunks)


def _count(instance: Instance, outcome: LookupOutcome, chunk_tokens: int, prompt_tokens: int) -> None:
    counts, hit_tokens = instance.counts, outcome.hit_chunks * chunk_tokens + outcome.tail_tokens
    counts.lookups += 1
    counts.hits += hit_tokens > 0
    counts.lookup_tokens += outcome.looked_up_tokens(chunk_tokens)
    counts.hit_tokens += hit_tokens
    for reason, tokens in outcome.missed_tokens(chunk_tokens, prompt_tokens).items():
        counts.missed_tokens[reason] += tokens
