"""Data that the server keeps with a ticket until its copy or mapping has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from kvserver._native import BlockIds
from kvserver.cache import Chunk, StorePlan
from kvserver.engines.worker import Worker, WorkerGroup
from kvserver.protocol import Reply, Retrieve, Store

Respond: TypeAlias = Callable[[Reply], None]


@dataclass(slots=True)
class StoreTicket:
    """A store whose request was checked. It pins what it has planned, also before its copy is queued."""

    direction: ClassVar[str] = "store"
    request: Store
    respond: Respond
    worker: Worker
    group: WorkerGroup
    namespace: bytes
    blocks: BlockIds  # of all its keys
    plan: StorePlan
    arrived_ns: int
    began_ns: int = 0

    @property
    def chunks(self) -> list[Chunk]:
        return self.plan.chunks


@dataclass(slots=True)
class LoadTicket:
    direction: ClassVar[str] = "load"
    request: Retrieve
    respond: Respond
    worker: Worker
    group: WorkerGroup
    namespace: bytes
    blocks: BlockIds
    chunks: list[Chunk]
    arrived_ns: int
    began_ns: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the engine need not compute after the whole load."""
        return self.request.tokens or self.blocks.positions * self.group.spec.block_tokens


@dataclass(slots=True)
class MapTicket:
    worker: Worker
    respond: Respond


@dataclass(slots=True)
class UnmapTicket:
    worker: Worker


CopyTicket: TypeAlias = StoreTicket | LoadTicket
Ticket: TypeAlias = CopyTicket | MapTicket | UnmapTicket
