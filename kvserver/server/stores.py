"""Stores: from a message to a ticket, in several turns of the loop if much must be evicted, and from its end to a reply."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvserver._native import Outcome
from kvserver.cache import Cache, Chunk, StorePlan
from kvserver.copy import Completion
from kvserver.engines import Respond, StoreTicket, Worker, WorkerGroup
from kvserver.events import Bus, ChunksDescribed, ChunksEvicted, ChunksStored, publish_evicted
from kvserver.protocol import TOKEN_BYTES, Error, ErrorCode, KVServerError, Store, Stored
from kvserver.server.copies import Copies, failure
from kvserver.server.copy_checks import chunk_count, group_of, keys_at, own_places, session_of, store_blocks
from kvserver.server.serving import Serving
from kvserver.tiering import Storage

log = logging.getLogger(__name__)

STEPS_PER_TURN = 2048  # of all stores' plans together (see StorePlan.steps), in one turn of the loop


@dataclass
class Stores:
    cache: Cache
    copies: Copies
    bus: Bus
    storage: Storage
    serving: Serving
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
        chunks = self.copies.namespace_of(request, worker)
        group = group_of(request, worker)
        namespace = group.namespace(chunks)
        blocks = store_blocks(request, worker, group)
        self.copies.counts_of(worker).stores += 1
        if not self.serving.takes_stores:
            # Its word stays PENDING: an engine that saw FAILED before the reply would count a failed store.
            respond(Stored(stored=0, skipped=0, declined=chunk_count(request.keys)))
            return
        after = (chunks, request.after) if request.after and group.layout.tails else None
        plan = self._plan_objects(request, worker, group, namespace, after)
        ticket = StoreTicket(request, respond, worker, group, namespace, blocks, plan, self.copies.now_ns())
        if plan.complete:
            self._copy(ticket)
        else:
            self._waiting.append(ticket)
            worker.waiting += 1

    def _plan_objects(
        self, request: Store, worker: Worker, group: WorkerGroup, namespace: bytes, after: tuple[bytes, bytes] | None
    ) -> StorePlan:
        places = own_places(request, worker, group)
        if not places:  # other ranks store what all ranks have
            return StorePlan(group.number, _slots(group), group.layout)
        steps = 0 if self._waiting else self._steps  # none overtakes another
        plan = self.cache.plan_store(
            namespace, group.layout, keys_at(request.keys, places), group.slot_bytes,
            group=group.number, slots=_slots(group), places=places, steps=steps, model_name=worker.spec.model_name,
            after=after, durability=self.copies.durability_of(request, worker),
            session=session_of(request, namespace) if not group.layout.tails else None, tenant=request.tenant,
        )  # fmt: skip
        self._steps = plan.steps if steps else self._steps
        self._publish_evictions(plan)
        return plan

    def step(self) -> list[Worker]:
        """Continue waiting stores at the end of a turn. Returns the closing workers that no longer have one."""
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
        """Extend the store's plan by a slice; return whether it is complete. Raises KVServerError if the store should end."""
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
        if not ticket.group.layout.tails:
            counts.starved_chunks += plan.no_space
            counts.avoided_chunks += plan.skipped
        self._publish_contents(ticket)
        if not plan.chunks:
            worker.words.fail_word(request.word, request.sequence)  # it will not be read
            self._drop(ticket)
            ticket.respond(_stored(ticket))
            return
        try:
            places = own_places(request, worker, ticket.group)
            self.copies.submit(ticket, chunks=[places[position] for position in plan.positions])
        except BaseException:
            self.cache.finish_store(plan, copied=False)
            raise

    def copied(self, ticket: StoreTicket, slots: int) -> None:
        """Publish the objects of the first slots, unless the engine may have written to their blocks meanwhile.

        So L2 writes them while the others are copied. REQUIRES: as ended().
        """
        if not ticket.worker.closing and self.copies.now_ns() <= ticket.request.deadline_ns:
            plan, looked = ticket.plan, ticket.plan.looked
            ready = self.cache.publish_part(plan, slots)
            if looked < slots:
                self._publish_ready(ticket, ready, slice(plan.positions[looked], plan.positions[slots - 1] + 1))

    def ended(self, ticket: StoreTicket, completion: Completion) -> None:
        """Publish it, unless the engine may have written to its blocks meanwhile.

        The last byte was copied before now, whatever stopped this process in between. REQUIRES: nothing else publishes.
        """
        if completion.done and self.copies.now_ns() > ticket.request.deadline_ns:
            completion = replace(
                completion, outcome=Outcome.LATE, what="the store's deadline had passed when its last byte was copied"
            )
        copied = completion.done and not ticket.worker.closing
        first = len(ticket.plan.ready)
        self.cache.finish_store(ticket.plan, copied)
        self.copies.ended(ticket, completion, copied)
        if not copied:
            self.copies.count_parts(ticket)
        self._publish_ready(ticket, ticket.plan.ready[first:], slice(0, None))
        self._drop(ticket)
        ticket.respond(_stored(ticket) if copied else failure(completion))

    def _drop(self, ticket: StoreTicket) -> None:
        """Free the objects that no boundary needs once all ranks have stored those of this request."""
        group, namespace = ticket.group.objects, ticket.namespace
        if not ticket.request.dropped or ticket.group.layout.tails:
            return
        if not self.cache.has_objects(namespace, group.number, ticket.request.keys):
            return
        if dropped := self.cache.drop_objects(namespace, group.number, ticket.request.dropped):
            self.bus.publish(ChunksEvicted(self.copies.now_ns(), namespace, dropped, group), len(dropped))

    # ---- events of chunks ---------------------------------------------------------------------

    def _publish_evictions(self, plan: StorePlan) -> None:
        publish_evicted(self.bus, self.copies.now_ns(), plan)

    def _publish_contents(self, ticket: StoreTicket) -> None:
        contents, spec = ticket.request.contents, ticket.worker.spec
        if contents is not None:
            size = len(contents.hashes) + len(contents.tokens) + len(contents.extra_keys)
            keys, namespace = ticket.request.keys, ticket.group.chunks_namespace(ticket.namespace)
            chunks = self.cache.index.find_chunks(ticket.namespace, keys)  # also those of other ranks' stores
            ready = tuple(
                (
                    group,
                    b"".join([chunk.key for chunk in chunks if chunk is not None and chunk.ready >> group.place & 1]),
                )
                for group in ticket.group.layout.objects
            )
            in_l2 = () if ticket.group.layout.tails else self.storage.present(namespace, len(ready), keys)
            hashed_tokens = len(contents.tokens) // TOKEN_BYTES * contents.hash_bytes // len(contents.hashes)
            described = ChunksDescribed(
                self.copies.now_ns(),
                spec.instance_id,
                namespace,
                keys,
                ready,
                hashed_tokens,
                contents,
                in_l2,
                self._session_id(ticket.request, namespace),
            )
            self.bus.publish(described, size)

    def _session_id(self, request: Store, namespace: bytes) -> str:
        """The id, which all descriptions of the session's chunks share."""
        key = session_of(request, namespace)
        session = self.cache.sessions.session(key) if key is not None else None
        return session.key.id if session is not None else request.session_id

    def _publish_ready(self, ticket: StoreTicket, ready: Sequence[Chunk], places: slice) -> None:
        """Publish chunks that became READY. `places`: they are among these of the store's keys."""
        if ready:
            instance_id, model_name, _ = ticket.worker.identity
            group, keys = ticket.group, b"".join([chunk.key for chunk in ready])
            namespace = group.chunks_namespace(ticket.namespace)
            pages = ticket.plan.pages * group.layout.slots[group.number]
            stored = ChunksStored(self.copies.now_ns(), instance_id, model_name, namespace, keys, group.objects, pages)
            self.bus.publish(stored, len(keys))
            if not group.layout.tails and (of_l2 := self.copies.coverage_in_l2(ticket)) is not None:
                prefix, first = ticket.plan.prefix, places.start
                after = prefix[first - 1].key if first else ticket.request.after or b""
                self.storage.stored(ticket.namespace, *of_l2, prefix[places], after, set(ready))


def _slots(group: WorkerGroup) -> range:
    return range(group.slot, group.slot + 1)


def _stored(ticket: StoreTicket) -> Stored:
    """Skipped are also the chunks that other ranks copy."""
    stored, starved = len(ticket.plan.chunks), ticket.plan.no_space
    return Stored(stored=stored, skipped=chunk_count(ticket.request.keys) - stored - starved, starved=starved)
