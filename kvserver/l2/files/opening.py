"""Opening of a file tier: read its generations, replay its journal, find the free pages.

Owns: the order of these, on the tier's worker. Everything is handed to the loop's thread at the end.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass

from kvserver._native import RecordTable
from kvserver.cache import PagePool
from kvserver.l2.files import generations, journal
from kvserver.l2.files.folder import Folder
from kvserver.l2.files.generations import FolderGenerations
from kvserver.l2.files.journal import Journal

log = logging.getLogger(__name__)

HEAD_PAGES = 1  # of the data file
_SWEEP = 1 << 10  # in one call; other threads of Python wait for it


@dataclass(frozen=True)
class Opened:
    table: RecordTable
    pool: PagePool  # of the data file
    generations: FolderGenerations
    journal: Journal | None  # None: the folder is read-only


def open_tier(folder: Folder) -> Opened:
    """OSError or FormatError if that fails; a file of a later format is untouched then."""
    began = time.monotonic()
    writable = not folder.read_only_reason
    table = RecordTable(secrets.randbits(64))
    known, whole = generations.read(folder)
    written, sequence = journal.replay(folder, table, writable)
    if writable:
        folder.cut()
    if writable and not whole:
        generations.write(folder, known.encode())
    table.link_orphans()
    _drop_other_generations(table, known)
    if writable:
        written, sequence = (written, sequence) if written else (Journal.make(folder, journal.new_id()), 0)
        table.begin_log(written.id, sequence)
        written.reserve()
        while table.live_journal_bytes > written.capacity // 2 and table.evict() is not None:
            pass  # of a larger size, or many small objects
    dropped, free = table.check_extents(HEAD_PAGES, folder.data.pages)
    if written and writable:
        written.append(table.drain_log())  # before a page of a dropped record is used again
    pool = PagePool(folder.data.pages * folder.data.page_bytes, folder.data.page_bytes)
    pool.allocate_pages(pool.pages)
    pool.free_pages(free)
    log.info(
        "L2 file://%s: %d objects, %d of %d bytes used, direct I/O %s, opened in %.2f s%s",
        folder.path, len(table), pool.used_pages * pool.page_bytes, pool.pages * pool.page_bytes,
        "on" if folder.data.direct else "off", time.monotonic() - began,
        f"; {dropped} objects whose pages are not theirs were dropped" if dropped else "",
    )  # fmt: skip
    if not writable and written:
        written.close()
    return Opened(table, pool, known, written if writable else None)


def _drop_other_generations(table: RecordTable, known: FolderGenerations) -> None:
    for namespace, generation, group, _ in table.spaces():
        if generation != known.of(namespace):
            table.drop_space(namespace, generation, group)
    while not table.swept:
        table.sweep(_SWEEP)
