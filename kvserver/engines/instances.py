"""Connected instances by id, workers by registration number, and the counters of instances that disconnected.

Refuses to know: chunks and copies.
"""

from __future__ import annotations

import enum
from collections import Counter

from kvserver._native import Device, Mapping, WordMapping
from kvserver.cache import check_agreement, counted
from kvserver.engines.counts import Counts
from kvserver.engines.instance import Instance, PrefillSpeeds
from kvserver.engines.lifeline import Lifeline
from kvserver.engines.worker import Worker
from kvserver.protocol import (
    DEPARTED_SECONDS,
    MOST_DEPARTED,
    UNREPORTED,
    ErrorCode,
    KVServerError,
    RegisterWorker,
)


class Disconnect(str, enum.Enum):
    """Reason why an instance is no longer registered."""

    UNREGISTERED = "unregistered"
    DIED = "died"  # a worker's connection ended, or the memory of one was lost
    REFUSED = "refused"  # the memory of its worker could not be used
    STOPPED = "stopped"  # this daemon stops


class Instances:
    """All instances by id, and all workers by registration number."""

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
                spec.instance_id,
                spec.incarnation,
                spec.model_name,
                spec.world_size,
                frozenset(spec.unreported) & UNREPORTED,
                speeds=self._speeds,
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
        """Counts of the worker's instance, also after it disconnected."""
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
        """The counts that totals() sums."""
        return [self._forgotten, *(each.counts for each in (*self.by_id.values(), *self.departed.values()))]

    @staticmethod
    def _check_incarnation(instance: Instance, incarnation: str) -> None:
        if instance.incarnation != incarnation:
            raise KVServerError(
                ErrorCode.DUPLICATE_INSTANCE,
                f"instance id {instance.instance_id!r} belongs to another live engine; give each engine its own "
                "engine_id (vLLM: kv_transfer_config, SGLang: kvserver.engine_id)",
            )
