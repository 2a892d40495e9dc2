"""Slots as a test thinks of them: lists of page numbers."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from kvserver.cache.pages import extents


def pages_of(slot: bytes) -> list[int]:
    """Every page of a slot, in order."""
    return [page for first, count in extents(slot) for page in range(first, first + count)]


def slot_of(pages: Iterable[int]) -> bytes:
    """These pages as a slot of as few extents as there can be."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and sum(runs[-1]) == page:
            runs[-1][1] += 1
        else:
            runs.append([page, 1])
    return b"".join(struct.pack("=II", *run) for run in runs)
