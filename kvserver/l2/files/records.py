"""The records of a file tier that is open: where they lie, which are evicted, and when a page is used again.

Owns: the index, the pages of the data file, the generations in memory. Pages of a dropped record are used again once no get
reads them and its drop is in the journal (`log_writer`). Refuses to know: tickets. Nothing here waits.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvserver._native import HostRegion, Record, checksum
from kvserver.cache import page_count
from kvserver.l2.base import Changed, ObjectMemory, ObjectName
from kvserver.l2.failures import ObjectFailures
from kvserver.l2.files.log_writer import LogWriter
from kvserver.l2.files.opening import HEAD_PAGES, Opened
from kvserver.l2.files.worker import FileWorker

_SWEEP = 512  # records of one slice
_MOST_EVICTIONS = 256  # at once
_WALK = 1024


class PlacedRecord(NamedTuple):
    """A record of the index: what must agree before it is read, its place, and whether a replay found it."""

    meaning: int
    extents: bytes
    recovered: bool


class FileRecords:
    """Records of an open tier. REQUIRES: one thread uses it.

    `failing` gets the reason why the journal can have no more entries, or "" when it can again; `changed` gets each change.
    """

    def __init__(self, opened: Opened, worker: FileWorker, failing: Callable[[str], None], changed: Changed) -> None:
        self._changed = changed
        self.generations = opened.generations
        self._table = opened.table
        self.pool = opened.pool
        self._writer = (
            LogWriter(opened.table, opened.pool, opened.journal, worker, failing)
            if opened.journal is not None
            else None
        )
        self.failures = ObjectFailures()
        self.unreadable: set[bytes] = set()  # extents of records whose read failed
        self._reads = Counter[bytes]()  # under way, by extents
        self._read_and_freed: set[bytes] = set()  # extents that are freed after their reads

    def __len__(self) -> int:
        return len(self._table)

    @property
    def writable(self) -> bool:
        """Puts may begin. Not while the journal is far behind: what it lacks is in memory."""
        return self._writer is not None and not self._writer.behind

    @property
    def takes_units(self) -> bool:
        """Records may be added that share a unit. Not while the journal is of an earlier format."""
        return self._writer is not None and self._writer.takes_units

    @property
    def used_bytes(self) -> int:
        return self.pool.used_pages * self.pool.page_bytes

    @property
    def journaled(self) -> bool:
        """All that changed is in the journal, or will never be."""
        return self._writer is None or self._writer.idle or bool(self._writer.failure)

    # ---- the index ------------------------------------------------------------------------------

    def generation_of(self, name: ObjectName) -> int:
        return self.generations.of(name.namespace)

    def holds(self, namespace: bytes, group: int, keys: bytes) -> int:
        found = self._table.holds(namespace, self.generations.of(namespace), group, keys)
        return self.failures.shown(found, namespace, group, keys, time.monotonic_ns())

    def touch(self, namespace: bytes, group: int, keys: bytes) -> None:
        self._table.touch(namespace, self.generations.of(namespace), group, keys)

    def find(self, name: ObjectName) -> PlacedRecord | None:
        found = self._table.find(name.namespace, self.generation_of(name), name.group, name.key)
        return PlacedRecord(*found) if found is not None else None

    def add(self, names: Sequence[ObjectName], parent: bytes, meaning: int, extents: bytes) -> None:
        """Add a unit of records, each in the place of any other of its name. `parent` is the first one's."""
        for name in names:
            self.remove(name)
        first, keys = names[0], b"".join([name.key for name in names])
        self._table.add(first.namespace, self.generation_of(first), first.group, keys, parent, meaning, extents)
        for name in names:
            self._changed(True, name)

    def remove(self, name: ObjectName) -> None:
        extents = self._table.remove(name.namespace, self.generation_of(name), name.group, name.key)
        if extents is not None:
            self._release(extents)
            self._changed(False, name)

    def give_up(self, name: ObjectName) -> None:
        """Drop a record that cannot be read. No record gets its pages until a restart."""
        extents = self._table.remove(name.namespace, self.generation_of(name), name.group, name.key)
        if extents is not None:
            self.unreadable.discard(extents)
            self._changed(False, name)

    def walk(self, at: int) -> tuple[int | None, Iterator[tuple[bytes, int, bytes]]]:
        """Namespace, group and keys of the records in a slice of places from `at` on, and the place behind it; None: the end."""
        behind, found = self._table.walk(at, _WALK)
        return behind, (
            (namespace, group, keys)
            for namespace, generation, group, keys in found
            if generation == self.generations.of(namespace)
        )

    def count(self, prefixes: tuple[bytes, ...]) -> int:
        return sum(
            records
            for namespace, generation, _, records in self._table.spaces()
            if namespace.startswith(prefixes) and generation == self.generations.of(namespace)
        )

    def drop_other_generations(self) -> None:
        """Drop records of other generations: lookups find them no more, and sweep() removes them."""
        for namespace, generation, group, _ in self._table.spaces():
            if generation != self.generations.of(namespace):
                self._table.drop_space(namespace, generation, group)

    # ---- pages ----------------------------------------------------------------------------------

    def pages_for(self, record: Record) -> int:
        return self.pool.pages_for(record.file_bytes)

    def can_have(self, pages: int) -> bool:
        """True if so many pages could ever be free."""
        return pages <= self.pool.pages - HEAD_PAGES

    def allocate(self, pages: int) -> bytes | None:
        """Extents of so many pages; None if there is no space for them, or for one more entry of the journal."""
        return None if self._journal_is_full() else self.pool.allocate_pages(pages)

    def _journal_is_full(self) -> bool:
        assert self._writer is not None
        return self._table.live_journal_bytes > self._writer.most_live_bytes

    def make_room(self, pages: int, more: int) -> tuple[bool, int]:
        """Evict until so many pages are free or will be, and `more` as far as possible. Returns (False if `pages` never will be, evictions).

        Drops go to the journal together, and only then their pages are free. Were records evicted put by put, each put would wait
        for a write of the journal. REQUIRES: more >= pages.
        """
        assert self._writer is not None
        for evictions in range(_MOST_EVICTIONS):  # what is left follows once their drops are in the journal
            coming = self.pool.unused_pages + self._writer.pending_pages
            if coming >= more and not self._journal_is_full():
                return True, evictions
            evicted = self._table.evict()
            if evicted is None:
                return coming >= pages or bool(self._read_and_freed) or not self._table.swept, evictions
            self._release(evicted[3])
            self._changed(False, ObjectName(*evicted[:3]))
        return True, _MOST_EVICTIONS

    def pin(self, extents: bytes) -> None:
        """A get begins to read them."""
        self._reads[extents] += 1

    def unpin(self, extents: bytes) -> None:
        self._reads[extents] -= 1
        if self._reads[extents]:
            return
        del self._reads[extents]
        if extents in self._read_and_freed:
            self._read_and_freed.remove(extents)
            self._release(extents)

    def _release(self, extents: bytes) -> None:
        """The record left the index. Its pages are free after its gets and its drop's entry."""
        self.unreadable.discard(extents)
        if extents in self._reads:
            self._read_and_freed.add(extents)
        elif self._writer is not None:
            self._writer.free_later(extents, page_count(extents))

    # ---- the journal ----------------------------------------------------------------------------

    def sweep(self) -> bool:
        """Remove a slice of what drop_other_generations() left. REQUIRES: the generations are durable. True if more is left."""
        if self._table.swept or self._writer is None:
            return False
        freed = self._table.sweep(_SWEEP)
        self._writer.free_later(freed, page_count(freed))
        return not self._table.swept

    def write_log(self) -> bool:
        """Send what waits to the journal. True if there is more to do at once."""
        return self._writer is not None and self._writer.step()

    def try_again(self, now_ns: int) -> None:
        """Write a journal anew, if that failed for a reason that may have passed."""
        if self._writer is not None:
            self._writer.try_again(now_ns)

    def write_last(self) -> None:
        if self._writer is not None:
            self._writer.write_last()


class L1Pages(NamedTuple):
    """Pages of L1, between which and the file records move."""

    region: HostRegion
    page_bytes: int

    def record(self, name: ObjectName, memory: ObjectMemory, generation: int) -> Record:
        return Record(
            self.region, self.page_bytes, name.namespace, name.group, name.key, memory.coverage, generation,
            memory.slots, memory.slot_bytes,
        )  # fmt: skip


def meaning_of(memory: ObjectMemory) -> int:
    """Checksum of what must agree before a record is read, beside its name and generation. The header has it in full."""
    return checksum(memory.coverage + struct.pack(f"<{len(memory.slot_bytes)}Q", *memory.slot_bytes))
