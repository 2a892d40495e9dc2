"""The generation of each namespace: what a clear changes, durably.

A record, its journal entry and its name in the index have the generation that their namespace had when they were written. Those
of another generation are never found again. A generation only grows, by a random number, so none returns, even after a clear that
a crash interrupted.

The file has a copy beside it, and the one with the greater last generation counts. So a file that was lost, damaged or replaced
by an older one brings back nothing that was cleared, and loses nothing. A restored folder cannot be noticed.

The file: magic, u32 format, u32 clears, u64 base, then for each clear u64 generation, u16 bytes, its prefix; last XXH3-64 of all
that. A later clear is a later one in the file. If neither file is whole there is a new base: nothing that was cleared comes back,
and nothing else either. Generations of format 1 are random ones, which do not grow.

Owns: the rule which generation a namespace has, and the file `generations`.
"""

from __future__ import annotations

import os
import secrets
import struct

from kvserver._native import checksum
from kvserver.l2.files.folder import Folder, FormatError

NAME, COPY = "generations", "generations.copy"
FORMAT = 2
MOST_CLEARS = 4096
_MAGIC = b"KVSL2GEN"
_HEAD = struct.Struct("<8sIIQ")
_CLEAR = struct.Struct("<QH")
_SUM = struct.Struct("<Q")
_MOST_BYTES = 1 << 20
_MOST_CACHED = 4096


def _new_generation(last: int = 0) -> int:
    """Above the last one of all; far enough that two folders which begin with one last generation go on with others."""
    return last + 1 + secrets.randbits(32 if last else 62)


class FolderGenerations:
    """Generations of one folder. REQUIRES: one thread uses it."""

    def __init__(self, base: int = 0, clears: dict[bytes, int] | None = None) -> None:
        self._base = base or _new_generation()
        self._clears = clears or {}  # by prefix, the last one last
        self._known: dict[bytes, int] = {}

    @property
    def last(self) -> int:
        """The greatest generation of all so far."""
        return max(self._base, *self._clears.values()) if self._clears else self._base

    def of(self, namespace: bytes) -> int:
        """The generation of the last clear whose prefix the namespace has, else the base."""
        found = self._known.get(namespace)
        if found is None:
            if len(self._known) >= _MOST_CACHED:
                self._known.clear()
            prefixes = [prefix for prefix in self._clears if namespace.startswith(prefix)]
            found = self._known[namespace] = self._clears[prefixes[-1]] if prefixes else self._base
        return found

    def clear(self, prefix: bytes) -> None:
        """All namespaces with this prefix get a new generation; of too many clears, all namespaces."""
        self._known.clear()
        new = _new_generation(self.last)
        self._clears = {other: number for other, number in self._clears.items() if not other.startswith(prefix)}
        if prefix and len(self._clears) < MOST_CLEARS:
            self._clears[prefix] = new
        else:
            self._base, self._clears = new, {}

    def encode(self) -> bytes:
        parts = [_HEAD.pack(_MAGIC, FORMAT, len(self._clears), self._base)]
        parts += [_CLEAR.pack(number, len(prefix)) + prefix for prefix, number in self._clears.items()]
        raw = b"".join(parts)
        return raw + _SUM.pack(checksum(raw))


def decode(raw: bytes, name: str = NAME) -> FolderGenerations | None:
    """Generations in the file; None if the file is not whole. Raises FormatError if it is of a later version."""
    if len(raw) < _HEAD.size + _SUM.size or not raw.startswith(_MAGIC):
        return None
    _, format, count, base = _HEAD.unpack_from(raw)
    if format > FORMAT:
        raise FormatError(f"{name} has format {format}, and this version knows {FORMAT}")
    body = raw[: -_SUM.size]
    if _SUM.unpack(raw[-_SUM.size :])[0] != checksum(body):
        return None
    clears, at = {}, _HEAD.size
    for _ in range(count):
        number, size = _CLEAR.unpack_from(body, at)
        at += _CLEAR.size
        clears[body[at : at + size]] = number
        at += size
    return FolderGenerations(base, clears)


def read(folder: Folder) -> tuple[FolderGenerations, bool]:
    """The last generations of a file that is whole, and whether both files have them."""
    files = [_read_file(folder, name) for name in (NAME, COPY)]
    whole = [found for found in files if found is not None]
    if not whole:
        return FolderGenerations(), False
    found = max(whole, key=lambda found: found.last)
    return found, [each.last for each in whole] == [found.last] * len(files)


def _read_file(folder: Folder, name: str) -> FolderGenerations | None:
    try:
        fd = folder.open_file(name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return decode(folder.disk.read(fd, _MOST_BYTES, 0), name)
    finally:
        os.close(fd)


def write(folder: Folder, raw: bytes) -> None:
    """Replace both files; durable when this returns. OSError if they may not be."""
    for name in (NAME, COPY):
        folder.disk.replace_file(name, raw, folder.fd)
