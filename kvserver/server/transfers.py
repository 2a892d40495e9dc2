"""Stores and loads: from a message to a ticket, and from the ticket's end to a reply.

Owns: the checks of a copy's blocks and keys, and what is counted of it. Refuses to know: which slots a
copy uses and which chunks are evicted (`cache`), how bytes move (`copy`), who the workers are (`workers`).
"""

from __future__ import annotations

import logging
from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvserver._native import NO_BLOCK, Direction, Outcome, unpack_blocks
from kvserver.cache import Cache, Chunk, StorePlan
from kvserver.copy import Completion, Tickets
from kvserver.events import (
    Bus,
    ChunksDescribed,
    ChunksEvicted,
    ChunksLoaded,
    ChunksStored,
    CopyBegan,
    CopyEnded,
    CopyRefused,
)
from kvserver.protocol import (
    KEY_BYTES,
    MOST_EXTRA_KEY_BYTES,
    ChunkContents,
    Error,
    ErrorCode,
    KVServerError,
    RegisterWorker,
    Reply,
    Retrieve,
    Retrieved,
    Store,
    Stored,
    parse_block_ids,
)
from kvserver.server.instances import Instance, Instances, Worker

log = logging.getLogger(__name__)

Respond: TypeAlias = Callable[[Reply], None]


@dataclass(slots=True)
class StoreTicket:
    worker: Worker
    respond: Respond
    request_id: str
    namespace: bytes
    plan: StorePlan
    deadline_ns: int  # from then on the engine may reuse its blocks
    arrived_ns: int
    began_ns: int = 0

    @property
    def chunks(self) -> list[Chunk]:
        return self.plan.chunks


@dataclass(slots=True)
class LoadTicket:
    worker: Worker
    respond: Respond
    request_id: str
    namespace: bytes
    keys: bytes
    tokens: int  # whose KV is loaded
    chunks: list[Chunk]
    arrived_ns: int
    began_ns: int = 0


@dataclass(slots=True)
class _Waiting:
    """A store whose plan takes more than one turn of the loop. It pins what it has planned; nothing is copied yet.

    It ends when the plan is complete, at its deadline or when its worker closes, whose memory stays mapped until then.
    """

    request: Store
    respond: Respond
    worker: Worker
    namespace: bytes
    blocks: array[int]
    plan: StorePlan
    arrived_ns: int


@dataclass(slots=True)
class MapTicket:
    worker: Worker
    respond: Respond


@dataclass(slots=True)
class UnmapTicket:
    worker: Worker


Ticket: TypeAlias = StoreTicket | LoadTicket | MapTicket | UnmapTicket

STEPS_PER_TURN = 2048  # of all stores' plans together (see StorePlan.steps), in one turn of the loop
_TOKEN_BYTES = 4
_DIRECTIONS = {Direction.STORE: "store", Direction.LOAD: "load"}
_FAILURES = {
    Outcome.FAILED: ErrorCode.INTERNAL,
    Outcome.CANCELLED: ErrorCode.CANCELLED,
    Outcome.LATE: ErrorCode.LATE,
    Outcome.MEMORY_LOST: ErrorCode.MEMORY_LOST,
    Outcome.DEVICE_LOST: ErrorCode.DEVICE_LOST,
}


class Transfers:
    def __init__(
        self, cache: Cache, tickets: Tickets[Ticket], instances: Instances, clock: Callable[[], float], bus: Bus
    ) -> None:
        self._bus = bus
        self._cache = cache
        self._tickets = tickets
        self._instances = instances
        self._clock = clock
        self._steps = STEPS_PER_TURN  # that are left in this turn
        self._waiting: deque[_Waiting] = deque()

    @property
    def waiting(self) -> int:
        """Stores whose plan is not complete."""
        return len(self._waiting)

    def step(self) -> list[Worker]:
        """At the end of a turn: go on with the stores that wait. Returns the closing workers that no longer have one."""
        closing = []
        while self._waiting and self._steps > 0:
            store = self._waiting[0]
            try:
                self._check_waiting(store)
                self._cache.extend_plan(store.plan, self._steps)
                self._steps = store.plan.steps
                self._publish_evictions(store.plan)
                if not store.plan.complete:
                    break
                self._planned(store)
            except Exception as error:
                self._waiting_failed(store, error)
            self._waiting.popleft()
            store.worker.waiting -= 1
            if store.worker.closing:
                closing.append(store.worker)
        self._steps = STEPS_PER_TURN  # in the next turn
        return closing

    def begin_copy(self, request: Store | Retrieve, respond: Respond) -> None:
        """Queue the copy, or raise KVServerError after failing its state word. REQUIRES: the boot id was checked."""
        worker = self._instances.worker(request.registration)
        if request.word >= worker.spec.words:
            raise KVServerError(
                ErrorCode.BAD_MESSAGE, f"state word {request.word} of a page of {worker.spec.words} words"
            )
        worker.last_seen = self._clock()
        instance = self._instances.instance_of(worker)
        try:
            check_chunk(request.chunk_blocks, worker.spec)
            if request.deadline_ns <= self._clock() * 1e9:
                raise KVServerError(ErrorCode.LATE, "the request's deadline had passed before the server read it")
            namespace = instance.namespace_of(request.variant)
            if namespace is None:
                raise KVServerError(
                    ErrorCode.NOT_READY,
                    f"{len(instance.workers)} of {instance.world_size} ranks of {instance.instance_id!r} are registered",
                )
            if isinstance(request, Store):
                self._store(request, respond, worker, instance, namespace)
            else:
                self._load(request, respond, worker, instance, namespace)
        except Exception as error:
            self._refused(request, worker, error)
            raise

    def _refused(self, request: Store | Retrieve, worker: Worker, error: Exception) -> None:
        spec = worker.spec
        code = error.code if isinstance(error, KVServerError) else ErrorCode.INTERNAL
        direction = _DIRECTIONS[Direction.STORE if isinstance(request, Store) else Direction.LOAD]
        self._bus.publish(
            CopyRefused(
                self._now_ns(), spec.instance_id, spec.model_name, spec.rank, direction, request.request_id, code.value
            )
        )
        worker.words.fail_word(request.word, request.sequence)  # the engine sees at once that nothing is copied
        counts = self._instances.counts_of(spec)
        if isinstance(request, Store):
            counts.failed_stores += 1
        else:
            counts.failed_loads += 1
            self._count_wait(worker, request.request_id, self._now_ns(), 0)

    def _store(self, request: Store, respond: Respond, worker: Worker, instance: Instance, namespace: bytes) -> None:
        per_chunk = worker.spec.chunk_blocks * worker.groups
        ids = chunk_count(request.keys) * per_chunk
        blocks = _block_ids(request, worker.spec.num_blocks, ids, ids)
        _refuse_null_block(blocks)
        if request.contents is not None:
            _check_contents(
                request.contents, chunk_count(request.keys) * worker.spec.chunk_blocks, worker.spec.block_tokens
            )
        instance.counts.stores += 1
        if worker.stores:
            steps = 0 if self._waiting else self._steps  # none overtakes another
            slots = 1 if worker.spec.replicated else instance.world_size
            plan = self._cache.plan_store(
                namespace, slots, worker.slot, request.keys, worker.slot_bytes, steps, instance.model_name
            )
            self._steps = plan.steps if steps else self._steps
            self._publish_evictions(plan)
        else:  # another rank stores what all ranks have
            plan = StorePlan(worker.slot, skipped=chunk_count(request.keys))
        store = _Waiting(request, respond, worker, namespace, blocks, plan, self._now_ns())
        if plan.complete:
            self._planned(store)
        else:
            self._waiting.append(store)
            worker.waiting += 1

    def _planned(self, store: _Waiting) -> None:
        """The plan is complete: copy its chunks, or answer that there is nothing to copy."""
        request, worker, plan = store.request, store.worker, store.plan
        counts = self._instances.counts_of(worker.spec)
        counts.starved_chunks += plan.no_space
        counts.avoided_chunks += plan.skipped if worker.stores else 0
        self._publish_contents(request, store.namespace, worker)
        if not plan.chunks:
            worker.words.fail_word(request.word, request.sequence)  # it will not be read
            store.respond(Stored(stored=0, skipped=plan.skipped, starved=plan.no_space))
            return
        per_chunk = worker.spec.chunk_blocks * worker.groups
        wanted = array("I")
        for position in plan.positions:
            wanted.extend(store.blocks[position * per_chunk : (position + 1) * per_chunk])
        ticket = StoreTicket(
            worker, store.respond, request.request_id, store.namespace, plan, request.deadline_ns, store.arrived_ns
        )
        try:
            self._submit(request, ticket, Direction.STORE, wanted, plan.chunks, 0)
        except BaseException:
            self._cache.finish_store(plan, copied=False)
            raise

    def _check_waiting(self, store: _Waiting) -> None:
        """KVServerError if it should end."""
        if store.worker.closing:
            raise KVServerError(ErrorCode.CANCELLED, "the worker disconnected before the copy began")
        if store.request.deadline_ns <= self._clock() * 1e9:
            raise KVServerError(
                ErrorCode.LATE, "the store's deadline passed while chunks were evicted to make space for it"
            )

    def _waiting_failed(self, store: _Waiting, error: Exception) -> None:
        if not store.plan.complete:
            self._publish_evictions(store.plan)
            self._cache.finish_store(store.plan, copied=False)
        self._refused(store.request, store.worker, error)
        if not isinstance(error, KVServerError):
            log.error("internal error while a store was planned", exc_info=error)
            error = KVServerError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        store.respond(Error(code=error.code.value, message=error.message))

    def _load(self, request: Retrieve, respond: Respond, worker: Worker, instance: Instance, namespace: bytes) -> None:
        chunks = chunk_count(request.keys)
        if request.skip_blocks >= worker.spec.chunk_blocks:
            raise KVServerError(
                ErrorCode.BAD_BLOCKS,
                f"skip_blocks {request.skip_blocks} leaves out a whole chunk of {worker.spec.chunk_blocks} blocks",
            )
        most = chunks * worker.spec.chunk_blocks - request.skip_blocks
        least = max(1, most - worker.spec.chunk_blocks + 1)
        groups = worker.groups
        blocks = _block_ids(request, worker.spec.num_blocks, least * groups, most * groups, groups > 1)
        if groups == 1:
            _refuse_null_block(blocks)
        else:
            blocks = _with_holes(blocks, groups)
        arrived_ns = self._now_ns()
        found = self._cache.plan_load(namespace, request.keys)
        instance.counts.loads += 1
        tokens = len(blocks) // groups * worker.spec.block_tokens
        ticket = LoadTicket(worker, respond, request.request_id, namespace, request.keys, tokens, found, arrived_ns)
        try:
            self._submit(request, ticket, Direction.LOAD, blocks, found, request.skip_blocks)
        except BaseException:
            self._cache.finish_load(found, copied=False)
            raise

    def _submit(
        self,
        request: Store | Retrieve,
        ticket: StoreTicket | LoadTicket,
        direction: Direction,
        blocks: array[int],
        chunks: list[Chunk],
        skip: int,
    ) -> None:
        worker = ticket.worker
        assert worker.table is not None
        number = self._tickets.queue_copy(
            worker.device,
            ticket,
            direction,
            worker.table,
            blocks=blocks.tobytes(),
            extents=b"".join([chunk.slot(worker.slot) for chunk in chunks]),
            pages_per_slot=self._cache.pool.pages_for(worker.slot_bytes),
            blocks_per_slot=worker.spec.chunk_blocks,
            skip=skip,
            word_memory=worker.words,
            word_index=request.word,
            sequence=request.sequence,
            deadline_nanos=request.deadline_ns,
        )
        worker.tickets.add(number)
        ticket.began_ns = self._now_ns()
        spec = worker.spec
        self._bus.publish(
            CopyBegan(
                ticket.began_ns, spec.instance_id, spec.model_name, spec.rank, _DIRECTIONS[direction],
                ticket.request_id, len(chunks),
            )
        )  # fmt: skip

    def store_ended(self, ticket: StoreTicket, completion: Completion) -> None:
        """Publish it, unless the engine may have written to its blocks meanwhile.

        The last byte was copied before now, whatever stopped this process in between. REQUIRES: nothing else publishes.
        """
        if completion.done and self._now_ns() > ticket.deadline_ns:
            completion = replace(
                completion, outcome=Outcome.LATE, what="the store's deadline had passed when its last byte was copied"
            )
        copied = completion.done and not ticket.worker.closing
        self._cache.finish_store(ticket.plan, copied)
        self._publish_end(ticket, completion, Direction.STORE)
        if ready := ticket.plan.ready:
            spec = ticket.worker.spec
            keys = b"".join([chunk.key for chunk in ready])
            chunk_bytes = ready[0].page_count * self._cache.pool.page_bytes
            self._bus.publish(
                ChunksStored(self._now_ns(), spec.instance_id, spec.model_name, ticket.namespace, keys, chunk_bytes),
                len(keys),
            )
        counts = self._instances.counts_of(ticket.worker.spec)
        if not copied:
            counts.failed_stores += 1
            ticket.respond(_failure(completion))
            return
        counts.stored_chunks += len(ticket.plan.chunks)
        counts.stored_bytes += completion.bytes
        counts.store_nanos += completion.nanos
        self._count_duration(ticket, completion, Direction.STORE)
        plan = ticket.plan
        ticket.respond(Stored(stored=len(plan.chunks), skipped=plan.skipped, starved=plan.no_space))

    def load_ended(self, ticket: LoadTicket, completion: Completion) -> None:
        self._cache.finish_load(ticket.chunks, completion.done)
        self._publish_end(ticket, completion, Direction.LOAD)
        counts = self._instances.counts_of(ticket.worker.spec)
        tokens = ticket.tokens if completion.done else 0
        self._count_wait(ticket.worker, ticket.request_id, ticket.arrived_ns, tokens)
        if not completion.done:
            counts.failed_loads += 1
            ticket.respond(_failure(completion))
            return
        counts.loaded_chunks += len(ticket.chunks)
        counts.loaded_bytes += completion.bytes
        counts.load_nanos += completion.nanos
        self._count_duration(ticket, completion, Direction.LOAD)
        spec = ticket.worker.spec
        if spec.rank == 0:  # the ranks of an engine save the same prefill
            counts.saved_tokens += ticket.tokens
            instance = self._instances.by_id.get(spec.instance_id)
            if instance is not None and instance.prefill_speed:
                counts.saved_seconds += ticket.tokens / instance.prefill_speed
            self._bus.publish(
                ChunksLoaded(self._now_ns(), spec.instance_id, spec.model_name, ticket.namespace, ticket.keys),
                len(ticket.keys),
            )
        ticket.respond(Retrieved(chunks=len(ticket.chunks)))

    def _count_duration(self, ticket: StoreTicket | LoadTicket, completion: Completion, direction: Direction) -> None:
        waited = (self._now_ns() - ticket.arrived_ns) * 1e-9
        benefit = self._instances.counts_of(ticket.worker.spec).benefit
        benefit.copied(_DIRECTIONS[direction], waited, completion.nanos * 1e-9)

    def _count_wait(self, worker: Worker, request_id: str, arrived_ns: int, tokens: int) -> None:
        """A load ended on this rank, having brought the KV of so many tokens."""
        spec = worker.spec
        instance = self._instances.by_id.get(spec.instance_id)
        if instance is None:
            return
        waits = instance.load_waits
        whole = waits.ended(request_id, spec.rank, instance.world_size, arrived_ns, self._now_ns(), tokens)
        if whole is not None:
            instance.counts.benefit.load_ended(*whole, instance.prefill_speed)

    def _publish_evictions(self, plan: StorePlan) -> None:
        """Evictions since the last call: published before another store can store the same chunks again."""
        evicted: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for namespace, key in plan.evicted:
            evicted[namespace].append(key)
        plan.evicted.clear()
        for namespace, keys in evicted.items():
            self._bus.publish(ChunksEvicted(self._now_ns(), namespace, b"".join(keys)), len(keys) * KEY_BYTES)

    def _publish_contents(self, request: Store, namespace: bytes, worker: Worker) -> None:
        contents, spec = request.contents, worker.spec
        if contents is not None:
            size = len(contents.hashes) + len(contents.tokens) + len(contents.extra_keys)
            self._bus.publish(
                ChunksDescribed(self._now_ns(), spec.instance_id, namespace, request.keys, spec.block_tokens, contents),
                size,
            )

    def _publish_end(self, ticket: StoreTicket | LoadTicket, completion: Completion, direction: Direction) -> None:
        spec = ticket.worker.spec
        self._bus.publish(
            CopyEnded(
                self._now_ns(), spec.instance_id, spec.model_name, spec.rank, _DIRECTIONS[direction],
                ticket.request_id, ticket.began_ns, len(ticket.chunks),
                completion.bytes, completion.nanos, completion.outcome.name.lower(),
            )
        )  # fmt: skip

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)


def chunk_count(keys: bytes) -> int:
    """KVServerError(BAD_KEYS) unless there are one or more whole keys."""
    if not keys or len(keys) % KEY_BYTES:
        raise KVServerError(
            ErrorCode.BAD_KEYS, f"keys holds {len(keys)} bytes, not one or more whole keys of {KEY_BYTES}"
        )
    return len(keys) // KEY_BYTES


def check_chunk(chunk_blocks: int, spec: RegisterWorker) -> None:
    if chunk_blocks != spec.chunk_blocks:
        raise KVServerError(
            ErrorCode.BAD_KEYS, f"keys are per {chunk_blocks} blocks, the workers registered {spec.chunk_blocks}"
        )


def _block_ids(
    request: Store | Retrieve, num_blocks: int, least: int, most: int, null_may_repeat: bool = False
) -> array[int]:
    """Unpacked, and checked by parse_block_ids()."""
    try:
        raw = unpack_blocks(request.block_ids, most)
    except ValueError as error:
        expected = f"{most}" if least == most else f"{least} to {most}"
        raise KVServerError(
            ErrorCode.BAD_BLOCKS,
            f"block_ids of {len(request.block_ids)} bytes cannot be unpacked: {error}; {expected} blocks belong to these keys",
        ) from None
    return parse_block_ids(raw, num_blocks, least, most, null_may_repeat)


def _check_contents(contents: ChunkContents, blocks: int, block_tokens: int) -> None:
    """KVServerError(BAD_KEYS) unless there is a hash and a block of tokens for each of the `blocks`."""
    expected = (blocks * contents.hash_bytes, blocks * block_tokens * _TOKEN_BYTES)
    got = (len(contents.hashes), len(contents.tokens))
    if got != expected or len(contents.parent) not in (0, contents.hash_bytes):
        raise KVServerError(
            ErrorCode.BAD_KEYS,
            f"contents of {blocks} blocks with hashes of {contents.hash_bytes} bytes: hashes and tokens of {got} bytes instead of "
            f"{expected}, a parent of {len(contents.parent)}",
        )
    if len(contents.extra_keys) > blocks * MOST_EXTRA_KEY_BYTES:
        raise KVServerError(
            ErrorCode.BAD_KEYS,
            f"extra keys of {len(contents.extra_keys)} bytes, at most {MOST_EXTRA_KEY_BYTES} a block",
        )


def _refuse_null_block(blocks: array[int]) -> None:
    if 0 in blocks:
        raise KVServerError(ErrorCode.BAD_BLOCKS, "block id 0 is the null block: it is never stored or loaded")


def _with_holes(blocks: array[int], groups: int) -> array[int]:
    """The ids of a load of several groups, null blocks as what the copier leaves out.

    KVServerError(BAD_BLOCKS) unless there are whole positions, each with a block of at least one group.
    """
    if len(blocks) % groups:
        raise KVServerError(ErrorCode.BAD_BLOCKS, f"{len(blocks)} block ids are no whole positions of {groups} groups")
    if 0 not in blocks:
        return blocks
    columns = (blocks[group::groups] for group in range(groups))
    if not all(map(any, zip(*columns, strict=True))):
        raise KVServerError(ErrorCode.BAD_BLOCKS, "a position has the null block, id 0, in every group")
    return array("I", (id or NO_BLOCK for id in blocks))


def _failure(completion: Completion) -> Error:
    code = _FAILURES.get(completion.outcome, ErrorCode.CANCELLED)
    return Error(code=code.value, message=completion.what or "the worker disconnected during the copy")
