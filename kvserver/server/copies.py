"""Common parts of stores and loads: the right to begin a copy, its ticket, its state word, and the counts of its end.

Owns: the counts of copies, and the events of their begin and end. Refuses to know: which chunks are resident or evicted
(`cache`), and what else a store (`stores`) or a load (`loads`) does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvserver._native import Outcome
from kvserver.cache import PagePool
from kvserver.copy import Completion, Tickets
from kvserver.engines import CopyTicket, Counts, Instances, LoadTicket, StoreTicket, Ticket, Worker
from kvserver.events import Bus, CopyBegan, CopyEnded, CopyRefused
from kvserver.l2 import Coverage
from kvserver.protocol import Durability, Error, ErrorCode, KVServerError, Retrieve, Store

_FAILURES = {
    Outcome.FAILED: ErrorCode.INTERNAL,
    Outcome.CANCELLED: ErrorCode.CANCELLED,
    Outcome.LATE: ErrorCode.LATE,
    Outcome.MEMORY_LOST: ErrorCode.MEMORY_LOST,
    Outcome.DEVICE_LOST: ErrorCode.DEVICE_LOST,
}


@dataclass
class Copies:
    pool: PagePool
    tickets: Tickets[Ticket]
    instances: Instances
    bus: Bus
    clock: Callable[[], float] = time.monotonic

    def now_ns(self) -> int:
        return int(self.clock() * 1e9)

    # ---- before the copy ----------------------------------------------------------------------

    def worker_of(self, request: Store | Retrieve) -> Worker:
        """KVServerError unless the request names a registered worker and one of its state words."""
        worker = self.instances.worker(request.registration)
        if request.word >= worker.spec.words:
            raise KVServerError(
                ErrorCode.BAD_MESSAGE, f"state word {request.word} of a page of {worker.spec.words} words"
            )
        worker.last_seen = self.clock()
        return worker

    def namespace_of(self, request: Store | Retrieve, worker: Worker) -> bytes:
        """KVServerError unless the request is in time and all ranks are registered."""
        if request.deadline_ns <= self.now_ns():
            raise KVServerError(ErrorCode.LATE, "the request's deadline had passed before the server read it")
        instance = self.instances.instance_of(worker)
        namespace = instance.namespace_of(request.variant)
        if namespace is None:
            raise KVServerError(ErrorCode.NOT_READY, instance.ranks_text)
        return namespace

    def refuse(self, request: Store | Retrieve, worker: Worker, error: Exception) -> None:
        """Fail the state word of a copy that does not begin: the engine sees at once that nothing is copied."""
        code = error.code if isinstance(error, KVServerError) else ErrorCode.INTERNAL
        direction = (StoreTicket if isinstance(request, Store) else LoadTicket).direction
        now_ns = self.now_ns()
        self.bus.publish(CopyRefused(now_ns, *worker.identity, direction, request.request_id, code.value))
        worker.words.fail_word(request.word, request.sequence)
        if isinstance(request, Store):
            self.counts_of(worker).failed_stores += 1
        else:
            self.counts_of(worker).failed_loads += 1
            self._count_wait(worker, request, now_ns, 0)

    # ---- the copy -----------------------------------------------------------------------------

    def submit(self, ticket: CopyTicket, skip: int = 0, chunks: list[int] | None = None) -> None:
        """Queue the copy of the ticket's chunks; `chunks` has the number of each in the request, if not all are copied."""
        request, worker, group = ticket.request, ticket.worker, ticket.group
        number = self.tickets.queue_copy(
            worker.device,
            ticket,
            blocks=ticket.blocks,
            extents=b"".join([chunk.slot(group.slot) for chunk in ticket.chunks]),
            pages_per_slot=self.pool.pages_for(group.slot_bytes),
            blocks_per_slot=group.blocks,
            skip=skip,
            chunks=chunks,
            word_memory=worker.words,
            word_index=request.word,
            sequence=request.sequence,
            deadline_nanos=request.deadline_ns,
        )
        worker.tickets.add(number)
        ticket.began_ns = self.now_ns()
        self.bus.publish(CopyBegan(ticket.began_ns, *worker.identity, ticket.direction, request.request_id))

    def ended(self, ticket: CopyTicket, completion: Completion, copied: bool) -> None:
        """Count and publish the end. `copied`: every byte was copied, and it counts."""
        now_ns, request_id = self.now_ns(), ticket.request.request_id
        others = ticket.group.number or ticket.group.layout.tails  # other groups' objects are of the same chunks
        chunks = 0 if others else len(ticket.chunks)
        self.bus.publish(
            CopyEnded(
                now_ns, *ticket.worker.identity, ticket.direction, request_id, ticket.began_ns, chunks,
                completion.bytes, completion.nanos, completion.outcome.name.lower(), now_ns - ticket.arrived_ns,
            )
        )  # fmt: skip
        counts = self.counts_of(ticket.worker)
        if isinstance(ticket, LoadTicket):
            self._count_wait(ticket.worker, ticket.request, ticket.arrived_ns, ticket.tokens if copied else 0)
            counts.failed_loads += not copied
        else:
            counts.failed_stores += not copied
        if copied:
            waited = (now_ns - ticket.arrived_ns) * 1e-9
            counts.benefit.copied(ticket.direction, waited, completion.nanos * 1e-9)
            self._count_copied(counts, ticket, completion)

    def durability_of(self, request: Store, worker: Worker) -> Durability:
        """Durability of what is stored."""
        return self.instances.instance_of(worker).durability(request.durability)

    def coverage_in_l2(self, ticket: CopyTicket) -> tuple[Coverage, Durability] | None:
        """Coverage of the ticket's objects in L2, and their durability, which decides on the tiers; None if no tier may have them."""
        spec = ticket.worker.spec
        instance = self.instances.by_id.get(spec.instance_id)
        if instance is None or instance.workers.get(spec.rank) is not ticket.worker:
            return None  # a later incarnation may have other objects
        durability = instance.durability(ticket.request.durability)
        coverage = instance.coverages[ticket.group.number] if durability is not Durability.PROCESS else None
        return (coverage, durability) if coverage is not None else None

    # ---- counts -------------------------------------------------------------------------------

    def counts_of(self, worker: Worker) -> Counts:
        """Counts of the worker's instance, also after it disconnected."""
        return self.instances.counts_of(worker.spec)

    def count_parts(self, ticket: StoreTicket) -> None:
        """Count what was published of a store that failed then."""
        counts, ready = self.counts_of(ticket.worker), len(ticket.plan.ready)
        counts.stored_chunks += 0 if ticket.group.layout.tails else ready
        counts.stored_bytes += ready * ticket.group.slot_bytes

    def _count_copied(self, counts: Counts, ticket: CopyTicket, completion: Completion) -> None:
        chunks = 0 if ticket.group.layout.tails else len(ticket.chunks)
        if isinstance(ticket, StoreTicket):
            counts.stored_chunks += chunks
            counts.stored_bytes += completion.bytes
            counts.store_nanos += completion.nanos
            return
        counts.loaded_chunks += chunks
        counts.loaded_bytes += completion.bytes
        counts.load_nanos += completion.nanos
        if _counts_tokens(ticket):
            counts.saved_tokens += ticket.tokens
            instance = self.instances.by_id.get(ticket.worker.spec.instance_id)
            if instance is not None and instance.prefill_speed:
                counts.saved_seconds += ticket.tokens / instance.prefill_speed

    def _count_wait(self, worker: Worker, request: Retrieve, arrived_ns: int, tokens: int) -> None:
        """Count the end of one copy of a load on this rank. `tokens`: of the load; 0 if the copy failed."""
        spec = worker.spec
        instance = self.instances.by_id.get(spec.instance_id)
        if instance is None or request.group >= len(worker.groups):  # else an engine could name a million parts
            return
        part, parts = (spec.rank, request.group), instance.world_size * request.messages
        whole = instance.load_waits.ended(request.request_id, part, parts, arrived_ns, self.now_ns(), tokens)
        if whole is not None:
            instance.counts.benefit.load_ended(*whole, instance.prefill_speed)


def _counts_tokens(load: LoadTicket) -> bool:
    """All ranks and groups save the same prefill: whether it is counted with this part of the load."""
    alone = load.request.messages == len(load.worker.spec.object_groups)  # no part of the load has chunks
    return load.worker.spec.rank == 0 and load.group.number == 0 and (alone or not load.group.layout.tails)


def failure(completion: Completion) -> Error:
    """The reply to a copy that failed."""
    code = _FAILURES.get(completion.outcome, ErrorCode.CANCELLED)
    return Error(code=code.value, message=completion.what or "the worker disconnected during the copy")
