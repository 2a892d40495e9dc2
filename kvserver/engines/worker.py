"""A rank of an engine: its memory, its object groups, and the copies that use them.

A worker that is closing takes no new requests; its memory is unmapped when its last ticket ends (`workers`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvserver._native import Device, Mapping, PlaneTable, WordMapping
from kvserver.cache import GroupObjects, Groups, chunks_of, tails_of
from kvserver.engines.lifeline import Lifeline
from kvserver.protocol import ObjectGroup, RegisterWorker, block_bytes, planes_of


def log_fields(rank: RegisterWorker) -> dict[str, str | int]:
    """Fields of log records about a rank."""
    return {"instance_id": rank.instance_id, "model_name": rank.model_name, "rank": rank.rank}


@dataclass(eq=False)
class WorkerGroup:
    """Object group of a rank, of chunks or of single blocks."""

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
        """The namespace that namespace() was given: events of single blocks have it, too."""
        return chunks_of(namespace) if self.layout.tails else namespace


@dataclass(eq=False)
class Worker:
    """Registered rank of an engine."""

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
        """The groups of chunks. Their objects go to L2, too; single blocks stay in L1."""
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
