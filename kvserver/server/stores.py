"""Stores: from a message to a ticket, in several turns of the loop if much must be evicted, and from its end to a reply."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from kvserver._native import Outcome
from kvserver.cache import Cache, StorePlan
from kvserver.copy import Completion
from kvserver.events import Bus, ChunksDescribed, ChunksEvicted, ChunksStored
from kvserver.protocol import KEY_BYTES, Error, ErrorCode, KVServerError, Store, Stored
from kvserver.server.copies import Copies, failure
from kvserver.server.copy_checks import chunk_count, store_blocks
from kvserver.server.instances import Worker
from kvserver.server.tickets import Respond, StoreTicket

log = logging.getLogger(__name__)

STEPS_PER_TURN = 2048  # of all stores' plans together (see StorePlan.steps), in one turn of the loop


@dataclass
class Stores:
    cache: Cache
    copies: Copies
    bus: Bus
    _steps: int = STEPS_PER_TURN  # that are left in this turn
    # Stores whose plan takes more than one turn. Each ends when the plan is complete, at its deadline or when its worker
    # closes, whose memory stays mapped until then.
    _waiting: deque[StoreTicket] = field(default_factory=deque)

    @property
    def waiting(self) -> int:
        """Stores whose plan is not complete."""
        return len(self._waiting)

    # ---- plan ---------------------------------------------------------------------------------

    def begin(self, request: Store, respond: Respond) -> None:
        """Queue the copy, or raise KVServerError after failing its state word. REQUIRES: the boot id was checked."""
        worker = self.copies.worker_of(request)
        try:
            self._plan(request, respond, worker)
        except Exception as error:
            self.copies.refuse(request, worker, error)
            raise

    def _plan(self, request: Store, respond: Respond, worker: Worker) -> None:
        namespace = self.copies.namespace_of(request, worker)
        blocks = store_blocks(request, worker)
        self.copies.counts_of(worker).stores += 1
        plan = self._plan_chunks(request, worker, namespace)
        ticket = StoreTicket(request, respond, worker, namespace, blocks, plan, self.copies.now_ns())
        if plan.complete:
            self._copy(ticket)
        else:
            self._waiting.append(ticket)
            worker.waiting += 1

    def _plan_chunks(self, request: Store, worker: Worker, namespace: bytes) -> StorePlan:
        if not worker.stores:  # another rank stores what all ranks have
            return StorePlan(worker.slot, skipped=chunk_count(request.keys))
        spec = worker.spec
        steps = 0 if self._waiting else self._steps  # none overtakes another
        slots = 1 if spec.replicated else spec.world_size
        plan = self.cache.plan_store(
            namespace, slots, worker.slot, request.keys, worker.slot_bytes, steps, spec.model_name
        )
        self._steps = plan.steps if steps else self._steps
        self._publish_evictions(plan)
        return plan

    def step(self) -> list[Worker]:
        """At the end of a turn: go on with the stores that wait. Returns the closing workers that no longer have one."""
        closing = []
        while self._waiting and self._steps > 0:
            ticket = self._waiting[0]
            try:
                if not self._extend_plan(ticket):
                    break
                self._copy(ticket)
            except Exception as error:
                self._end_waiting(ticket, error)
            self._waiting.popleft()
            ticket.worker.waiting -= 1
            if ticket.worker.closing:
                closing.append(ticket.worker)
        self._steps = STEPS_PER_TURN  # in the next turn
        return closing

    def _extend_plan(self, ticket: StoreTicket) -> bool:
        """Whether the plan is complete. KVServerError if the store should end."""
        if ticket.worker.closing:
            raise KVServerError(ErrorCode.CANCELLED, "the worker disconnected before the copy began")
        if ticket.request.deadline_ns <= self.copies.now_ns():
            raise KVServerError(
                ErrorCode.LATE, "the store's deadline passed while chunks were evicted to make space for it"
            )
        self.cache.extend_plan(ticket.plan, self._steps)
        self._steps = ticket.plan.steps
        self._publish_evictions(ticket.plan)
        return ticket.plan.complete

    def _end_waiting(self, ticket: StoreTicket, error: Exception) -> None:
        if not ticket.plan.complete:
            self._publish_evictions(ticket.plan)
            self.cache.finish_store(ticket.plan, copied=False)
        self.copies.refuse(ticket.request, ticket.worker, error)
        if not isinstance(error, KVServerError):
            log.error("internal error while a store was planned", exc_info=error)
            error = KVServerError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        ticket.respond(Error(code=error.code.value, message=error.message))

    # ---- copy ---------------------------------------------------------------------------------

    def _copy(self, ticket: StoreTicket) -> None:
        """Copy the chunks of the complete plan, or answer that there is nothing to copy."""
        request, worker, plan = ticket.request, ticket.worker, ticket.plan
        counts = self.copies.counts_of(worker)
        counts.starved_chunks += plan.no_space
        counts.avoided_chunks += plan.skipped if worker.stores else 0
        self._publish_contents(ticket)
        if not plan.chunks:
            worker.words.fail_word(request.word, request.sequence)  # it will not be read
            ticket.respond(_stored(plan))
            return
        try:
            self.copies.submit(ticket, chunks=plan.positions)
        except BaseException:
            self.cache.finish_store(plan, copied=False)
            raise

    def ended(self, ticket: StoreTicket, completion: Completion) -> None:
        """Publish it, unless the engine may have written to its blocks meanwhile.

        The last byte was copied before now, whatever stopped this process in between. REQUIRES: nothing else publishes.
        """
        if completion.done and self.copies.now_ns() > ticket.request.deadline_ns:
            completion = replace(
                completion, outcome=Outcome.LATE, what="the store's deadline had passed when its last byte was copied"
            )
        copied = completion.done and not ticket.worker.closing
        self.cache.finish_store(ticket.plan, copied)
        self.copies.ended(ticket, completion, copied)
        self._publish_ready(ticket)
        ticket.respond(_stored(ticket.plan) if copied else failure(completion))

    # ---- events of chunks ---------------------------------------------------------------------

    def _publish_evictions(self, plan: StorePlan) -> None:
        """Evictions since the last call: published before another store can store the same chunks again."""
        evicted: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for namespace, key in plan.evicted:
            evicted[namespace].append(key)
        plan.evicted.clear()
        for namespace, keys in evicted.items():
            self.bus.publish(ChunksEvicted(self.copies.now_ns(), namespace, b"".join(keys)), len(keys) * KEY_BYTES)

    def _publish_contents(self, ticket: StoreTicket) -> None:
        contents, spec = ticket.request.contents, ticket.worker.spec
        if contents is not None:
            size = len(contents.hashes) + len(contents.tokens) + len(contents.extra_keys)
            self.bus.publish(
                ChunksDescribed(
                    self.copies.now_ns(), spec.instance_id, ticket.namespace, ticket.request.keys, spec.block_tokens,
                    contents,
                ),
                size,
            )  # fmt: skip

    def _publish_ready(self, ticket: StoreTicket) -> None:
        if ready := ticket.plan.ready:
            instance_id, model_name, _ = ticket.worker.identity
            keys = b"".join([chunk.key for chunk in ready])
            self.bus.publish(
                ChunksStored(self.copies.now_ns(), instance_id, model_name, ticket.namespace, keys), len(keys)
            )


def _stored(plan: StorePlan) -> Stored:
    return Stored(stored=len(plan.chunks), skipped=plan.skipped, starved=plan.no_space)
