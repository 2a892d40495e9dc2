"""What the lanes of a tier do in its store: one function for each request.

Owns: the order of steps, and which outcome each answer of the store is. Runs in lanes, and knows nothing of the loop's state; what
it finds out goes back with the result.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvserver._native import HostRegion, Record, RecordMatch
from kvserver.l2.base import ObjectMemory, ObjectName, TierOutcome
from kvserver.l2.remote.generations import Generations
from kvserver.l2.remote.lanes import Job, Lane
from kvserver.l2.remote.names import Names
from kvserver.l2.remote.search import chain_length
from kvserver.l2.remote.store import StoreError, StoreFull, StoreTimeout, WrongSize

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    outcome: TierOutcome
    bytes: int = 0
    what: str = ""
    answered: bool = False  # the store answered, whatever it was
    failed: bool = False  # it did not, or was not there
    exists: tuple[tuple[ObjectName, bool], ...] = ()  # what was found out on the way


TierJob: TypeAlias = Job[Result]
CHANGED = "cleared by another daemon"


def answer(
    outcome: TierOutcome, size: int = 0, what: str = "", exists: Sequence[tuple[ObjectName, bool]] = ()
) -> Result:
    return Result(outcome, size, what, answered=True, exists=tuple(exists))


def overdue(blames_store: bool) -> Result:
    what = "the store did not answer" if blames_store else "it waited in the queue"
    return Result(TierOutcome.TIMEOUT, what=what, failed=blames_store)


def failure(error: Exception) -> Result:
    if isinstance(error, StoreFull):
        return answer(TierOutcome.FULL, what=str(error))
    if isinstance(error, StoreTimeout):
        return Result(TierOutcome.TIMEOUT, what=str(error), failed=True)
    if isinstance(error, StoreError):
        return Result(TierOutcome.UNAVAILABLE, what=str(error), failed=True)
    log.error("a request to a tier failed", exc_info=error)
    return Result(TierOutcome.UNAVAILABLE, what=f"{type(error).__name__}: {error}")


class StoreWork:
    def __init__(self, names: Names, generations: Generations, region: HostRegion, page_bytes: int) -> None:
        self._names, self._generations = names, generations
        self._region, self._page_bytes = region, page_bytes

    def put(self, job: TierJob, lane: Lane, name: ObjectName, memory: ObjectMemory, absent: bool) -> Result:
        """`absent`: the store is known not to have it."""
        client = lane.client
        generation = self._generations.of(client, name.namespace)
        where = self._names.of(name, generation)
        record = self._record(name, memory, generation)
        if record.packed_bytes > client.most_value_bytes:
            return Result(TierOutcome.FULL, what=f"the store takes values of {client.most_value_bytes} bytes at most")
        if not absent and client.exist([where])[0]:
            return answer(TierOutcome.DONE, exists=[(name, True)])
        packed = lane.buffer.view(record.packed_bytes)
        with lane.inside(job):
            record.pack_into(packed)
        client.put(where, packed)
        if self._generations.of(client, name.namespace) != generation:
            return answer(TierOutcome.CANCELLED, what=CHANGED)
        return answer(TierOutcome.DONE, record.bytes, exists=[(name, True)])

    def get(self, job: TierJob, lane: Lane, name: ObjectName, memory: ObjectMemory) -> Result:
        client = lane.client
        generation = self._generations.of(client, name.namespace)
        where = self._names.of(name, generation)
        record = self._record(name, memory, generation)
        try:
            packed = client.get(where, lane.buffer.view(record.packed_bytes))
        except WrongSize:
            match = RecordMatch.CORRUPT
        else:
            if packed is None:
                return answer(TierOutcome.MISSING, exists=[(name, False)])
            with lane.inside(job):
                match = record.unpack(packed)
        if match is RecordMatch.CORRUPT:
            client.delete([where])
            return answer(TierOutcome.CORRUPT, what="its checks failed", exists=[(name, False)])
        if match is RecordMatch.OTHER:
            return answer(TierOutcome.MISSING, what="it is another one", exists=[(name, False)])
        if self._generations.of(client, name.namespace) != generation:
            return answer(TierOutcome.MISSING, what=CHANGED)
        return answer(TierOutcome.DONE, record.bytes, exists=[(name, True)])

    def probe(self, job: TierJob, lane: Lane, names: Sequence[ObjectName], chain: bool) -> Result:
        """REQUIRES: all names are of one namespace. Of a chain what is behind the first absent object counts as absent, too."""
        client = lane.client
        generation = self._generations.of(client, names[0].namespace)

        def exist(places: Sequence[int]) -> list[bool]:
            lane.check(job)
            return client.exist([self._names.of(names[place], generation) for place in places])

        if chain:
            length = chain_length(len(names), client.most_questions, exist)
            found = [(name, place < length) for place, name in enumerate(names)]
        else:
            found = []
            for first in range(0, len(names), client.most_questions):
                places = range(first, min(first + client.most_questions, len(names)))
                found += [(names[place], there) for place, there in zip(places, exist(places), strict=True)]
        return answer(TierOutcome.DONE, exists=found)

    def delete(self, lane: Lane, names: Sequence[ObjectName]) -> Result:
        for where in self._named(lane, names):
            lane.client.delete(where)
        return answer(TierOutcome.DONE, exists=[(name, False) for name in names])

    def refresh(self, lane: Lane, names: Sequence[ObjectName]) -> Result:
        for where in self._named(lane, names):
            lane.client.refresh(where)
        return answer(TierOutcome.DONE)

    def clear(self, lane: Lane, scope: bytes) -> Result:
        self._generations.write(lane.client, scope)
        return answer(TierOutcome.DONE)

    def ping(self, lane: Lane) -> Result:
        self._generations.ping(lane.client)
        return answer(TierOutcome.DONE)

    def _named(self, lane: Lane, names: Sequence[ObjectName]) -> list[list[str]]:
        """Where the objects are, in batches, their order kept inside a namespace."""
        found: dict[bytes, list[ObjectName]] = defaultdict(list)
        for name in names:
            found[name.namespace].append(name)
        batches: list[list[str]] = []
        for namespace, members in found.items():
            generation = self._generations.of(lane.client, namespace)
            where = [self._names.of(name, generation) for name in members]
            step = lane.client.most_questions
            batches += [where[first : first + step] for first in range(0, len(where), step)]
        return batches

    def _record(self, name: ObjectName, memory: ObjectMemory, generation: int) -> Record:
        return Record(
            self._region, self._page_bytes, name.namespace, name.group, name.key, memory.coverage, generation,
            list(memory.slots), list(memory.slot_bytes),
        )  # fmt: skip
