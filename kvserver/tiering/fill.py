"""A fill: its request, and the objects that it has still to reserve, to read and to wait for.

Owns: its state, and what follows from that alone. Refuses to know: when it may begin, tiers, replies (`fills`).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvserver.cache import Chunk, StorePlan
from kvserver.engines import Counts, Instance, Respond, Worker
from kvserver.l2 import Coverage
from kvserver.protocol import Durability, Lookup, LookupReply
from kvserver.tiering.presence import Attainable, MissingObjects

BATCH = 16  # objects that become READY together
FIRST_ASK_NS, LONGEST_ASK_NS = 5_000_000, 80_000_000  # between two probes for what was promised
_MOST_READ_SECONDS = 10.0  # of one object; no request waits longer

Owner: TypeAlias = tuple[str, str]  # (instance id, request id)
# Looks the request up in L1, leases what it finds and makes the reply; it is given the tokens that were read for the request.
Answer: TypeAlias = Callable[[Lookup, int], LookupReply]
GiveUp: TypeAlias = Callable[[], None]


class Work(enum.Enum):
    """Work of one turn of the loop for one fill."""

    PLAN = enum.auto()
    RESERVE = enum.auto()  # one batch
    READ = enum.auto()  # one batch: begin its reads


@dataclass(eq=False, slots=True)
class FillBatch:
    """Objects of one group, with their slots in L1."""

    plan: StorePlan
    coverage: Coverage
    failed: set[int] = field(default_factory=set)  # places in plan.chunks
    reads: dict[int, tuple[int, int]] = field(default_factory=dict)  # place in plan.chunks -> (tier, ticket)


@dataclass(slots=True)
class Filled:
    """Result of an ended fill: what it has read."""

    bytes: int  # that its request has not loaded
    tokens: int
    deadline: float  # of the request's lease
    give_up: GiveUp | None  # of the fill


@dataclass(eq=False, slots=True)
class Fill:
    owner: Owner
    lookup: Lookup
    respond: Respond
    answer: Answer
    namespace: bytes
    durability: Durability
    instance: Instance
    worker: Worker  # one of the instance's, also after it disconnected
    coverages: Sequence[Coverage | None]
    overtaken_until_ns: int  # by fills that have room, while this one waits for room
    due_ns: int
    hit_chunks: int  # of L1 when the fill began
    counts: Counts  # of lookups' fills
    give_up: GiveUp | None = None  # of a prefetch, which no request waits for: ends it, to make room for one
    promised: int = 0  # chunks that an engine of another daemon stores: a shared tier may have them soon
    promised_until_ns: int = 0
    asks_at_ns: int = 0  # when the tiers are asked again for what was promised; 0: they are not
    asks_after_ns: int = FIRST_ASK_NS
    clipped: bool = False  # L1 had no room for all that L2 has
    chunks: int = 0  # of the hit that it is to give
    probes: int = 0  # that have not ended; nothing is planned before
    todo: deque[MissingObjects] = field(default_factory=deque)  # to be reserved; nothing is read before all are
    reserved: deque[FillBatch] = field(default_factory=deque)  # to be read, in this order
    reading: list[FillBatch] = field(default_factory=list)
    bytes: int = 0
    queued: list[int] = field(default_factory=list)  # bytes still to be read, by tier
    planned: bool = False
    began: bool = False
    replanned: bool = False
    ended: bool = False
    planned_at: float = 0.0
    expected_seconds: float | None = None  # from then on
    pinned: list[Chunk] = field(default_factory=list)
    awaited: deque[tuple[Chunk, int]] = field(default_factory=deque)  # with the group; others fill them
    lost: bool = False  # one of them was not filled
    tokens: int = 0  # of the objects of group 0 that were read
    brought_bytes: int = 0  # of all that was read

    def read_due_ns(self, now: float) -> int:
        """Deadline of a read or probe that begins now: a prefetch waits longer than a tier may hold up the reads of others."""
        return min(self.due_ns, int((now + _MOST_READ_SECONDS) * 1e9))

    @property
    def only_chunks(self) -> bool:
        """True if each of its objects is of use with those before it alone: no window or state must be there as well."""
        specs = self.worker.spec.object_groups
        return len(specs) == 1 and specs[0].kind == "full"

    @property
    def waits(self) -> bool:
        """True if it has work of its own left; False if it depends on other fills and stores alone."""
        return bool(self.probes or self.todo or self.reserved or self.reading or self.asks_at_ns)


def bytes_of(found: Attainable) -> int:
    return sum(part.bytes for part in found.reads)


def batches(missing: Sequence[MissingObjects]) -> Iterator[MissingObjects]:
    for each in missing:
        for first in range(0, len(each.places), BATCH):
            yield MissingObjects(each.group, each.places[first : first + BATCH])


def is_filling(chunk: Chunk, group: int) -> bool:
    """A store or another fill is under way for exactly this object. A slot of one rank does not show that another follows."""
    return not chunk.detached and chunk.is_filling(group)
