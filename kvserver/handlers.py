"""What the server does for each request, and when a ticket ends.

Owns: the step from a message to decisions and tickets, and from a completion to a reply. Refuses to
know: frames, sockets, polling (`server`), which slots and whom to evict (`cache`), how bytes move
(`copier`). Runs in the loop thread; nothing here blocks.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvserver import __version__
from kvserver.cache import Cache, StorePlan
from kvserver.config import Settings
from kvserver.copier import Completion, Copier, Device, Direction, Mapping, Outcome, PlaneTable
from kvserver.errors import ErrorCode, KVServerError
from kvserver.index import Chunk
from kvserver.instances import Counts, Instance, Instances, Worker
from kvserver.lifeline import Attachment, Lifelines
from kvserver.planes import parse_block_ids
from kvserver.protocol import (
    KEY_BYTES,
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    RECORD_CLEARED,
    RECORD_OPERATION_SHIFT,
    Clear,
    Cleared,
    EndRequest,
    Error,
    Heartbeat,
    Hello,
    HelloReply,
    Lookup,
    LookupReply,
    Registered,
    RegisterWorker,
    Reply,
    ReportBlockAllocations,
    Request,
    Retrieve,
    Retrieved,
    Status,
    StatusReply,
    Store,
    Stored,
    Unregistered,
    UnregisterWorker,
)

log = logging.getLogger(__name__)

Respond: TypeAlias = Callable[[Reply], None]


@dataclass(slots=True)
class StoreTicket:
    worker: Worker
    respond: Respond
    plan: StorePlan


@dataclass(slots=True)
class LoadTicket:
    worker: Worker
    respond: Respond
    chunks: list[Chunk]


@dataclass(slots=True)
class MapTicket:
    worker: Worker
    respond: Respond


@dataclass(slots=True)
class UnmapTicket:
    worker: Worker


Ticket: TypeAlias = StoreTicket | LoadTicket | MapTicket | UnmapTicket

_FAILURES = {
    Outcome.FAILED: ErrorCode.INTERNAL,
    Outcome.CANCELLED: ErrorCode.CANCELLED,
    Outcome.LATE: ErrorCode.LATE,
    Outcome.MEMORY_LOST: ErrorCode.MEMORY_LOST,
}


class Handlers:
    """The state of a server and what moves it."""

    def __init__(
        self,
        settings: Settings,
        boot_id: str,
        token: str,
        cache: Cache,
        device: Device,
        lifelines: Lifelines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.boot_id = boot_id
        self.cache = cache
        self.copier: Copier[Ticket] = Copier(device)
        self.instances = Instances()
        self.lifelines = lifelines
        self.mappings = 0  # open mappings of engine memory
        self._token = token
        self._clock = clock
        self._waiting: dict[int, Respond] = {}  # registration -> who asked to unregister

    # ---- requests -----------------------------------------------------------------------------

    def handle(self, request: Request, respond: Respond) -> None:
        """Answer now, or later from `complete()`; notices only on error. KVServerError is the caller's to send."""
        match request:
            case Lookup():
                respond(self._lookup(request))
            case Store() | Retrieve():
                self._copy(request, respond)
            case ReportBlockAllocations():
                self._report(request)
            case EndRequest():
                self._end_request(request)
            case Heartbeat():
                self._check_boot(request.boot_id)
            case Hello():
                respond(self._hello(request))
            case RegisterWorker():
                self._register(request, respond)
            case UnregisterWorker():
                self._unregister(request, respond)
            case Clear():
                respond(self._clear(request))
            case Status():
                respond(StatusReply(status=self.status()))

    def _hello(self, request: Hello) -> HelloReply:
        if not OLDEST_PROTOCOL_VERSION <= request.protocol_version <= PROTOCOL_VERSION:
            raise KVServerError(
                ErrorCode.VERSION_MISMATCH,
                f"the client speaks protocol {request.protocol_version}, server {__version__} speaks "
                f"{OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}",
            )
        return HelloReply(
            protocol_version=request.protocol_version,
            server_version=__version__,
            boot_id=self.boot_id,
            chunk_tokens=self.settings.chunk_tokens,
            fd_path=self.lifelines.path,
            token=self._token,
        )

    def _lookup(self, request: Lookup) -> LookupReply:
        instance = self.instances.instance(request.instance_id, request.incarnation)
        chunks = _chunk_count(request.keys)
        spec = instance.any_worker().spec
        _check_chunk(request.chunk_blocks, spec)
        namespace = instance.namespace_of(request.variant)
        hits = 0
        if namespace is not None:
            owner = (request.instance_id, request.request_id)
            hits = self.cache.lookup(namespace, request.keys, owner, self._clock() + self.settings.lease_seconds)
        chunk_tokens = spec.chunk_blocks * spec.block_tokens
        counts = instance.counts
        counts.lookups += 1
        counts.hits += hits > 0
        counts.lookup_tokens += chunks * chunk_tokens
        counts.hit_tokens += hits * chunk_tokens
        return LookupReply(hit_chunks=hits)

    def _copy(self, request: Store | Retrieve, respond: Respond) -> None:
        self._check_boot(request.boot_id)
        worker = self.instances.worker(request.registration)
        if request.word >= worker.spec.words:
            raise KVServerError(
                ErrorCode.BAD_MESSAGE, f"state word {request.word} of a page of {worker.spec.words} words"
            )
        worker.last_seen = self._clock()
        instance = self.instances.of(worker)
        try:
            _check_chunk(request.chunk_blocks, worker.spec)
            if request.deadline_ns <= self._clock() * 1e9:
                raise KVServerError(ErrorCode.LATE, "its deadline had passed before the server read it")
            namespace = instance.namespace_of(request.variant)
            if namespace is None:
                raise KVServerError(
                    ErrorCode.NOT_READY,
                    f"{len(instance.workers)} of {instance.world_size} ranks of {instance.instance_id!r} stand",
                )
            if isinstance(request, Store):
                self._store(request, respond, worker, instance, namespace)
            else:
                self._load(request, respond, worker, instance, namespace)
        except Exception:
            # Whoever waits on the word learns at once that nothing will be copied.
            worker.words.fail_word(request.word, request.sequence)
            if isinstance(request, Store):
                instance.counts.failed_stores += 1
            else:
                instance.counts.failed_loads += 1
            raise

    def _store(self, request: Store, respond: Respond, worker: Worker, instance: Instance, namespace: bytes) -> None:
        per_chunk = worker.spec.chunk_blocks
        ids = _chunk_count(request.keys) * per_chunk
        blocks = parse_block_ids(request.block_ids, worker.spec.num_blocks, ids, ids)
        _refuse_null_block(blocks)
        plan = self.cache.plan_store(namespace, instance.world_size, worker.spec.rank, request.keys, worker.slot_bytes)
        instance.counts.stores += 1
        if not plan.chunks:
            worker.words.fail_word(request.word, request.sequence)  # it will not be read
            respond(Stored(stored=0, skipped=plan.skipped, starved=plan.starved))
            return
        wanted = array("I")
        for position in plan.positions:
            wanted.extend(blocks[position * per_chunk : (position + 1) * per_chunk])
        ticket = StoreTicket(worker, respond, plan)
        try:
            self._submit(request, ticket, Direction.STORE, wanted, plan.chunks, 0)
        except BaseException:
            self.cache.finish_store(plan, copied=False)
            raise

    def _load(self, request: Retrieve, respond: Respond, worker: Worker, instance: Instance, namespace: bytes) -> None:
        chunks = _chunk_count(request.keys)
        if request.skip_blocks >= worker.spec.chunk_blocks:
            raise KVServerError(
                ErrorCode.BAD_BLOCKS,
                f"skip_blocks {request.skip_blocks} leaves out a whole chunk of {worker.spec.chunk_blocks} blocks",
            )
        most = chunks * worker.spec.chunk_blocks - request.skip_blocks
        least = max(1, most - worker.spec.chunk_blocks + 1)
        blocks = parse_block_ids(request.block_ids, worker.spec.num_blocks, least, most)
        _refuse_null_block(blocks)
        found = self.cache.plan_load(namespace, request.keys)
        instance.counts.loads += 1
        ticket = LoadTicket(worker, respond, found)
        try:
            self._submit(request, ticket, Direction.LOAD, blocks, found, request.skip_blocks)
        except BaseException:
            self.cache.finish_load(found)
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
        pages = array("I")
        for chunk in chunks:
            slot = chunk.slots[worker.spec.rank]
            assert slot is not None
            pages.extend(slot)
        number = self.copier.copy(
            ticket,
            direction,
            worker.table,
            blocks=blocks.tobytes(),
            pages=pages.tobytes(),
            pages_per_slot=len(pages) // len(chunks),
            blocks_per_slot=worker.spec.chunk_blocks,
            skip=skip,
            word_memory=worker.words,
            word_index=request.word,
            sequence=request.sequence,
            deadline_nanos=request.deadline_ns,
        )
        worker.tickets.add(number)

    def _report(self, request: ReportBlockAllocations) -> None:
        instance = self.instances.instance(request.instance_id, request.incarnation)
        if len(request.records) % 4:
            raise KVServerError(
                ErrorCode.BAD_RECORDS, f"{len(request.records)} bytes are no whole number of u32 records"
            )
        records = array("I")
        records.frombytes(request.records)
        if records and max(records) >> RECORD_OPERATION_SHIFT > RECORD_CLEARED:
            raise KVServerError(
                ErrorCode.BAD_RECORDS,
                f"operation {max(records) >> RECORD_OPERATION_SHIFT} is not 0 to {RECORD_CLEARED}",
            )
        self._count_sequence(instance, request.sequence)
        instance.counts.block_records += len(records)

    def _end_request(self, request: EndRequest) -> None:
        instance = self.instances.instance(request.instance_id, request.incarnation)
        self._count_sequence(instance, request.sequence)
        instance.counts.ended_requests += 1
        self.cache.end_lease((request.instance_id, request.request_id))

    @staticmethod
    def _count_sequence(instance: Instance, sequence: int) -> None:
        if instance.next_sequence is not None and sequence != instance.next_sequence:
            instance.counts.sequence_gaps += 1
        instance.next_sequence = sequence + 1

    def _clear(self, request: Clear) -> Cleared:
        if not request.instance_id:
            return Cleared(chunks=self.cache.clear())
        instance = self.instances.by_id.get(request.instance_id)
        if instance is None:
            raise KVServerError(ErrorCode.UNKNOWN_INSTANCE, f"instance {request.instance_id!r} is not registered")
        return Cleared(chunks=self.cache.clear(instance.namespaces()))

    # ---- workers come and go ------------------------------------------------------------------

    def _register(self, request: RegisterWorker, respond: Respond) -> None:
        attachment = self.lifelines.find(request.attachment)
        self.instances.check(request)
        self._check_geometry(request, len(attachment.fds))
        fds = attachment.claim()
        memory = [Mapping(fds[m.index], m.size_bytes) for m in request.memory]
        memory.append(Mapping(fds[-1], request.words * 8))
        worker = self.instances.add(request, attachment, memory)
        worker.last_seen = self._clock()
        self.mappings += len(memory)
        worker.tickets.add(self.copier.map(MapTicket(worker, respond), memory))

    def _check_geometry(self, request: RegisterWorker, fds: int) -> None:
        if sorted(m.index for m in request.memory) != list(range(fds - 1)):
            raise KVServerError(
                ErrorCode.BAD_MEMORY,
                f"{fds} descriptors came with Attach: memory must name each of 0 to {fds - 2} once, "
                "the last one is the state word page",
            )
        expected = max(1, self.settings.chunk_tokens // request.block_tokens)
        if request.chunk_blocks != expected:
            raise KVServerError(
                ErrorCode.BAD_PLANES,
                f"chunk_blocks is {request.chunk_blocks}; {self.settings.chunk_tokens} chunk tokens over blocks of "
                f"{request.block_tokens} make {expected}",
            )
        for number, plane in enumerate(request.planes):
            if plane.memory >= len(request.memory):
                raise KVServerError(
                    ErrorCode.BAD_PLANES, f"plane {number} names memory {plane.memory} of {len(request.memory)}"
                )
        slot_bytes = expected * sum(plane.run_bytes for plane in request.planes)
        l1_bytes = self.cache.pool.pages * self.cache.pool.page_bytes
        if slot_bytes > l1_bytes:
            raise KVServerError(
                ErrorCode.TOO_LARGE,
                f"one chunk of this model takes {slot_bytes} bytes, L1 has {l1_bytes}; raise --l1-size or lower "
                "--chunk-tokens",
            )

    def _mapped(self, ticket: MapTicket, completion: Completion) -> None:
        worker = ticket.worker
        if worker.closing:
            ticket.respond(_error(ErrorCode.CANCELLED, "the worker's connection ended while its memory was mapped"))
            return
        try:
            if not completion.done:
                raise KVServerError(ErrorCode.BAD_MEMORY, completion.what)
            rows = [(p.memory, p.offset, p.stride_bytes, p.run_bytes) for p in worker.spec.planes]
            try:
                worker.table = PlaneTable(worker.memory[:-1], rows, worker.spec.num_blocks)
            except ValueError as error:
                raise KVServerError(ErrorCode.BAD_PLANES, str(error)) from None
        except KVServerError as error:
            log.warning("worker %s/%d refused: %s", worker.spec.instance_id, worker.spec.rank, error)
            ticket.respond(_error(error.code, error.message))
            self.close_worker(worker)
            return
        instance = self.instances.of(worker)
        instance.refresh_namespace()
        log.info(
            "worker %s/%d of %d registered: %d planes, %d blocks of %d bytes",
            worker.spec.instance_id, worker.spec.rank, worker.spec.world_size,
            len(worker.spec.planes), worker.spec.num_blocks, worker.table.block_bytes,
        )  # fmt: skip
        namespace = instance.namespace.hex() if instance.namespace is not None else ""
        ticket.respond(Registered(registration=worker.registration, namespace=namespace))

    def _unregister(self, request: UnregisterWorker, respond: Respond) -> None:
        self._check_boot(request.boot_id)
        worker = self.instances.worker(request.registration)
        self._waiting[worker.registration] = respond
        self.close_worker(worker)

    def close_worker(self, worker: Worker) -> None:
        """End a worker: no new requests, its copies end at their next block, then its memory is unmapped."""
        if worker.closing:
            return
        worker.closing = True
        ended = self.instances.remove(worker)
        if ended is not None:
            self.cache.end_leases_of(ended.instance_id)
            log.info("instance %s is gone", ended.instance_id)
        for number in worker.tickets:
            self.copier.cancel(number)
        self._unmap_if_settled(worker)

    def attachment_ended(self, attachment: Attachment) -> None:
        """The peer at the other end is dead, or hung up."""
        worker = self.instances.by_registration.get(attachment.registration or 0)
        if worker is not None:
            log.info("worker %s/%d: connection ended", worker.spec.instance_id, worker.spec.rank)
            self.close_worker(worker)

    def _unmap_if_settled(self, worker: Worker) -> None:
        if worker.closing and not worker.tickets and not worker.unmapping:
            worker.unmapping = True
            worker.table = None
            self.copier.unmap(UnmapTicket(worker), worker.memory)

    # ---- completions --------------------------------------------------------------------------

    def settle(self) -> None:
        """Act on every ticket that has ended. Never raises: each ticket ends, whatever one of them does."""
        for ticket, completion in self.copier.drain():
            try:
                self._ended(ticket, completion)
            except Exception:
                log.exception("while ending %s", type(ticket).__name__)

    def _ended(self, ticket: Ticket, completion: Completion) -> None:
        if isinstance(ticket, UnmapTicket):
            self.mappings -= len(ticket.worker.memory)
            self.lifelines.close(ticket.worker.attachment)
            respond = self._waiting.pop(ticket.worker.registration, None)
            if respond is not None:
                respond(Unregistered())
            return
        worker = ticket.worker
        worker.tickets.discard(completion.number)
        match ticket:
            case MapTicket():
                self._mapped(ticket, completion)
            case StoreTicket():
                self._store_ended(ticket, completion)
            case LoadTicket():
                self._load_ended(ticket, completion)
        if completion.outcome == Outcome.MEMORY_LOST:
            log.warning("worker %s/%d: %s; dropped", worker.spec.instance_id, worker.spec.rank, completion.what)
            self.close_worker(worker)
        self._unmap_if_settled(worker)

    def _store_ended(self, ticket: StoreTicket, completion: Completion) -> None:
        copied = completion.done and not ticket.worker.closing
        self.cache.finish_store(ticket.plan, copied)
        counts = self._counts_of(ticket.worker)
        if not copied:
            counts.failed_stores += 1
            ticket.respond(_failure(completion))
            return
        counts.stored_chunks += len(ticket.plan.chunks)
        counts.stored_bytes += completion.bytes
        counts.store_nanos += completion.nanos
        plan = ticket.plan
        ticket.respond(Stored(stored=len(plan.chunks), skipped=plan.skipped, starved=plan.starved))

    def _load_ended(self, ticket: LoadTicket, completion: Completion) -> None:
        self.cache.finish_load(ticket.chunks)
        counts = self._counts_of(ticket.worker)
        if not completion.done:
            counts.failed_loads += 1
            ticket.respond(_failure(completion))
            return
        counts.loaded_chunks += len(ticket.chunks)
        counts.loaded_bytes += completion.bytes
        counts.load_nanos += completion.nanos
        ticket.respond(Retrieved(chunks=len(ticket.chunks)))

    def _counts_of(self, worker: Worker) -> Counts:
        instance = self.instances.by_id.get(worker.spec.instance_id)
        return instance.counts if instance is not None else self.instances.gone

    # ---- time ---------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once a second or so: leases whose requests never ended."""
        if expired := self.cache.expire_leases(self._clock()):
            log.debug("%d leases expired", expired)

    def audit_if_idle(self) -> bool:
        """Assert the books when nothing is in flight and L1 is small enough to count; True if they were."""
        if self.copier.open_tickets or self.cache.index.chunk_count > _AUDIT_CHUNKS or self.cache.free_garbage():
            return False
        self.cache.audit()
        assert self.cache.pins == 0, f"{self.cache.pins} pins without a ticket"
        standing = sum(len(w.memory) for w in self.instances.by_registration.values())
        assert self.mappings == standing, f"{self.mappings} mappings are open, workers stand on {standing}"
        return True

    # ---- status -------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The part of `/status` that this module knows."""
        pool, cache = self.cache.pool, self.cache
        totals = self.instances.totals()
        return {
            "l1": {
                "size_bytes": pool.pages * pool.page_bytes,
                "used_bytes": pool.used_pages * pool.page_bytes,
                "page_bytes": pool.page_bytes,
                "chunks": cache.index.chunk_count,
                "evictions": cache.evicted_chunks,
                "policy": cache.policy.name,
            },
            "l2": [],
            "instances": [self._instance_status(instance) for instance in self.instances.by_id.values()],
            "totals": {
                "lookup_tokens": totals.lookup_tokens,
                "hit_tokens": totals.hit_tokens,
                "stored_bytes": totals.stored_bytes,
                "loaded_bytes": totals.loaded_bytes,
                "failed_stores": totals.failed_stores,
                "failed_loads": totals.failed_loads,
                "errors": totals.errors,
            },
            "books": {
                "tickets": self.copier.open_tickets,
                "pins": cache.pins,
                "leases": cache.lease_count,
                "mappings": self.mappings,
                "attachments": len(self.lifelines),
                "free_pages": pool.free_pages,
                "used_pages": pool.used_pages,
            },
        }

    def _instance_status(self, instance: Instance) -> dict[str, Any]:
        spec = instance.any_worker().spec
        counts = instance.counts
        now = self._clock()
        return {
            "instance_id": instance.instance_id,
            "model_name": instance.model_name,
            "namespace": instance.namespace.hex() if instance.namespace is not None else "",
            "world_size": instance.world_size,
            "l0_source": "exact" if counts.block_records else "none",
            "workers": [
                {
                    "rank": rank,
                    "device": "cpu",
                    "planes": len(worker.spec.planes),
                    "block_bytes": worker.slot_bytes // worker.spec.chunk_blocks,
                    "num_blocks": worker.spec.num_blocks,
                    "pid": worker.attachment.pid,
                    "tickets": len(worker.tickets),
                    "last_seen_seconds": round(now - worker.last_seen, 3),
                }
                for rank, worker in sorted(instance.workers.items())
            ],
            "block_tokens": spec.block_tokens,
            "chunk_tokens": spec.block_tokens * spec.chunk_blocks,
            "requests": {name: getattr(counts, name) for name in counts.__slots__},
        }

    # ---- inside -------------------------------------------------------------------------------

    def _check_boot(self, boot_id: str) -> None:
        if boot_id != self.boot_id:
            raise KVServerError(
                ErrorCode.STALE_BOOT, f"meant for boot {boot_id!r}, this is {self.boot_id!r}; register again"
            )


_AUDIT_CHUNKS = 20_000  # counting more would hold up the loop


def _chunk_count(keys: bytes) -> int:
    if not keys or len(keys) % KEY_BYTES:
        raise KVServerError(
            ErrorCode.BAD_KEYS, f"keys holds {len(keys)} bytes, not one or more whole keys of {KEY_BYTES}"
        )
    return len(keys) // KEY_BYTES


def _check_chunk(chunk_blocks: int, spec: RegisterWorker) -> None:
    if chunk_blocks != spec.chunk_blocks:
        raise KVServerError(
            ErrorCode.BAD_KEYS, f"keys are per {chunk_blocks} blocks, the workers registered {spec.chunk_blocks}"
        )


def _refuse_null_block(blocks: array[int]) -> None:
    if 0 in blocks:
        raise KVServerError(ErrorCode.BAD_BLOCKS, "block id 0 is the null block: it is never stored or loaded")


def _error(code: ErrorCode, message: str) -> Error:
    return Error(code=code.value, message=message)


def _failure(completion: Completion) -> Error:
    code = _FAILURES.get(completion.outcome, ErrorCode.CANCELLED)
    return _error(code, completion.what or "the worker went away while it was copied")
