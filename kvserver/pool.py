"""The pages of L1: which are free, nothing else.

Owns: the free list. Refuses to know: what a page holds and who asked for it. One thread uses it.
Invariant: free_pages + used_pages == pages.
"""

from __future__ import annotations

from array import array

MIN_PAGE_BYTES = 4 << 10
MAX_PAGE_BYTES = 64 << 10
_PAGES = 1 << 18  # beyond so many, pages grow: a slot's list of pages is built and checked for every copy


def page_bytes_for(l1_bytes: int) -> int:
    """A power of two between the bounds, near 1/262144 of L1.

    What a slot leaves of its last page is lost, half a page on average: under 5% in every slot of at
    least 20 pages, so of 80 KiB up to 1 GiB of L1, of 1.25 MiB from 16 GiB on.
    """
    page = MIN_PAGE_BYTES
    while page < MAX_PAGE_BYTES and page * _PAGES < l1_bytes:
        page *= 2
    return page


class PagePool:
    """Page numbers 0..pages-1. A slot is an array('I') of them, in the order its bytes run."""

    def __init__(self, l1_bytes: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.pages = l1_bytes // page_bytes
        # A stack; reversed, so that fresh memory is handed out in address order.
        self._free = array("I", range(self.pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.pages - len(self._free)

    def pages_for(self, slot_bytes: int) -> int:
        return -(-slot_bytes // self.page_bytes)

    def take(self, count: int) -> array[int] | None:
        """A slot of `count` pages, or None and nothing taken."""
        if count > len(self._free):
            return None
        slot = self._free[-count:]
        del self._free[-count:]
        slot.reverse()
        return slot

    def give(self, slot: array[int]) -> None:
        """Take back a slot. REQUIRES: it came from take() and is given back once."""
        slot.reverse()
        self._free.extend(slot)
        assert len(self._free) <= self.pages, "a slot was freed twice"
