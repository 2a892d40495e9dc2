"""Workers register and end: their memory is mapped before the first copy and unmapped after the last.

When a worker ends, for any reason, its requests are refused and its copies end at their next block. Then its memory is unmapped,
and only then its connection is closed.

Owns: registration, the close of a worker and its mappings. Refuses to know: what is copied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvserver._native import Outcome, PlaneTable, WordMapping
from kvserver.cache import Cache
from kvserver.config import Settings
from kvserver.copy import Completion, Devices, Tickets
from kvserver.engines.instances import Disconnect, Instances
from kvserver.engines.lifeline import Lifeline, Lifelines
from kvserver.engines.tickets import MapTicket, Respond, Ticket, UnmapTicket
from kvserver.engines.worker import Worker, WorkerGroup, log_fields
from kvserver.events import (
    Bus,
    InstanceDisconnected,
    InstanceRegistered,
    NamespaceFormed,
    WorkerDisconnected,
    WorkerRegistered,
)
from kvserver.protocol import (
    BLOCKS,
    MAX_CHUNK_TOKENS,
    REGISTERED,
    CudaVmmFd,
    Error,
    ErrorCode,
    KVServerError,
    Registered,
    RegisterWorker,
    SharedFd,
    Unregistered,
    UnregisterWorker,
    block_bytes,
    check_object_groups,
    chunk_tokens_for,
    has_tails,
    planes_of,
)
from kvserver.protocol.status import RefusedEngineStatus

log = logging.getLogger(__name__)

_MAX_REFUSALS = 256  # engines
_MAX_TEXT = 1000
_REFUSED_SECONDS = 30.0  # without another attempt: the engine has ended


class _Refusal(NamedTuple):
    error: KVServerError
    model_name: str
    engine: tuple[str, str]  # with its version
    at: float


@dataclass
class Workers:
    settings: Settings
    cache: Cache
    devices: Devices
    tickets: Tickets[Ticket]
    instances: Instances
    lifelines: Lifelines
    instance_ended: Callable[[str], None]  # its requests, by the instance's id
    bus: Bus
    clock: Callable[[], float] = time.monotonic
    mappings: int = 0  # open mappings of engine memory
    _waiting: dict[int, Respond] = field(default_factory=dict)  # by registration: answers UnregisterWorker
    _last_refusal: str = ""
    # The last refusal of each engine whose ranks are not all registered, by instance id and incarnation.
    _refusals: dict[tuple[str, str], _Refusal] = field(default_factory=dict)

    def register(self, request: RegisterWorker, respond: Respond) -> None:
        """Begin to map the worker's memory; the reply follows when that is done. KVServerError if the worker may not register."""
        lifeline = self.lifelines.unused(request.attachment)
        try:
            self.instances.check_registration(request)
            self._check_geometry(request, len(lifeline.fds))
            device = self.devices.device_for(request.memory)
        except KVServerError as error:
            self._refused(request, error)
            raise
        fds = lifeline.claim()
        memory = [self.devices.make_mapping(device, m, fds) for m in request.memory]
        is_first = request.instance_id not in self.instances.by_id
        worker = self.instances.add_worker(request, lifeline, device, memory, WordMapping(fds[-1], request.words * 8))
        worker.last_seen = self.clock()
        now_ns, (instance_id, model_name, _) = int(self.clock() * 1e9), worker.identity
        if is_first:
            self.bus.publish(
                InstanceRegistered(
                    now_ns,
                    instance_id,
                    model_name,
                    request.incarnation,
                    request.num_blocks,
                    request.has_computed,
                    BLOCKS not in request.unreported,
                )
            )
        self.bus.publish(WorkerRegistered(now_ns, *worker.identity))
        self.devices.add_worker(device)
        self.mappings += len(worker.mappings)
        worker.tickets.add(self.tickets.queue_map(device, MapTicket(worker, respond), worker.mappings))

    def _refused(self, spec: RegisterWorker, error: KVServerError) -> None:
        """Log a refusal, but not again at every attempt of an engine that keeps trying."""
        refusal = f"worker {spec.instance_id}/{spec.rank} refused: {error.message}"
        level = logging.DEBUG if refusal == self._last_refusal else logging.WARNING
        log.log(level, "%s", refusal, extra=log_fields(spec))
        self._last_refusal = refusal
        self._refusals.pop((spec.instance_id, spec.incarnation), None)
        self._refusals[spec.instance_id, spec.incarnation] = _Refusal(
            error, spec.model_name, spec.engine_names, self.clock()
        )
        if len(self._refusals) > _MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]

    def registration_state(self, instance_id: str, incarnation: str) -> tuple[str, str]:
        """(REGISTERED, or the error code why an engine has no cache; the same for people). Empty if no instance is named."""
        if not instance_id:
            return "", ""
        refusal = self._refusals.get((instance_id, incarnation))
        error = refusal.error if refusal is not None else None
        try:
            instance = self.instances.instance(instance_id, incarnation)
            if instance.namespace is not None:
                return REGISTERED, ""
            error = error or KVServerError(ErrorCode.NOT_READY, instance.ranks_text)
        except KVServerError as unknown:
            error = error or unknown
        return error.code.value, error.message[:_MAX_TEXT]

    def refused_engines(self) -> list[RefusedEngineStatus]:
        """Engines that run without cache because they were refused. They try again each second, until they end."""
        now = self.clock()
        return [
            RefusedEngineStatus(
                instance_id=instance_id,
                model_name=refusal.model_name,
                engine=refusal.engine[0],
                engine_version=refusal.engine[1],
                code=refusal.error.code.value,
                message=refusal.error.message[:_MAX_TEXT],
                age_seconds=round(now - refusal.at, 3),
            )
            for (instance_id, _), refusal in self._refusals.items()
            if now - refusal.at < _REFUSED_SECONDS
        ]

    def _check_geometry(self, request: RegisterWorker, fds: int) -> None:
        named = sorted(m.index for m in request.memory if isinstance(m, SharedFd | CudaVmmFd))
        if named != list(range(fds - 1)):
            raise KVServerError(
                ErrorCode.BAD_MEMORY,
                f"{fds} descriptors arrived with Attach: memory must name each of 0 to {fds - 2} once, "
                "the last one is the state word page",
            )
        expected = chunk_tokens_for(self.settings.chunk_tokens, groups := request.object_groups)
        if request.chunk_tokens == (smallest := chunk_tokens_for(1, groups)):
            expected = (
                smallest  # an engine may not know where in a prompt its keys begin, so it could align no larger ones
            )
        if request.chunk_tokens != expected or request.block_tokens != groups[0].block_tokens:
            raise KVServerError(
                ErrorCode.BAD_PLANES,
                f"{request.chunk_blocks} blocks of {request.block_tokens} tokens are no chunk: with {self.settings.chunk_tokens} "
                f"chunk tokens and blocks of {[group.block_tokens for group in groups]} it has {expected} tokens",
            )
        if expected > MAX_CHUNK_TOKENS:
            raise KVServerError(ErrorCode.BAD_PLANES, f"a chunk of {expected} tokens, at most {MAX_CHUNK_TOKENS}")
        check_object_groups(groups, request.planes)
        if request.group_blocks and len(request.group_blocks) != len(groups):
            raise KVServerError(
                ErrorCode.BAD_PLANES, f"blocks of {len(request.group_blocks)} object groups, there are {len(groups)}"
            )
        if request.tails and not has_tails(groups, expected):
            raise KVServerError(
                ErrorCode.BAD_PLANES, "single blocks are stored of full attention alone, in chunks of several"
            )
        for number, plane in enumerate(request.planes):
            if plane.memory >= len(request.memory):
                raise KVServerError(
                    ErrorCode.BAD_PLANES, f"plane {number} names memory {plane.memory} of {len(request.memory)}"
                )
        slot_bytes = sum(
            group.object_blocks(expected) * block_bytes(planes_of(request.planes, group.members)) for group in groups
        )
        pool = self.cache.pool
        if pool.pages_for(slot_bytes) > pool.pages:
            raise KVServerError(
                ErrorCode.TOO_LARGE,
                f"one chunk of this model needs {slot_bytes} bytes, L1 has {pool.pages * pool.page_bytes}; raise --l1-size or lower "
                "--chunk-tokens",
            )

    def mapped(self, ticket: MapTicket, completion: Completion) -> None:
        worker = ticket.worker
        if worker.closing:
            message = "the worker's connection ended while its memory was mapped"
            ticket.respond(Error(code=ErrorCode.CANCELLED.value, message=message))
            return
        try:
            if not completion.done:
                lost = completion.outcome == Outcome.DEVICE_LOST
                raise KVServerError(ErrorCode.DEVICE_LOST if lost else ErrorCode.BAD_MEMORY, completion.what)
            for group in worker.groups:
                group.table = _plane_table(worker, group)
            worker.mapped = True
        except KVServerError as error:
            self._refused(worker.spec, error)
            ticket.respond(Error(code=error.code.value, message=error.message))
            self.close_worker(worker, Disconnect.REFUSED)
            return
        self.devices.mark_found(worker.device)
        now_ns = int(self.clock() * 1e9)
        instance = self.instances.instance_of(worker)
        instance.refresh_namespace()
        if instance.namespace is not None:
            self._refusals.pop((instance.instance_id, instance.incarnation), None)
            ranks = tuple(instance.workers[rank].spec for rank in range(instance.world_size))
            self.bus.publish(
                NamespaceFormed(now_ns, instance.instance_id, instance.model_name, instance.namespace, ranks)
            )
        if (described := instance.described(now_ns)) is not None:
            self.bus.publish(described)
        log.info(
            "worker %s/%d of %d registered: %d planes, %d blocks of %d bytes",
            worker.spec.instance_id, worker.spec.rank, worker.spec.world_size,
            len(worker.spec.planes), worker.spec.num_blocks, block_bytes(worker.spec.planes),
            extra=log_fields(worker.spec),
        )  # fmt: skip
        namespace = instance.namespace.hex() if instance.namespace is not None else ""
        ticket.respond(Registered(registration=worker.registration, namespace=namespace))

    def unregister(self, request: UnregisterWorker, respond: Respond) -> None:
        worker = self.instances.worker(request.registration)
        self._waiting[worker.registration] = respond
        self.close_worker(worker, Disconnect.UNREGISTERED)

    def close_worker(self, worker: Worker, reason: Disconnect) -> None:
        """End a worker: no new requests, its copies end at their next block, then its memory is unmapped."""
        if worker.closing:
            return
        worker.closing = True
        now_ns = int(self.clock() * 1e9)
        ended = self.instances.remove_worker(worker, self.clock(), reason)
        self.bus.publish(WorkerDisconnected(now_ns, *worker.identity))
        if ended is not None:
            self.instance_ended(ended.instance_id)
            self.cache.end_leases_of(ended.instance_id)
            died = reason is Disconnect.DIED
            self.bus.publish(InstanceDisconnected(now_ns, ended.instance_id, ended.model_name, died))
            log.info(
                "instance %s disconnected: its last worker ended", ended.instance_id,
                extra={"instance_id": ended.instance_id, "model_name": ended.model_name},
            )  # fmt: skip
        for number in worker.tickets:
            self.tickets.cancel_copy(number)
        self.unmap_if_idle(worker)

    def close_all(self, reason: Disconnect) -> None:
        for worker in list(self.instances.by_registration.values()):
            self.close_worker(worker, reason)

    def tick(self) -> None:
        """Close silent connections, and forget instances that departed long ago."""
        self.lifelines.close_silent()
        self.instances.forget_departed(self.clock())

    def audit(self) -> None:
        """Assert that the mappings are those of the workers. REQUIRES: no ticket is open."""
        expected = sum(len(worker.mappings) for worker in self.instances.by_registration.values())
        assert self.mappings == expected, f"{self.mappings} mappings are open, workers have {expected}"

    def lifeline_ended(self, lifeline: Lifeline) -> None:
        """The worker's process died, or closed its connection."""
        worker = self.instances.by_registration.get(lifeline.registration or 0)
        if worker is not None:
            log.info(
                "worker %s/%d: connection ended",
                worker.spec.instance_id,
                worker.spec.rank,
                extra=log_fields(worker.spec),
            )
            self.close_worker(worker, Disconnect.DIED)

    def unmap_if_idle(self, worker: Worker) -> None:
        if worker.closing and not worker.tickets and not worker.waiting and not worker.unmapping:
            worker.unmapping = True
            worker.mapped = False
            for group in worker.groups:
                group.table = None
            self.tickets.queue_unmap(worker.device, UnmapTicket(worker), worker.mappings)

    def unmapped(self, ticket: UnmapTicket, completion: Completion) -> None:
        worker = ticket.worker
        if not completion.done:
            log.warning(
                "worker %s/%d: its memory is no longer used, but stays allocated until this daemon ends: %s",
                worker.spec.instance_id, worker.spec.rank, completion.what, extra=log_fields(worker.spec),
            )  # fmt: skip
        self.mappings -= len(worker.mappings)
        self.devices.remove_worker(worker.device)
        self.lifelines.detach(worker.lifeline)
        respond = self._waiting.pop(worker.registration, None)
        if respond is not None:
            respond(Unregistered())


def _plane_table(worker: Worker, group: WorkerGroup) -> PlaneTable:
    """Table of the group's planes, each with the number of its member: [position][member]. Raises KVServerError(BAD_PLANES)."""
    members = group.spec.members
    rows = [
        (plane.memory, plane.offset, plane.stride_bytes, plane.run_bytes, members.index(plane.group))
        for plane in planes_of(worker.spec.planes, members)
    ]
    blocks = worker.spec.group_blocks[group.number] if worker.spec.group_blocks else worker.spec.num_blocks
    try:
        return PlaneTable(worker.memory, rows, blocks)
    except ValueError as error:
        raise KVServerError(ErrorCode.BAD_PLANES, str(error)) from None
