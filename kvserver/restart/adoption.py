"""The chunks of an earlier daemon's L1, which enter the index as their bytes are verified.

Owns: the pages of these chunks until then, and their order. Refuses to know: where the state came from, lookups.

A chunk is found only once the digest of its pages was made anew and is the state's, so a wrong byte is never served. Those that were to be
evicted last are verified first. A thread makes the digests; the loop adopts a slice of chunks a turn. Until then their pages are
withheld. A chunk that was stored or cleared meanwhile is not adopted.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, groupby

from kvserver._native import HostRegion, digest_objects
from kvserver.cache import Cache, Chunk, ChunkRows, Groups, chunks_of, extents, page_count
from kvserver.events import Bus, ChunksStored
from kvserver.protocol import KEY_BYTES
from kvserver.restart.keeping import verifying_threads
from kvserver.restart.state import DIGEST_BYTES, EXTENT_BYTES, PROTECTED, State

log = logging.getLogger(__name__)

SLICE = 512  # chunks that one turn adopts
_PUBLISHED_AT_ONCE = 16  # runs of chunks
_BATCH_CHUNKS = 8192  # verified in one native call, and
_BATCH_BYTES = 256 << 20  # of their pages, in the mean


def _offsets(sizes: bytes, unit: int = 1) -> Sequence[int]:
    """The offset of each row, and the end: rows have these sizes, u32, in units of so many bytes."""
    count = len(sizes) // 4
    if count and sizes == sizes[:4] * count:  # nearly always: no array for each row
        size = unit * array("I", sizes[:4])[0]
        return range(0, size * count + 1, size) if size else bytes(count + 1)
    return array("Q", accumulate((unit * size for size in array("I", sizes)), initial=0))


class Adoption:
    """REQUIRES: the loop's thread uses it; all pages of the state's chunks are withheld."""

    def __init__(self, state: State, cache: Cache, region: HostRegion, bus: Bus) -> None:
        self._state, self._cache, self._region, self._bus = state, cache, region, bus
        self._groups = [Groups(of.groups, of.ranks, of.chunk_tokens, tails=of.tails) for of in state.namespaces]
        self._cleared = [False] * len(state.namespaces)
        self._places, self._ready = array("I", state.places), array("I", state.ready)
        self._firsts = _offsets(state.counts, EXTENT_BYTES)  # of each chunk in `extents`
        end_bytes = [of.end_bytes for of in state.namespaces]
        sizes = (
            array("I", map(end_bytes.__getitem__, self._places)).tobytes()
            if any(end_bytes)
            else bytes(4 * state.chunks)
        )
        self._ends = _offsets(sizes)  # of each chunk in `ends`
        self._next = 0  # the first row that is neither adopted nor dropped
        self._verified = 0  # rows before it have a digest in `_found`
        self._found = bytearray()
        self._batches: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.completion_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.completion_fd).atexit = False
        self._unpublished: deque[tuple[int, int, list[Chunk]]] = deque()  # place, ready groups, chunks
        self.adopted = self.damaged = 0
        self._began = 0.0

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._verify, name="l1-verify", daemon=True)
        self._thread.start()

    # ---- the thread ---------------------------------------------------------------------------

    def _verify(self) -> None:
        first, count, page_bytes = 0, self._state.chunks, self._cache.pool.page_bytes
        used_bytes = page_count(self._state.extents) * page_bytes
        at_once = max(1, min(_BATCH_CHUNKS, _BATCH_BYTES * count // used_bytes))
        while first < count and not self._stopping.is_set():
            last = min(first + at_once, count)
            try:
                digests = digest_objects(
                    self._region, page_bytes, self._counts(first, last), self._extents(first, last), verifying_threads()
                )
            except Exception:
                log.exception("internal error while chunks of L1 were verified; they are dropped")
                digests = bytes(DIGEST_BYTES * (last - first))
            self._batches.put(digests)
            os.eventfd_write(self.completion_fd, 1)
            first = last

    def _extents(self, first: int, last: int) -> bytes:
        return self._state.extents[self._firsts[first] : self._firsts[last]]

    def _counts(self, first: int, last: int) -> bytes:
        return self._state.counts[4 * first : 4 * last]

    # ---- the loop -----------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self._next == self._state.chunks

    def step(self) -> bool:
        """Adopt a slice of the chunks that are verified; True while there is more to do at once.

        Events follow when all are adopted: the bus needs longer for them, and would slow down the rest.
        """
        if self.done:
            return self._publish_some()
        if self._next == self._verified:
            try:
                os.eventfd_read(self.completion_fd)
            except BlockingIOError:
                return False
            while not self._batches.empty():
                self._found += self._batches.get()
            self._verified = self._next + len(self._found) // DIGEST_BYTES
        first, last = self._next, min(self._verified, self._next + SLICE)
        found = bytes(self._found[: DIGEST_BYTES * (last - first)])
        del self._found[: len(found)]
        self._next = last  # first: a slice that fails is not begun again, and its pages stay withheld
        self._adopt(first, last, found)
        if self.done:
            self._log()
        return self._next < self._verified or self.done

    @property
    def published(self) -> bool:
        return self.done and not self._unpublished

    def ids_of_model(self, model_name: str) -> set[bytes]:
        """Namespaces of which chunks may not be adopted yet."""
        return set() if self.done else {of.id for of in self._state.namespaces if of.model_name == model_name}

    def clear(self, prefix: bytes) -> None:
        """Adopt no chunk of the namespaces whose id begins with the prefix."""
        for place, namespace in enumerate(self._state.namespaces):
            self._cleared[place] |= namespace.id.startswith(prefix)

    def drop(self, place: int) -> None:
        """Adopt no chunk of the namespace at this place of the state."""
        self._cleared[place] = True

    def stop(self) -> State | None:
        """End it; the rows that were not reached, but for those of namespaces that were cleared. None if there are none."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self.done:
            return None
        return self._state.part(self._next, self._state.chunks).in_namespaces([not each for each in self._cleared])

    def _adopt(self, first: int, last: int, found: bytes) -> None:
        rows = zip(self._places[first:last], self._ready[first:last], self._state.flags[first:last], strict=True)
        end = first
        for (place, ready, flags), run in groupby(rows):
            begin, end = end, end + len(list(run))
            whole = self._whole(found[DIGEST_BYTES * (begin - first) : DIGEST_BYTES * (end - first)], begin, end)
            added: Sequence[Chunk | None] = [None] * (end - begin)
            if not self._cleared[place] and any(whole):
                added = self._adopt_run(place, ready, bool(flags & PROTECTED), begin, end, whole)
            dropped = added.count(None)
            self.adopted += len(added) - dropped
            self.damaged += whole.count(0)
            for row, chunk in enumerate(added, begin) if dropped else ():
                for extent in extents(self._extents(row, row + 1)) if chunk is None else ():
                    self._cache.pool.release_pages(*extent)

    def _whole(self, found: bytes, begin: int, end: int) -> bytes:
        """1 for each of these rows whose digest, of those found, is the state's."""
        digests = self._state.digests[DIGEST_BYTES * begin : DIGEST_BYTES * end]
        if found == digests:
            return b"\1" * (end - begin)
        parts = range(0, len(found), DIGEST_BYTES)
        return bytes(found[part : part + DIGEST_BYTES] == digests[part : part + DIGEST_BYTES] for part in parts)

    def _adopt_run(
        self, place: int, ready: int, protected: bool, begin: int, end: int, whole: bytes
    ) -> list[Chunk | None]:
        """Adopt neighbours in the order that are of one namespace and have the same objects; None for each that was not adopted."""
        state, index = self._state, self._cache.index
        of = state.namespaces[place]
        namespace = index.find_or_make_namespace(of.id, self._groups[place], of.model_name)
        rows = ChunkRows(
            state.keys[KEY_BYTES * begin : KEY_BYTES * end],
            state.ends[self._ends[begin] : self._ends[end]],
            self._counts(begin, end),
            self._extents(begin, end),
        )
        added = self._cache.adopt_chunks(namespace, whole, rows, ready, protected, of.tenant)
        chunks = [chunk for chunk in added if chunk is not None]
        if chunks:
            namespace.raise_durability(of.durability)
            self._unpublished.append((place, ready, chunks))
        return added

    def _publish_some(self) -> bool:
        """Publish a few runs of chunks, if the bus has room; True while there are more and it has."""
        for _ in range(_PUBLISHED_AT_ONCE):
            if not self._unpublished or not self._bus.has_room(2):
                return False
            place, ready, chunks = self._unpublished.popleft()
            self._publish(place, ready, chunks)
        return bool(self._unpublished)

    def _publish(self, place: int, ready: int, chunks: Sequence[Chunk]) -> None:
        """Publish chunks as stored by an engine that has disconnected. A chunk that has left L1 meanwhile is not announced."""
        of, groups = self._state.namespaces[place], self._groups[place]
        named = chunks_of(of.id) if of.tails else of.id
        for number, objects in enumerate(groups.objects):
            resident = [c for c in chunks if ready & c.ready & 1 << number and not c.detached]
            if resident:
                slots = range(groups.first[number], groups.first[number] + groups.slots[number])
                pages = sum(page_count(resident[0].slot(slot)) for slot in slots)
                keys = b"".join([chunk.key for chunk in resident])
                event = ChunksStored(time.monotonic_ns(), "", of.model_name, named, keys, objects, pages)
                self._bus.publish(event, len(keys))

    def _log(self) -> None:
        dropped = self._state.chunks - self.adopted
        log.info(
            "L1 kept %d chunks over the restart, verified in %.2f s%s", self.adopted, time.monotonic() - self._began,
            f"; {dropped} were dropped, {self.damaged} of them damaged" if dropped else "",
        )  # fmt: skip
