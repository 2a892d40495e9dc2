"""The pages of L1: which are free and which are pinned.

Pages below `pinned_pages` are pinned for GPUs. GPU copies to other pages are slower, so pinned pages are used first. If no page
or every page is pinned, there is nothing to choose.

A slot is `bytes`: its extents in the order of the slot's bytes, each a pair of u32 (first page, pages) in the machine's byte
order. Joined slots are a list of extents, too. A slot is nearly always one extent. In fragmented memory it is several, as few and
as large as possible.

Owns: the free pages, as extents: runs of neighbouring pages, merged as soon as they touch. Refuses to know: a page's content and
owner, and how memory is pinned. One thread uses it. Invariant: unused_pages + used_pages + withheld_pages == pages.

A daemon that finds objects of an earlier one in L1 withholds their pages until it has verified or dropped them, and all pages whose
memory is not reserved yet.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator

PAGE_BYTES = 4 << 10
MAX_PAGES = 1 << 30  # page numbers are u32 in slots and in native code
_LEAST_GRANULES = 32  # per large slot, so rounding up adds less than 1/32 to it
_REGION = 1 << 18  # pages, about as many as are pinned at a time

_EXTENT = struct.Struct("=II")


def page_bytes_for(l1_bytes: int) -> int:
    """Bytes of a page: 4 KiB, or more if L1 would have more than MAX_PAGES pages.

    The page size decides how much is lost at the end of a slot; extents decide how wide copies are (`granularity`).
    """
    page = PAGE_BYTES
    while page * MAX_PAGES < l1_bytes:
        page *= 2
    return page


def granularity(pages: int) -> int:
    """Pages of one granule of a slot of `pages` pages: a power of two, at most 1/32 of the slot.

    Slots and their extents are whole granules. So freed memory never splits into shreds, and copies stay wide when L1 is
    fragmented: an extent of a slot of 2 MiB or more has at least 64 KiB.
    """
    return 1 << max(0, (pages // _LEAST_GRANULES).bit_length() - 1)


def extents(slot: bytes) -> Iterator[tuple[int, int]]:
    """(first page, pages) of each extent of a slot."""
    return _EXTENT.iter_unpack(slot)


def page_count(slot: bytes) -> int:
    """Pages of a slot, or of several joined."""
    return sum(array("I", slot)[1::2])


class PagePool:
    """Pages 0..pages-1, allocated by best fit. A call costs O(extents allocated or freed), however many are free."""

    def __init__(self, l1_bytes: int, page_bytes: int, withheld: bool = False) -> None:
        """`withheld`: all pages are, until they are released or used."""
        self.page_bytes = page_bytes
        self.pages = self.withheld_pages = l1_bytes // page_bytes
        self.pinned_pages = 0  # no free extent crosses this boundary
        self._pinned = _FreeExtents()
        self._unpinned = _FreeExtents()
        if self.pages and not withheld:
            self.release_pages(0, self.pages)

    @property
    def unused_pages(self) -> int:
        return self._pinned.pages + self._unpinned.pages

    @property
    def used_pages(self) -> int:
        return self.pages - self.unused_pages - self.withheld_pages

    def pages_for(self, slot_bytes: int) -> int:
        pages = -(-slot_bytes // self.page_bytes)
        return -(-pages // granularity(pages)) * granularity(pages)

    def allocate_pages(self, count: int) -> bytes | None:
        """A slot of `count` pages; None, and no page is allocated, only if fewer pages are free.

        The slot is of pinned pages if enough are free, in several extents if necessary; else one unpinned extent; else
        both kinds of pages.
        """
        if count <= self._pinned.largest:
            return _EXTENT.pack(self._pinned.cut_extent(count), count)
        if count <= self._pinned.pages:
            return _gather(count, self._pinned)
        if count <= self._unpinned.largest:
            return _EXTENT.pack(self._unpinned.cut_extent(count), count)
        if count <= self.unused_pages:
            return _gather(count, self._pinned, self._unpinned)
        return None

    def free_pages(self, slot: bytes) -> None:
        """Free a slot, or several slots joined. REQUIRES: allocate_pages() returned them, and each is freed once."""
        for first, count in extents(slot):
            self._free_extent(first, count)
        assert self.unused_pages <= self.pages, "a slot was freed twice"

    def release_pages(self, first: int, count: int) -> None:
        """Make withheld pages free. REQUIRES: each is withheld."""
        self.withheld_pages -= count
        self._free_extent(first, count)

    def use_withheld(self, slot: bytes) -> int:
        """Withheld pages have become a slot, or several joined; they are freed as others are. Returns their number."""
        pages = page_count(slot)
        self.withheld_pages -= pages
        return pages

    def mark_pinned(self, pages: int) -> None:
        """The first `pages` pages are pinned; a slot in use may cross the boundary. REQUIRES: never fewer than before.

        Costs O(free extents in the newly pinned pages, and in the regions where those begin and end).
        """
        assert self.pinned_pages <= pages <= self.pages, "pages are pinned from the first on"
        moved = self._unpinned.remove_between(self.pinned_pages, pages)
        self.pinned_pages = pages
        for first, count in moved:
            self._free_extent(first, count)

    def _free_extent(self, first: int, count: int) -> None:
        pinned = self.pinned_pages - first
        if pinned <= 0:
            self._unpinned.add_extent(first, count)
        elif pinned >= count:
            self._pinned.add_extent(first, count)
        else:
            self._pinned.add_extent(first, pinned)
            self._unpinned.add_extent(first + pinned, count - pinned)


def _gather(count: int, *parts: _FreeExtents) -> bytes:
    """A slot of several extents, the largest first: whole granules of each part, then the remaining pages."""
    least = granularity(count)
    pieces = []
    while count:
        part = next((part for part in parts if part.largest >= least), None) or next(p for p in parts if p.pages)
        piece = min(count, part.largest - part.largest % least or part.largest)
        pieces.append(_EXTENT.pack(part.cut_extent(piece), piece))
        count -= piece
    return b"".join(pieces)


class _FreeExtents:
    """Free extents of one part of L1, found by their first page, by the page after them and by their size."""

    def __init__(self) -> None:
        self.pages = 0
        # first page of an extent -> its pages, by region, to find the extents of a region
        self._count_at: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._first_before: dict[int, int] = {}  # the page after an extent -> its first page
        self._by_count: dict[
            int, dict[int, None]
        ] = {}  # pages -> first pages, the last freed is the last; no dict is empty
        self._counts: list[int] = []  # the keys of _by_count, sorted

    @property
    def largest(self) -> int:
        return self._counts[-1] if self._counts else 0

    def cut_extent(self, count: int) -> int:
        """Cut `count` pages off the smallest extent that has so many; returns the first page. REQUIRES: one has."""
        found = self._counts[bisect_left(self._counts, count)]
        first, _ = self._by_count[found].popitem()
        self._removed(first, found)
        if found > count:
            self._insert(first + count, found - count)
        return first

    def add_extent(self, first: int, count: int) -> None:
        """Add an extent, merged with the extents that it touches."""
        assert first not in self._count_at[first // _REGION], "a slot was freed twice"
        before = self._first_before.get(first)
        if before is not None:
            self._remove(before, first - before)
            first, count = before, first - before + count
        after = self._count_at[(first + count) // _REGION].get(first + count)
        if after is not None:
            self._remove(first + count, after)
            count += after
        self._insert(first, count)

    def remove_between(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Remove and return the extents whose first page is in [begin, end)."""
        regions = range(begin // _REGION, -(-end // _REGION))
        found = [
            (first, count)
            for region in regions
            for first, count in self._count_at[region].items()
            if begin <= first < end
        ]
        for first, count in found:
            self._remove(first, count)
        return found

    def _insert(self, first: int, count: int) -> None:
        self._count_at[first // _REGION][first] = count
        self._first_before[first + count] = first
        self.pages += count
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
        """Finish a removal. REQUIRES: `first` was removed from `_by_count`."""
        del self._count_at[first // _REGION][first]
        del self._first_before[first + count]
        self.pages -= count
        if not self._by_count[count]:
            del self._by_count[count]
            del self._counts[bisect_left(self._counts, count)]
