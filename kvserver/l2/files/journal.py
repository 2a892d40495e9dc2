"""The journal: a head, then entries of puts and drops (`csrc/l2/journal.h`), in the order of the loop's decisions.

Owns: the file, its replay and its replacement. Refuses to know: what the entries state. Its thread is the tier's worker.

The head: magic, u32 format, u32 bytes of it, u64 id of this file, u64 id of the data file, XXH3-64 of these. An entry counts
only if it has the id of the file and the next sequence. Nothing is appended behind an entry that does not count: replay
cuts the file off there, durably, first.

Space. A journal without space would make the tier read-only. So this file and the one that replaces it each have
`Folder.journal_bytes` reserved. When a file was replaced it keeps its space and becomes the next replacement: its old
entries have another id.

Format 1 has no units. Its entries are read, and none of a unit is appended: a daemon that knows only that format would end its
replay there.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
from contextlib import suppress

from kvserver._native import RecordTable, checksum
from kvserver.l2.files.folder import Folder, FormatError

log = logging.getLogger(__name__)

NAME = "journal"
_NEW = f"{NAME}.new"
FORMAT = 2
_MAGIC = b"KVSL2JNL"
_HEAD = struct.Struct("<8sIIQQ")
_SUM = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _SUM.size
_SLICE = 4 << 20
_SYNC_BYTES = 4 << 20  # of a next file, so that the last sync is short
_MOST_ENTRY_BYTES = 1 << 20


def new_id() -> int:
    return secrets.randbits(63) + 1


def make_head(id: int, data_id: int) -> bytes:
    head = _HEAD.pack(_MAGIC, FORMAT, HEAD_BYTES, id, data_id)
    return head + _SUM.pack(checksum(head))


class Journal:
    """An open journal. REQUIRES: one thread uses it.

    After an OSError the file may end with a part of an entry: append no more.
    """

    def __init__(self, folder: Folder, fd: int, id: int, size: int, format: int = FORMAT) -> None:
        self.id = id
        self.bytes = size
        self.format = format  # when it was opened
        self.capacity = folder.journal_bytes
        self._folder = folder
        self._disk = folder.disk
        self._fd = fd
        self._next: tuple[int, int] | None = None  # descriptor and bytes of the file that will replace this one
        self._synced = 0  # bytes of it

    @staticmethod
    def make(folder: Folder, id: int) -> Journal:
        """A new file without entries in the place of any old one."""
        journal = Journal(folder, -1, id, 0)
        journal.begin_next(id)
        journal.switch(id)
        return journal

    def reserve(self) -> None:
        """Reserve the space of the journal and of the file that will replace it, if the file system can and has it."""
        try:
            self._disk.reserve(self._fd, self.capacity)
            os.close(self._open_next())
        except OSError as error:
            log.warning("L2 file://%s: no space is reserved for its journal: %s", self._folder.path, error)

    def append(self, entries: bytes) -> None:
        self._disk.write(self._fd, entries, self.bytes)
        self.bytes += len(entries)

    def sync(self) -> None:
        self._disk.sync(self._fd)

    def begin_next(self, id: int) -> None:
        head = make_head(id, self._folder.data.id)
        fd = self._open_next()
        self._drop_next()
        self._next, self._synced = (fd, len(head)), 0
        self._disk.write(fd, head, 0)

    def append_next(self, entries: bytes) -> None:
        assert self._next is not None, "begin_next() comes first"
        fd, size = self._next
        self._disk.write(fd, entries, size)
        size += len(entries)
        self._next = (fd, size)
        if size - self._synced >= _SYNC_BYTES:
            self._disk.sync(fd)
            self._synced = size

    def switch(self, id: int) -> None:
        """The next file becomes the journal."""
        assert self._next is not None, "begin_next() comes first"
        fd, size = self._next
        self._disk.sync(fd)
        self._disk.exchange(_NEW, NAME, self._folder.fd)
        self._disk.sync(self._folder.fd)
        self._next = None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.bytes, self.id = fd, size, id

    def close(self) -> None:
        self._drop_next()
        os.close(self._fd)

    def _open_next(self) -> int:
        fd = self._folder.open_file(_NEW, os.O_RDWR | os.O_CREAT)
        if os.fstat(fd).st_size > self.capacity:  # of another size of the tier
            self._disk.truncate(fd, 0)
        with suppress(OSError):  # a write fails where space is really missing
            self._disk.reserve(fd, self.capacity)
        return fd

    def _drop_next(self) -> None:
        if self._next is not None:
            os.close(self._next[0])
            self._next = None


def replay(folder: Folder, table: RecordTable, writable: bool) -> tuple[Journal | None, int]:
    """Fill the table; the journal, cut off behind its last good entry, and the next sequence.

    None if there is no journal of this data file. FormatError if it is of a later version; then nothing was changed.
    """
    try:
        fd = folder.open_file(NAME, os.O_RDWR if writable else os.O_RDONLY)
    except FileNotFoundError:
        return None, 0
    try:
        id, format = _read_head(folder.disk.read(fd, HEAD_BYTES, 0), folder.data.id)
        if not id:
            os.close(fd)
            return None, 0
        end, sequence = _replay_entries(folder, fd, table, id)
        if writable and os.fstat(fd).st_size != end:
            folder.disk.truncate(fd, end)
            folder.disk.sync(fd)
    except BaseException:
        os.close(fd)
        raise
    return Journal(folder, fd, id, end, format), sequence


def _replay_entries(folder: Folder, fd: int, table: RecordTable, id: int) -> tuple[int, int]:
    """The offset behind the last good entry, and the next sequence."""
    at = end = HEAD_BYTES
    sequence, rest = 0, b""
    while True:
        part = folder.disk.read(fd, _SLICE, at)
        at += len(part)
        rest += part
        used, sequence = table.replay(rest, id, sequence)
        end += used
        rest = rest[used:]
        if not part or len(rest) >= _MOST_ENTRY_BYTES:
            return end, sequence


def _read_head(raw: bytes, data_id: int) -> tuple[int, int]:
    """The file's id and format; id 0 if the head is not whole, or of another data file."""
    if len(raw) < HEAD_BYTES or not raw.startswith(_MAGIC):
        return 0, FORMAT
    _, format, _, id, of_data = _HEAD.unpack_from(raw)
    if format > FORMAT:
        raise FormatError(f"{NAME} has format {format}, and this version knows {FORMAT}")
    intact = _SUM.unpack_from(raw, _HEAD.size)[0] == checksum(raw[: _HEAD.size])
    return (int(id) if intact and of_data == data_id else 0), format
