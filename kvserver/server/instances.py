"""Who is connected: engine instances and the workers (ranks) that own their memory.

Owns: instances, workers, registration numbers and the counters kept per instance. Refuses to know:
chunks and copies.

An instance exists while one of its workers does. It has a namespace only while all ranks are registered and
agree. A worker that is closing takes no new requests; its memory is unmapped when its last ticket ends.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import msgspec

from kvserver._native import Device, Mapping, PlaneTable, WordMapping
from kvserver.cache import (
    GroupObjects,
    Groups,
    MissReason,
    check_agreement,
    chunks_of,
    counted,
    fingerprint,
    private_reason,
    tails_of,
    with_variant,
)
from kvserver.events import InstanceDescribed
from kvserver.protocol import (
    DEPARTED_SECONDS,
    MOST_DEPARTED,
    DescribeScheduler,
    Durability,
    ErrorCode,
    KVServerError,
    ObjectGroup,
    RegisterWorker,
    block_bytes,
    planes_of,
)
from kvserver.protocol.status import RequestCounts
from kvserver.server.coverage import Coverage, coverages_of
from kvserver.server.engine_stats import EngineStats
from kvserver.server.lifeline import Lifeline
from kvserver.server.report_sync import ReportSync
from kvserver.telemetry import Benefit, LoadWaits

_MAX_VARIANTS = 4096  # per instance, remembered digests
_MOST_SPEEDS = 256  # namespaces


class Counts(RequestCounts):
    missed_tokens: Counter[MissReason] = msgspec.field(default_factory=Counter)
    benefit: Benefit = msgspec.field(default_factory=Benefit)

    def add(self, other: Counts) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(eq=False)
class WorkerGroup:
    """One object group of a rank, of chunks or of single blocks."""

    layout: Groups  # that it is a part of
    number: int  # in the layout
    spec: ObjectGroup
    blocks: int  # positions of an object
    slot_bytes: int
    slot: int  # the number of the slot with this rank's bytes in each chunk
    turn: int = 0  # this rank copies each `ranks`-th object of a store
    ranks: int = 1  # that take turns
    table: PlaneTable | None = None  # None until the worker's memory was mapped

    @property
    def objects(self) -> GroupObjects:
        return self.layout.objects[self.number]

    def namespace(self, of_chunks: bytes) -> bytes:
        return tails_of(of_chunks) if self.layout.tails else of_chunks

    def chunks_namespace(self, namespace: bytes) -> bytes:
        """As namespace() was given it: events of single blocks have it, too."""
        return chunks_of(namespace) if self.layout.tails else namespace


def log_fields(rank: RegisterWorker) -> dict[str, str | int]:
    """Fields of log records about a rank."""
    return {"instance_id": rank.instance_id, "model_name": rank.model_name, "rank": rank.rank}


@dataclass(eq=False)
class Worker:
    """One rank."""

    registration: int
    spec: RegisterWorker
    lifeline: Lifeline
    device: Device  # that copies for the worker
    memory: list[Mapping]
    words: WordMapping
    mapped: bool = False  # its memory is mapped, and each group has a table
    tickets: set[int] = field(default_factory=set)
    waiting: int = 0  # stores that have no ticket yet, for their plans are not complete
    closing: bool = False
    unmapping: bool = False
    last_seen: float = 0.0

    def __post_init__(self) -> None:
        spec = self.spec
        self.layout = Groups(spec.object_groups, spec.world_size, spec.chunk_tokens)
        self.groups = self._groups(self.layout, spec.chunk_tokens)  # as messages number them
        if spec.tails:
            tails = Groups(spec.object_groups, spec.world_size, spec.block_tokens, tails=True)
            self.groups += self._groups(tails, spec.block_tokens)
        self.identity = spec.instance_id, spec.model_name, spec.rank  # as events about a rank begin

    @property
    def chunk_groups(self) -> list[WorkerGroup]:
        """Those of chunks, whose objects go to L2 too: single blocks stay in L1."""
        return self.groups[: len(self.spec.object_groups)]

    def _groups(self, layout: Groups, chunk_tokens: int) -> list[WorkerGroup]:
        return [
            self._group(layout, number, group, group.object_blocks(chunk_tokens))
            for number, group in enumerate(self.spec.object_groups)
        ]

    def _group(self, layout: Groups, number: int, group: ObjectGroup, blocks: int) -> WorkerGroup:
        spec, first = self.spec, layout.first[number]
        slot_bytes = blocks * block_bytes(planes_of(spec.planes, group.members))
        if group.replicated:
            return WorkerGroup(layout, number, group, blocks, slot_bytes, first, spec.rank, spec.world_size)
        return WorkerGroup(layout, number, group, blocks, slot_bytes, first + spec.rank)

    @property
    def mappings(self) -> list[Mapping]:
        return [*self.memory, self.words]


class PrefillSpeeds:
    """The last speed of the engines of each namespace, for those that have just started."""

    def __init__(self) -> None:
        self._speeds: OrderedDict[bytes, float] = OrderedDict()  # that of the longest ago first

    def note(self, namespace: bytes, tokens_per_second: float) -> None:
        self._speeds[namespace] = tokens_per_second
        self._speeds.move_to_end(namespace)
        if len(self._speeds) > _MOST_SPEEDS:
            self._speeds.popitem(last=False)

    def of(self, namespace: bytes) -> float:
        """Tokens a second; 0 if it is not known."""
        return self._speeds.get(namespace, 0.0)


@dataclass
class Instance:
    instance_id: str
    incarnation: str
    model_name: str
    world_size: int
    workers: dict[int, Worker] = field(default_factory=dict)
    namespace: bytes | None = None
    last_namespace: bytes | None = None  # also after a rank left
    coverages: list[Coverage | None] = field(default_factory=list)  # by object group, while there is a namespace
    counts: Counts = field(default_factory=Counts)
    reports: ReportSync = field(default_factory=ReportSync)
    speeds: PrefillSpeeds = field(default_factory=lambda: PrefillSpeeds())  # that instances share
    prefill_speed: float = 0.0  # tokens a second, as the engine reported last
    description: DescribeScheduler | None = None
    engine_stats: EngineStats = field(default_factory=EngineStats)
    died: bool = False  # one of its workers died
    departed_at: float = 0.0  # when its last worker ended
    load_waits: LoadWaits = field(default_factory=LoadWaits)
    _variants: dict[str, bytes] = field(default_factory=dict)
    _published: tuple[DescribeScheduler, bytes] | None = None

    def described(self, now_ns: int) -> InstanceDescribed | None:
        """The description to publish. None if the instance has not described itself, or that was published already."""
        prefix = self.namespace_of(self.description.variant) if self.description is not None else None
        if self.description is None or prefix is None or self._published == (self.description, prefix):
            return None
        self._published = (self.description, prefix)
        spec = self.any_worker().spec
        shape = spec.chunk_blocks, spec.block_tokens, spec.object_groups
        return InstanceDescribed(now_ns, self.description, prefix, *shape)

    def namespace_of(self, variant: str) -> bytes | None:
        """The namespace of one weights epoch and LoRA; None until all ranks are registered."""
        if self.namespace is None or not variant:
            return self.namespace
        digest = self._variants.get(variant)
        if digest is None:
            if len(self._variants) >= _MAX_VARIANTS:
                self._variants.clear()
            digest = self._variants[variant] = with_variant(self.namespace, variant)
        return digest

    @property
    def private(self) -> str:
        """Why the instance shares KV with no other; empty if it may share."""
        since = self.description.private if self.description is not None else ""
        return private_reason(worker.spec for worker in self.workers.values()) or since

    @property
    def ranks_text(self) -> str:
        """How many of its ranks can copy: nothing is found until all can."""
        ready = sum(worker.mapped for worker in self.workers.values())
        return f"{ready} of {self.world_size} ranks of {self.instance_id!r} are registered"

    @property
    def expected_speed(self) -> float:
        """Prompt tokens a second: as the engine reported last, or another start of one with its namespace; 0: not known."""
        return self.prefill_speed or (self.speeds.of(self.namespace) if self.namespace is not None else 0.0)

    def reported_speed(self, tokens_per_second: float) -> None:
        self.prefill_speed = tokens_per_second
        if self.namespace is not None:
            self.speeds.note(self.namespace, tokens_per_second)

    def any_worker(self) -> Worker:
        return next(iter(self.workers.values()))

    def refresh_namespace(self) -> None:
        """Recompute after a worker was mapped or removed."""
        ready = len(self.workers) == self.world_size and all(worker.mapped for worker in self.workers.values())
        self.namespace, self.coverages = None, []
        self._variants.clear()
        if ready:
            ranks = [self.workers[rank] for rank in range(self.world_size)]
            self.namespace = self.last_namespace = fingerprint([rank.spec for rank in ranks])
            spec, sizes = (
                ranks[0].spec,
                zip(*([group.slot_bytes for group in rank.chunk_groups] for rank in ranks), strict=True),
            )
            self.coverages = coverages_of(ranks[0].layout, spec.object_groups, spec.chunk_tokens, list(sizes))

    def durability(self, of_variant: Durability) -> Durability:
        """Of KV of one variant: the least of what the engine states of the variant and of the registration."""
        if not self.coverages or self.private:
            return Durability.PROCESS
        return min(of_variant, Durability.MACHINE) if self.machine_only else of_variant

    @property
    def machine_only(self) -> str:
        """Why its KV stays on this machine; empty if it need not."""
        return next(filter(None, (worker.spec.machine_only for worker in self.workers.values())), "")


class Disconnect(str, enum.Enum):
    """Why an instance is no longer registered."""

    UNREGISTERED = "unregistered"
    DIED = "died"  # a worker's connection ended, or the memory of one was lost
    REFUSED = "refused"  # the memory of its worker could not be used
    STOPPED = "stopped"  # this daemon stops


class Instances:
    """All of them, by instance id, and all workers by registration number."""

    def __init__(self) -> None:
        self.by_id: dict[str, Instance] = {}
        self.by_registration: dict[int, Worker] = {}
        self.departed: dict[tuple[str, str], Instance] = {}  # by id and model, the oldest first
        self.connected = 0  # instances whose first worker registered
        self.disconnected: Counter[Disconnect] = Counter()
        self._forgotten = Counts()  # sums over the instances forgotten before
        self._speeds = PrefillSpeeds()
        self._next = 0

    def check_registration(self, spec: RegisterWorker) -> None:
        """KVServerError if this worker may not register: its id or rank is in use, or its ranks disagree."""
        if spec.rank >= spec.world_size:
            raise KVServerError(ErrorCode.UNKNOWN_RANK, f"rank {spec.rank} of a world of {spec.world_size}")
        counted(spec)
        instance = self.by_id.get(spec.instance_id)
        if instance is None:
            return
        self._check_incarnation(instance, spec.incarnation)
        if spec.rank in instance.workers:
            raise KVServerError(
                ErrorCode.DUPLICATE_INSTANCE, f"rank {spec.rank} of instance {spec.instance_id!r} is registered already"
            )
        check_agreement(instance.any_worker().spec, spec)

    def add_worker(
        self, spec: RegisterWorker, lifeline: Lifeline, device: Device, memory: list[Mapping], words: WordMapping
    ) -> Worker:
        """REQUIRES: check_registration(spec) passed."""
        instance = self.by_id.get(spec.instance_id)
        if instance is None:
            instance = Instance(
                spec.instance_id, spec.incarnation, spec.model_name, spec.world_size, speeds=self._speeds
            )
            before = self.departed.pop((spec.instance_id, spec.model_name), None)
            if before is not None:
                instance.counts, instance.engine_stats = before.counts, before.engine_stats
            self.by_id[spec.instance_id] = instance
            self.connected += 1
        self._next += 1
        worker = Worker(self._next, spec, lifeline, device, memory, words)
        instance.workers[spec.rank] = worker
        self.by_registration[self._next] = worker
        lifeline.registration = self._next
        return worker

    def remove_worker(
        self, worker: Worker, now: float, reason: Disconnect = Disconnect.UNREGISTERED
    ) -> Instance | None:
        """Remove the worker; returns its instance if this was the last one."""
        del self.by_registration[worker.registration]
        instance = self.by_id[worker.spec.instance_id]
        del instance.workers[worker.spec.rank]
        instance.refresh_namespace()
        instance.died |= reason is Disconnect.DIED
        if instance.workers:
            return None
        self.disconnected[Disconnect.DIED if instance.died else reason] += 1
        del self.by_id[instance.instance_id]
        instance.departed_at = now
        self.departed[instance.instance_id, instance.model_name] = instance
        if len(self.departed) > MOST_DEPARTED:
            self._forget(next(iter(self.departed)))
        return instance

    def forget_departed(self, now: float) -> None:
        for name, departed in list(self.departed.items()):
            if now - departed.departed_at > DEPARTED_SECONDS:
                self._forget(name)

    def _forget(self, name: tuple[str, str]) -> None:
        self._forgotten.add(self.departed.pop(name).counts)

    def counts_of(self, spec: RegisterWorker) -> Counts:
        """Of the worker's instance, also after it disconnected."""
        instance = self.by_id.get(spec.instance_id)
        if instance is not None:
            return instance.counts
        departed = self.departed.get((spec.instance_id, spec.model_name))
        return departed.counts if departed is not None else self._forgotten

    def instance(self, instance_id: str, incarnation: str) -> Instance:
        """KVServerError(UNKNOWN_INSTANCE or DUPLICATE_INSTANCE) if it is not registered."""
        instance = self.by_id.get(instance_id)
        if instance is None:
            raise KVServerError(ErrorCode.UNKNOWN_INSTANCE, f"no worker of instance {instance_id!r} is registered")
        self._check_incarnation(instance, incarnation)
        return instance

    def instance_of(self, worker: Worker) -> Instance:
        return self.by_id[worker.spec.instance_id]

    def worker(self, registration: int) -> Worker:
        worker = self.by_registration.get(registration)
        if worker is None or not worker.mapped:
            raise KVServerError(
                ErrorCode.STALE_REGISTRATION, f"registration {registration} is not, or no longer, valid"
            )
        return worker

    def totals(self) -> Counts:
        sums = Counts()
        for counts in self.all_counts():
            sums.add(counts)
        return sums

    def all_counts(self) -> list[Counts]:
        """Those that totals() sums."""
        return [self._forgotten, *(each.counts for each in (*self.by_id.values(), *self.departed.values()))]

    @staticmethod
    def _check_incarnation(instance: Instance, incarnation: str) -> None:
        if instance.incarnation != incarnation:
            raise KVServerError(
                ErrorCode.DUPLICATE_INSTANCE,
                f"instance id {instance.instance_id!r} belongs to another live engine; give each engine its own "
                "kv_transfer_config engine_id",
            )
