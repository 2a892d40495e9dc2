"""One stream of KV events: the numbered batches of one model and one form of hashes, kept for replays.

A batch is closed by its size, by time or by a snapshot. Each number is the one before plus 1. The first number is the wall
clock's microseconds at the daemon's start. The first batch contains AllBlocksCleared alone and is kept for ever: a
subscriber that knew an earlier daemon sees a gap in the numbers, and its replay begins with that batch.

A `View` is what one topic announces. A topic for all instances covers every namespace prefix that an instance of the
stream has had; a topic for one instance covers the present prefix of that instance. A batch has a message for every
topic, even an empty one.

Owns: views, numbers, the buffer. Refuses to know: sockets, threads. REQUIRES: one lock around all calls.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvserver.cache import epoch_of
from kvserver.kv_events.ledger import Ledger, Ledgers
from kvserver.kv_events.resident import Name, ResidentChunks
from kvserver.kv_events.types import Description, KVRemoved, KVStored, Members, Tier
from kvserver.kv_events.wire import Form, Groups, Writer, batch, full_attention_first
from kvserver.protocol import KVGroup

BATCH_SECONDS = 0.01
MOST_EVENTS, MOST_HASHES, MOST_BYTES = 64, 1024, 256 << 10  # of a batch; one event may exceed them
MOST_BATCHES = 10_000
_MESSAGE_BYTES = 250  # memory of one message beside its payload
_SLICE = 256  # chunks announced in one turn
_RANK = re.compile(r"_dp(\d+)$")  # of vLLM's engine ids, with data parallelism


class Batch(NamedTuple):
    sequence: int
    messages: tuple[tuple[bytes, bytes], ...]  # topic, payload

    @property
    def size(self) -> int:
        return sum(len(payload) + _MESSAGE_BYTES for _, payload in self.messages)


@dataclass(frozen=True)
class StreamOptions:
    """`topic` is a template; `boot_micros` the wall clock at the daemon's start."""

    topic: str
    arrays: bool
    buffer_bytes: int
    boot_micros: int


def fill(template: str, **values: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


class View:
    """The publications of one topic.

    `waiting` and `leaving`: chunks of a namespace prefix that was added or removed, not yet published. Of a chunk
    that is removed while it waits nothing is published.
    """

    def __init__(self, topic: str, rank: int, first: bytes, resident: ResidentChunks) -> None:
        self.topic = topic.encode()
        self.rank = rank
        self.first = first  # the payload of the stream's first batch
        self.prefixes: set[bytes] = set()
        self.ledgers = Ledgers()
        self.waiting: dict[Name, Description] = {}
        self.leaving: list[tuple[Tier, Description]] = []
        self.events: list[bytes] = []  # of the open batch
        self._resident = resident

    def add_prefix(self, prefix: bytes) -> None:
        if prefix not in self.prefixes:
            self.prefixes.add(prefix)
            self.waiting.update(self._resident.within(prefix))

    def remove_prefix(self, prefix: bytes) -> None:
        self.prefixes.remove(prefix)
        for name, chunk in self._resident.within(prefix):
            if self.waiting.pop(name, None) is None:
                self.leaving.append((name[0], chunk))

    def announced(self) -> list[tuple[Tier, Description]]:
        """The chunks that were published as stored and not as removed."""
        chunks = [
            (name[0], chunk)
            for prefix in self.prefixes
            for name, chunk in self._resident.within(prefix)
            if name not in self.waiting
        ]
        return chunks + self.leaving


class Stream:
    def __init__(self, model_name: str, form: Form, options: StreamOptions, resident: ResidentChunks) -> None:
        self.model_name, self.form = model_name, form
        self.per_instance = "{instance}" in options.topic
        self.groups: Groups = ()
        self.views: dict[str, View] = {}  # by instance_id; the only one has ""
        self.buffer: deque[Batch] = deque()
        self.buffered_bytes = 0
        self.first_sequence = self.next_sequence = options.boot_micros
        self._options = options
        self._resident = resident
        self._writer = Writer(form, options.arrays)
        self._readers: dict[str, bytes] = {}  # namespace prefixes by instance_id
        self._opened = time.time()
        self._due = 0.0  # monotonic; 0: no batch is open
        self._open_events = self._open_hashes = self._open_bytes = 0

    # ---- readers --------------------------------------------------------------------------------

    def reader_connected(self, instance_id: str, prefix: bytes, groups: tuple[KVGroup, ...]) -> None:
        if not self.announced_blocks:
            # Not while blocks are announced: BlockRemoved must name the groups of BlockStored. A topic of one instance has
            # that engine's numbers: a consumer may know the engine's own events by the same name.
            self.groups = tuple(enumerate(groups)) if self.per_instance else full_attention_first(groups)
        self._readers[instance_id] = prefix
        view = self._view(instance_id if self.per_instance else "")
        if self.per_instance:
            for other in view.prefixes - {prefix}:
                view.remove_prefix(other)
        view.add_prefix(prefix)
        self._forget_prefixes()

    def reader_disconnected(self, instance_id: str) -> None:
        if self._readers.pop(instance_id, None) is None:
            return
        if self.per_instance:
            self._add(self.views[instance_id], [self._writer.cleared], 0)
            self.close_batch()
            del self.views[instance_id]
        self._forget_prefixes()

    def announce_end(self) -> None:
        """Publish that all blocks are removed."""
        for view in self.views.values():
            self._add(view, [self._writer.cleared], 0)
        self.close_batch()

    def _view(self, name: str) -> View:
        if name not in self.views:
            match = _RANK.search(name)
            rank = int(match[1]) if match else 0
            topic = fill(self._options.topic, model=self.model_name, form=self.form, instance=name)
            first = batch(self._opened, [self._writer.cleared], rank)
            view = self.views[name] = View(topic, rank, first, self._resident)
            self._add(view, [self._writer.cleared], 0)
            if self.next_sequence == self.first_sequence:
                self.close_batch()
        return self.views[name]

    def _forget_prefixes(self) -> None:
        """Forget namespace prefixes that have no chunks and no reader."""
        present = set(self._readers.values())
        for view in self.views.values():
            view.prefixes = {prefix for prefix in view.prefixes if prefix in present or prefix in self._resident}

    # ---- chunks ---------------------------------------------------------------------------------

    def stored(self, event: KVStored) -> None:
        prefix = epoch_of(event.namespace)
        for view in self.views.values():
            if prefix in view.prefixes:
                for chunk in event.chunks:
                    self._announce_stored(view, event.tier, chunk.description)

    def removed(self, event: KVRemoved) -> None:
        prefix = epoch_of(event.namespace)
        for view in self.views.values():
            if prefix in view.prefixes:
                place = event.tier, event.namespace
                waited = [view.waiting.pop((*place, each.group, each.key), None) for each in event.chunks]
                announced = [each.description for each, was in zip(event.chunks, waited, strict=True) if was is None]
                self._announce_removed(view, event.tier, announced)

    @property
    def pending(self) -> int:
        """Chunks that wait to be published."""
        return sum(len(view.waiting) + len(view.leaving) for view in self.views.values())

    def announce_waiting(self) -> None:
        """Announce some of the waiting chunks."""
        for view in self.views.values():
            if view.leaving:
                for tier in Tier:
                    self._announce_removed(view, tier, [chunk for at, chunk in view.leaving[-_SLICE:] if at is tier])
                del view.leaving[-_SLICE:]
            else:
                for _ in range(min(_SLICE, len(view.waiting))):
                    (tier, *_), chunk = view.waiting.popitem()
                    self._announce_stored(view, tier, chunk)

    def _announce_stored(self, view: View, tier: Tier, chunk: Description) -> None:
        for part in view.ledgers.count(True, tier, chunk):
            self._add(view, self._writer.stored(part, tier, self.groups), part.blocks)

    def _announce_removed(self, view: View, tier: Tier, chunks: Iterable[Description]) -> None:
        removed: dict[tuple[int, Members], bytearray] = {}  # by bytes of a hash and KV cache groups
        for chunk in chunks:
            width, members = chunk.hash_bytes, chunk.members
            hashes = removed.setdefault((width, members), bytearray())
            for part in view.ledgers.count(False, tier, chunk):
                hashes += part.hashes
        for (width, members), hashes in removed.items():
            for at in range(0, len(hashes), MOST_HASHES * width):
                some = bytes(hashes[at : at + MOST_HASHES * width])
                self._add(view, self._writer.removed(some, width, tier, self.groups, members), len(some) // width)

    # ---- batches --------------------------------------------------------------------------------

    def _add(self, view: View, events: list[bytes], hashes: int) -> None:
        view.events += events
        self._due = self._due or time.monotonic() + BATCH_SECONDS
        self._open_events += len(events)
        self._open_hashes += hashes * len(events)
        self._open_bytes += sum(map(len, events))
        full = self._open_events >= MOST_EVENTS or self._open_hashes >= MOST_HASHES or self._open_bytes >= MOST_BYTES
        if full:
            self.close_batch()

    @property
    def due_seconds(self) -> float | None:
        """Seconds until the open batch must be closed; None if none is open."""
        return max(0.0, self._due - time.monotonic()) if self._due else None

    def close_batch(self, even_empty: bool = False) -> None:
        """Number the open batch and keep it for `batches_after`."""
        if not (self._due or even_empty) or not self.views:
            return
        now = time.time()
        closed = Batch(
            self.next_sequence,
            tuple((view.topic, batch(now, view.events, view.rank)) for view in self.views.values()),
        )
        for view in self.views.values():
            view.events = []
        self._due = 0.0
        self._open_events = self._open_hashes = self._open_bytes = 0
        self.next_sequence += 1
        self.buffer.append(closed)
        self.buffered_bytes += closed.size
        while len(self.buffer) > MOST_BATCHES or self.buffered_bytes > self._options.buffer_bytes:
            self.buffered_bytes -= self.buffer.popleft().size

    @property
    def pinned(self) -> Batch:
        """The first batch, with the present topics."""
        return Batch(self.first_sequence, tuple((view.topic, view.first) for view in self.views.values()))

    def batches_after(self, sequence: int, most: int) -> list[Batch]:
        """Up to `most` kept batches after `sequence`. The pinned batch alone if `sequence` is before it and others were dropped."""
        oldest = self.next_sequence - len(self.buffer)
        if sequence < self.first_sequence < oldest and self.views:
            return [self.pinned]
        start = max(0, sequence + 1 - oldest)
        return [self.buffer[at] for at in range(start, min(start + most, len(self.buffer)))]

    # ---- measurements ---------------------------------------------------------------------------

    @property
    def topics(self) -> list[bytes]:
        return [view.topic for view in self.views.values()]

    @property
    def announced_blocks(self) -> int:
        """Announced blocks of all views."""
        return self._total(len)

    @property
    def unbalanced(self) -> int:
        return self._total(lambda ledger: ledger.unbalanced)

    @property
    def state_bytes(self) -> int:
        """Memory of the ledgers."""
        return self._total(lambda ledger: ledger.memory_bytes)

    def _total(self, measure: Callable[[Ledger], int]) -> int:
        return sum(view.ledgers.total(measure) for view in self.views.values())
