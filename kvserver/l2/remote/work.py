"""Work of a tier's lanes in its store: one function for each request.

It runs in lanes, and knows nothing of the loop's state; what it finds out goes back with the result.

Owns: the order of steps, and which outcome each answer of the store is.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvserver._native import RECORD_HEADER_BYTES, HostRegion, Record, RecordMatch
from kvserver.l2.base import ObjectMemory, ObjectName, TierOutcome
from kvserver.l2.remote.generations import Generations
from kvserver.l2.remote.lanes import Job, JobEnded, Lane
from kvserver.l2.remote.names import Names
from kvserver.l2.remote.search import chain_length
from kvserver.l2.remote.store import ReadPieces, StoreError, StoreFull, StoreRefused, StoreTimeout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    outcome: TierOutcome
    bytes: int = 0
    what: str = ""
    answered: bool = False  # the store answered, whatever it was
    failed: bool = False  # it did not do what was requested, or was not there
    refused: str = ""  # of a ping: why the store takes no writes
    exists: tuple[tuple[ObjectName, bool], ...] = ()  # what was found out on the way


@dataclass(frozen=True, slots=True)
class StoreObject:
    """Object of a put or get."""

    name: ObjectName
    memory: ObjectMemory
    absent: bool = False  # the store is known not to have it
    replaces: bool = False  # what the store has under the name is of no use


TierJob: TypeAlias = Job[Result]
CHANGED = "cleared by another daemon"
_PING = b"kvserver"


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
        answered = isinstance(error, StoreRefused)
        return Result(TierOutcome.UNAVAILABLE, what=str(error), answered=answered, failed=True)
    log.error("a request to a tier failed", exc_info=error)
    return Result(TierOutcome.UNAVAILABLE, what=f"{type(error).__name__}: {error}")


def _read(item: StoreObject, match: RecordMatch | StoreError | None, changed: bool) -> Result:
    """`match`: of the record that was found; None: none was."""
    absent = [(item.name, False)]
    if isinstance(match, StoreError):
        return failure(match)
    if match is None:
        return answer(TierOutcome.MISSING, exists=absent)
    if match is RecordMatch.CORRUPT:
        return answer(TierOutcome.CORRUPT, what="its checks failed", exists=absent)
    if match is RecordMatch.OTHER:
        return answer(TierOutcome.MISSING, what="it is another one", exists=absent)
    if changed:
        return answer(TierOutcome.MISSING, what=CHANGED)
    return answer(TierOutcome.DONE, item.memory.bytes, exists=[(item.name, True)])


def _read_pieces(job: TierJob, lane: Lane, record: Record, read: ReadPieces) -> RecordMatch | StoreError | None:
    """Write a record's pieces to L1 as they arrive, and match it then. JobEnded: so has the job, and nothing is written after."""
    lane.check(job)
    header = bytearray(RECORD_HEADER_BYTES)

    def write(at: int, piece: memoryview) -> None:
        with lane.inside(job):
            record.unpack_piece(header, at, piece)

    found = read(write)
    if found is None or isinstance(found, StoreError):
        return found
    if not found:
        return RecordMatch.CORRUPT
    with lane.inside(job):
        match = record.match_written(header)
    return match


class StoreWork:
    """Requests to one store. `read_only`: nothing is written, deleted or created."""

    def __init__(
        self, names: Names, generations: Generations, region: HostRegion, page_bytes: int, read_only: bool
    ) -> None:
        self._names, self._generations, self._read_only = names, generations, read_only
        self._region, self._page_bytes = region, page_bytes

    def put(self, jobs: Sequence[TierJob], lane: Lane) -> dict[TierJob, Result]:
        """REQUIRES: each is of a StoreObject, all of one namespace."""
        client = lane.client_for(sum(job.bytes for job in jobs))
        namespace = jobs[0].item.name.namespace
        generation = self._generations.of(client, namespace)
        results: dict[TierJob, Result] = {}
        records = {job: self._record(job.item, generation) for job in jobs}
        for job in jobs:
            if records[job].packed_bytes > client.most_value_bytes:
                what = f"the store takes values of {client.most_value_bytes} bytes at most"
                results[job] = Result(TierOutcome.FULL, what=what)
        unsure = [job for job in jobs if job not in results and not job.item.absent and not job.item.replaces]
        if unsure:
            for job, there in zip(unsure, client.exist(self._where(unsure, generation)), strict=True):
                if isinstance(there, StoreError):
                    results[job] = failure(there)
                elif there:
                    results[job] = answer(TierOutcome.DONE, exists=[(job.item.name, True)])
        packed: dict[TierJob, memoryview] = {}
        absent = [job for job in jobs if job not in results]
        views = lane.buffer.views([records[job].packed_bytes for job in absent])
        for job, view in zip(absent, views, strict=True):
            with contextlib.suppress(JobEnded):
                with lane.inside(job):
                    records[job].pack_into(view)
                packed[job] = view
        if packed:
            errors = client.put(self._where(packed, generation), list(packed.values()))
            changed = self._generations.of(client, namespace) != generation
            for job, error in zip(packed, errors, strict=True):
                if error is not None:
                    results[job] = failure(error)
                elif changed:
                    results[job] = answer(TierOutcome.CANCELLED, what=CHANGED)
                else:
                    results[job] = answer(TierOutcome.DONE, records[job].bytes, exists=[(job.item.name, True)])
        return results

    def get(self, jobs: Sequence[TierJob], lane: Lane) -> dict[TierJob, Result]:
        """REQUIRES: each is of a StoreObject, all of one namespace."""
        client = lane.client_for(sum(job.bytes for job in jobs))
        namespace = jobs[0].item.name.namespace
        generation = self._generations.of_reader(client, namespace)
        if generation is None:
            return {job: _read(job.item, None, False) for job in jobs}
        records = [self._record(job.item, generation) for job in jobs]
        where = self._where(jobs, generation)
        found = client.get(where, lane.buffer.views([record.packed_bytes for record in records]))
        matches: dict[TierJob, RecordMatch | StoreError | None] = {}
        for job, record, packed in zip(jobs, records, found, strict=True):
            with contextlib.suppress(JobEnded):
                if packed is None or isinstance(packed, StoreError):
                    matches[job] = packed
                elif isinstance(packed, memoryview):
                    with lane.inside(job):
                        match = record.unpack(packed)
                    matches[job] = match
                else:
                    matches[job] = _read_pieces(job, lane, record, packed)
        useless = (RecordMatch.CORRUPT, RecordMatch.OTHER)
        if wrong := [place for job, place in zip(jobs, where, strict=True) if matches.get(job) in useless]:
            self._remove(lane, wrong)  # a store may keep it, else, when the right one is put
        changed = self._generations.of_reader(client, namespace) != generation
        return {job: _read(job.item, match, changed) for job, match in matches.items()}

    def probe(self, job: TierJob, lane: Lane, names: Sequence[ObjectName], chain: bool) -> Result:
        """REQUIRES: all names are of one namespace. Of a chain what is behind the first absent object counts as absent, too."""
        client = lane.client
        generation = self._generations.of_reader(client, names[0].namespace)

        if generation is None:
            return answer(TierOutcome.DONE, exists=[(name, False) for name in names])
        unknown: dict[ObjectName, StoreError] = {}

        def exist(places: Sequence[int]) -> list[bool]:
            lane.check(job)
            answers = client.exist([self._names.of(names[place], generation) for place in places])
            unknown.update(
                {names[at]: each for at, each in zip(places, answers, strict=True) if isinstance(each, StoreError)}
            )
            return [each is True for each in answers]

        if chain:
            length = chain_length(len(names), client.most_questions, exist, client.asks_apart)
            found = [(name, place < length) for place, name in enumerate(names)]
            if length < len(names) and names[length] in unknown:
                found = found[:length]  # nothing is known of those behind it
        else:
            found = []
            for first in range(0, len(names), client.most_questions):
                places = range(first, min(first + client.most_questions, len(names)))
                found += [(names[place], there) for place, there in zip(places, exist(places), strict=True)]
        if unknown and not (known := [each for each in found if each[0] not in unknown]):
            return failure(next(iter(unknown.values())))
        return answer(TierOutcome.DONE, exists=known if unknown else found)

    def delete(self, lane: Lane, names: Sequence[ObjectName]) -> Result:
        done = all([self._remove(lane, where) for where in self._named(lane, names)])  # noqa: C419, each is tried
        return Result(TierOutcome.DONE, answered=done, exists=tuple((name, False) for name in names))

    def refresh(self, lane: Lane, names: Sequence[ObjectName]) -> Result:
        for where in self._named(lane, names):
            lane.client.refresh(where)
        return answer(TierOutcome.DONE)

    def clear(self, lane: Lane, scope: bytes) -> Result:
        self._generations.write(lane.client, scope)
        return answer(TierOutcome.DONE, what=self._generations.warning(scope))

    def learn(self, lane: Lane, namespaces: Sequence[bytes]) -> Result:
        """Find out the namespaces' generations, which are known then."""
        for namespace in namespaces:
            self._generations.of_reader(lane.client, namespace)
        return answer(TierOutcome.DONE)

    def ping(self, lane: Lane) -> Result:
        """Find out whether the store answers and, unless the tier is read-only, takes writes."""
        present = self._generations.reads(lane.client)
        if self._read_only:
            return answer(TierOutcome.DONE)
        try:
            if not present:
                self._generations.create(lane.client)
            with contextlib.suppress(StoreFull):  # it takes more once it has evicted something
                lane.client.write_id(self._names.of_ping(), _PING)
        except StoreError as error:
            return Result(TierOutcome.DONE, answered=True, refused=str(error))
        return answer(TierOutcome.DONE)

    def _remove(self, lane: Lane, where: Sequence[str]) -> bool:
        """Housekeeping: what it meets changes no outcome. False: the objects may still be there."""
        if self._read_only:
            return False
        try:
            lane.client.delete(where)
        except StoreError as error:
            log.info("%d objects could not be deleted: %s", len(where), error)
            return False
        return True

    def _named(self, lane: Lane, names: Sequence[ObjectName]) -> list[list[str]]:
        """Store names of the objects, in batches that keep their order inside a namespace."""
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

    def _where(self, jobs: Iterable[TierJob], generation: int) -> list[str]:
        return [self._names.of(job.item.name, generation) for job in jobs]

    def _record(self, item: StoreObject, generation: int) -> Record:
        name, memory = item.name, item.memory
        return Record(
            self._region, self._page_bytes, name.namespace, name.group, name.key, memory.coverage, generation,
            list(memory.slots), list(memory.slot_bytes),
        )  # fmt: skip
