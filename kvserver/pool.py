"""The pages of L1: which are free, nothing else.

Owns: the free pages, as extents: runs of neighbouring pages, merged as soon as they touch. Refuses to know:
what a page holds and who asked for it. One thread uses it.
Invariant: free_pages + used_pages == pages.

A slot is `bytes`: its extents in the order its bytes run, each a pair of u32 (first page, pages) in the
machine's byte order. Slots joined are extents, too. Nearly always a slot is one extent; where memory is
fragmented it is several, as few and as large as there are.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator

PAGE_BYTES = 4 << 10
MAX_PAGES = 1 << 30  # page numbers are u32, on the way to the copier
_GRAINS = 32  # a slot of many pages is rounded up by less than 1/32 of itself

_EXTENT = struct.Struct("=II")


def page_bytes_for(l1_bytes: int) -> int:
    """4 KiB, until so many pages would have no number.

    Pages only say what is lost at the end of a slot: how wide copies are is up to extents (see `grain`).
    """
    page = PAGE_BYTES
    while page * MAX_PAGES < l1_bytes:
        page *= 2
    return page


def grain(pages: int) -> int:
    """What the extents of a slot of so many pages are multiples of: a power of two, at most 1/32 of it.

    A slot is rounded up to whole grains. So what one model leaves free never splits into shreds, and copies
    stay wide when L1 is fragmented: from 2 MiB on, a piece of a slot has at least 64 KiB.
    """
    return 1 << max(0, (pages // _GRAINS).bit_length() - 1)


def extents(slot: bytes) -> Iterator[tuple[int, int]]:
    """(first page, pages) of each extent of a slot."""
    return _EXTENT.iter_unpack(slot)


def page_count(slot: bytes) -> int:
    return sum(count for _, count in extents(slot))


class PagePool:
    """Pages 0..pages-1. Best fit; every call costs O(extents taken or given), whatever else is free."""

    def __init__(self, l1_bytes: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.pages = l1_bytes // page_bytes
        self.free_pages = 0
        self._count_at: dict[int, int] = {}  # first page of a free extent -> its pages
        self._first_before: dict[int, int] = {}  # the page after a free extent -> its first page
        self._by_count: dict[int, dict[int, None]] = {}  # pages -> first pages, the last freed last; none empty
        self._counts: list[int] = []  # the keys of _by_count, sorted
        if self.pages:
            self._add(0, self.pages)

    @property
    def used_pages(self) -> int:
        return self.pages - self.free_pages

    def pages_for(self, slot_bytes: int) -> int:
        pages = -(-slot_bytes // self.page_bytes)
        return -(-pages // grain(pages)) * grain(pages)

    def take(self, count: int) -> bytes | None:
        """A slot of `count` pages, or None and nothing taken: only if fewer are free."""
        if count > self.free_pages:
            return None
        if count <= self._counts[-1]:
            return _EXTENT.pack(self._cut(count), count)
        return self._gather(count)

    def give(self, slot: bytes) -> None:
        """Take back slots. REQUIRES: they came from take() and are given back once."""
        for first, count in extents(slot):
            assert first not in self._count_at, "a slot was freed twice"
            before = self._first_before.get(first)
            if before is not None:
                self._remove(before, first - before)
                first, count = before, first - before + count
            after = self._count_at.get(first + count)
            if after is not None:
                self._remove(first + count, after)
                count += after
            self._add(first, count)
        assert self.free_pages <= self.pages, "a slot was freed twice"

    def _gather(self, count: int) -> bytes:
        """A slot of several extents, largest first, in whole grains while there are such."""
        least = grain(count)
        pieces = []
        while count:
            largest = self._counts[-1]
            piece = min(count, largest - largest % least or largest)
            pieces.append(_EXTENT.pack(self._cut(piece), piece))
            count -= piece
        return b"".join(pieces)

    def _cut(self, count: int) -> int:
        """Take `count` pages from the smallest extent that has them. REQUIRES: one has."""
        found = self._counts[bisect_left(self._counts, count)]
        first, _ = self._by_count[found].popitem()
        self._removed(first, found)
        if found > count:
            self._add(first + count, found - count)
        return first

    def _add(self, first: int, count: int) -> None:
        self._count_at[first] = count
        self._first_before[first + count] = first
        self.free_pages += count
        same = self._by_count.get(count)
        if same is None:
            self._by_count[count] = {first: None}
            self._counts.insert(bisect_left(self._counts, count), count)
        else:
            same[first] = None

    def _remove(self, first: int, count: int) -> None:
        del self._by_count[count][first]
        self._removed(first, count)

    def _removed(self, first: int, count: int) -> None:
        """The rest of a removal. REQUIRES: `first` is out of `_by_count`."""
        del self._count_at[first]
        del self._first_before[first + count]
        self.free_pages -= count
        if not self._by_count[count]:
            del self._by_count[count]
            del self._counts[bisect_left(self._counts, count)]
