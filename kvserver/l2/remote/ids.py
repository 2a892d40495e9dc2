"""Ids of scopes in a shared store, and the highest one of each scope that this daemon has seen.

An id is a number of 8 bytes, big-endian, then 16 random bytes; of two ids the greater one counts. Earlier versions wrote 16 random
bytes: such an id has number 0. A store may go back in time: a snapshot, a lagging replica, a restored bucket. So an id below the
highest one is never believed again, and the highest ones are kept in a folder of this machine where there is one.

Owns: the form of ids, and the file. Refuses to know: what an id is of. Any thread may use it.

The file: a msgpack map, then its XXH3-64. It is replaced and fsynced before an id that it did not have is used.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Mapping

import msgspec

from kvserver._native import checksum
from kvserver.l2.files.disk import Disk

log = logging.getLogger(__name__)

_NUMBER_BYTES, _RANDOM_BYTES = 8, 16
_MOST_SCOPES = 1024
_MOST_WAIT_SECONDS = 2.0  # for the disk
_NOT_NOTICED = "after a restart a store that goes back in time is not noticed"
_MOST_BYTES = 1 << 20
_SUM = struct.Struct("<Q")


def id_of(value: bytes | None) -> bytes:
    """The id that a store has; less than all others if it has none."""
    if value is None or len(value) == _NUMBER_BYTES + _RANDOM_BYTES:
        return value or b""
    return bytes(_NUMBER_BYTES) + value


def new_id(above: bytes) -> bytes:
    """An id of its own, with the next number."""
    return (_number(above) + 1).to_bytes(_NUMBER_BYTES, "big") + os.urandom(_RANDOM_BYTES)


def meaning_of(id: bytes) -> bytes:
    """The bytes of an id that a generation is a digest of. An id of an earlier version keeps its meaning there, so its objects stay."""
    return id.removeprefix(bytes(_NUMBER_BYTES))


def _number(id: bytes) -> int:
    return int.from_bytes(id[:_NUMBER_BYTES], "big")


class _Kept(msgspec.Struct):
    floor: int = 0  # the greatest number that was dropped: no scope's id is below it
    ids: dict[bytes, bytes] = {}  # by scope


class HighestIds:
    """Highest ids seen. `folder`: where the file is; "" if there is none, and then nothing outlasts the process."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = folder, name
        self._disk = Disk()
        self._changed = threading.Condition()  # guards what follows
        self._version = self._durable = 0  # of _kept: the present one, and the one on the disk
        self._writes = False  # a thread writes, until it has written the present one
        self._late = False  # it has not ended in time: the disk hangs
        self._kept = self._read() if folder else _Kept()

    def least(self, scope: bytes) -> bytes:
        """Highest id seen of the scope, or the least possible one; no lower id counts. Never waits for the disk."""
        return self._kept.ids.get(scope) or self._kept.floor.to_bytes(_NUMBER_BYTES, "big")

    def raise_to(self, ids: Mapping[bytes, bytes]) -> None:
        """Remember those of them that are higher; on the disk, too, when this returns, unless that fails or hangs."""
        with self._changed:
            higher = {scope: id for scope, id in ids.items() if self._counts(scope, id)}
            if not higher:
                return
            kept = _Kept(self._kept.floor, self._kept.ids | higher)
            while len(kept.ids) > _MOST_SCOPES:
                # The lowest one: most scopes were never cleared, and have number 1, so that the floor harms no other.
                scope = min(kept.ids, key=lambda scope: kept.ids[scope])
                kept.floor = max(kept.floor, _number(kept.ids.pop(scope)))
            self._kept = kept
            self._version += 1
            if self._folder:
                self._wait_for_disk(self._version)

    def _counts(self, scope: bytes, id: bytes) -> bool:
        """True if the id is above the known one. Where there is no room, an id that the floor allows for all scopes is not kept."""
        kept = self._kept
        if scope in kept.ids or len(kept.ids) < _MOST_SCOPES:
            return id > kept.ids.get(scope, b"")
        return _number(id) > kept.floor

    def _wait_for_disk(self, version: int) -> None:
        if not self._writes:
            self._writes = True
            threading.Thread(target=self._write_all, name=f"l2-{self._name}", daemon=True).start()
        if not self._late and not self._changed.wait_for(lambda: self._durable >= version, _MOST_WAIT_SECONDS):
            self._late = True
            log.warning("%s/%s: %s", self._folder, self._name, f"the disk did not write it in time; {_NOT_NOTICED}")

    def _write_all(self) -> None:
        with self._changed:
            while self._durable < self._version:
                version, raw = self._version, msgspec.msgpack.encode(self._kept)
                self._changed.release()
                try:
                    self._write(raw)
                finally:
                    self._changed.acquire()
                self._durable, self._late = version, False
                self._changed.notify_all()
            self._writes = False

    def _read(self) -> _Kept:
        try:
            folder = _open_folder(self._folder)
            try:
                fd = self._disk.open(self._name, os.O_RDONLY, folder)
                try:
                    raw = self._disk.read(fd, _MOST_BYTES, 0)
                finally:
                    os.close(fd)
            finally:
                os.close(folder)
        except FileNotFoundError:
            return _Kept()
        except OSError as error:
            log.warning("%s/%s cannot be read: %s", self._folder, self._name, error.strerror)
            return _Kept()
        body, found = raw[: -_SUM.size], raw[-_SUM.size :]
        if found == _SUM.pack(checksum(body)):
            return msgspec.msgpack.decode(body, type=_Kept)
        log.warning("%s/%s is damaged: what it had is not known any more", self._folder, self._name)
        return _Kept()

    def _write(self, body: bytes) -> None:
        try:
            folder = _open_folder(self._folder)
            try:
                self._disk.replace_file(self._name, body + _SUM.pack(checksum(body)), folder)
            finally:
                os.close(folder)
        except OSError as error:
            log.warning("%s/%s cannot be written: %s; %s", self._folder, self._name, error.strerror, _NOT_NOTICED)


def _open_folder(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
