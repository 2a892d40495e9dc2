"""The folder of a file tier and its data file.

One daemon locks the folder and the file `lock` in it. NFS shows other machines only the lock of a file, and some file systems
lock no folder.

The data file's first page: magic, u32 format, u32 page bytes, u64 id, XXH3-64 of these; the rest is zero. The id ties the journal
to the file: after the file was replaced no record of the journal counts.

Owns: who may use the folder, the locks that one daemon has on it, and how much of `size` each file may use. Refuses to know: what
the files contain, but for the data file's first page.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from kvserver._native import checksum
from kvserver.cache import page_bytes_for
from kvserver.l2.files.disk import Disk
from kvserver.protocol import ConfigError

log = logging.getLogger(__name__)

_MAGIC = b"KVSL2DAT"
FORMAT = 1
_HEAD = struct.Struct("<8sIIQ")
_SUM = struct.Struct("<Q")
_DIRECT_BYTES = 4096  # whole ones at aligned offsets and addresses suit O_DIRECT on all known disks
_DATA, _LOCK = "data", "lock"
_OTHERS = ("journal", "journal.new", "generations")
_LEAST_SPARE_BYTES = 16 << 10  # of a small file of generations, and its replacement
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # of this kind, or none at all


class FormatError(Exception):
    """File of a later version's format. It stays untouched."""


def journal_bytes_of(size: int) -> int:
    """Bytes of `size` that are for the journal, and as many for the file that replaces it."""
    return max(size // 128, min(4 << 20, size // 16)) // _DIRECT_BYTES * _DIRECT_BYTES


def data_bytes_of(size: int) -> int:
    """Bytes of `size` that are for records: all but those of the journals, and some for the generations."""
    return size - 2 * journal_bytes_of(size) - min(1 << 20, size // 64)


@dataclass(frozen=True)
class DataFile:
    fd: int
    id: int
    page_bytes: int
    pages: int
    direct: bool  # by O_DIRECT


class _Head(NamedTuple):
    """The fields of the data file's first page; zeros if there is none."""

    id: int = 0
    page_bytes: int = 0


class Folder:
    """An open and locked folder, and its data file. Raises ConfigError, which names the folder, if it cannot be used."""

    def __init__(self, path: str, size: int, read_only: bool, disk: Disk) -> None:
        self.path = path
        self.disk = disk
        self.journal_bytes = journal_bytes_of(size)
        self.read_only_reason = "the tier is configured read-only" if read_only else ""
        self.fd, self._lock_fd = _open_folder(path), -1
        try:
            self._check_owner()
            self._lock()
            self.data = self._open_data(size)
        except BaseException:
            self._unlock()
            raise

    def open_file(self, name: str, flags: int) -> int:
        """A descriptor of a file of this folder. OSError if there is none, or it is not this user's own file."""
        fd = self.disk.open(name, flags, self.fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            os.close(fd)
            raise PermissionError(errno.EPERM, "not a regular file of this user", f"{self.path}/{name}")
        return fd

    def lost(self) -> str:
        """Reason why a restart would not find these files; "" if it would. Waits for the file system."""
        places = ((self.path, None, self.fd), ("data", self.fd, self.data.fd))
        for name, folder, fd in places:
            try:
                if os.path.samestat(os.stat(name, dir_fd=folder), os.fstat(fd)):
                    continue
            except OSError as error:
                return f"{self.path} is no longer there ({error.strerror}): put it back, or restart the daemon"
            return f"{self.path} was replaced: put it back, or restart the daemon"
        return ""

    def close(self) -> None:
        """Unlock the folder. Threads that still use the data file have descriptors of their own."""
        os.close(self.data.fd)
        self._unlock()

    def cut(self) -> None:
        """Truncate the data file to `size`. REQUIRES: every file is of a format known here."""
        if os.fstat(self.data.fd).st_size > (size := self.data.pages * self.data.page_bytes):
            self.disk.truncate(self.data.fd, size)

    def _check_owner(self) -> None:
        found = os.fstat(self.fd)
        if found.st_uid != os.geteuid():
            raise self._refusal(f"it belongs to uid {found.st_uid}, and this is uid {os.geteuid()}")
        if found.st_mode & 0o022:
            raise self._refusal("other users may write to it: chmod 700")

    def _lock(self) -> None:
        locked = self._locked(self.fd)
        try:
            self._lock_fd = self.open_file(_LOCK, os.O_RDWR | (0 if self.read_only_reason else os.O_CREAT))
        except OSError as error:
            if error.errno not in (*_READ_ONLY, errno.ENOENT):
                raise self._refusal(f"its file {_LOCK} cannot be opened: {error.strerror}") from None
        else:
            locked = self._locked(self._lock_fd) or locked
        if not locked:
            raise self._refusal("it cannot be locked: its file system has no locks")

    def _locked(self, fd: int) -> bool:
        """False: the file system cannot lock this. ConfigError if another daemon has done so."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal("another daemon uses it") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise self._refusal(f"it cannot be locked: {error.strerror}") from None
            return False
        return True

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        os.close(self.fd)

    def _open_data(self, size: int) -> DataFile:
        fd = -1
        try:
            if not self.read_only_reason:
                fd = self._open_writable()
            if fd < 0:
                fd = self._open_readable()
            found = self._read_head(self.disk.read(fd, _HEAD.size + _SUM.size, 0))
            page_bytes = self._page_bytes(size, found)
            pages = data_bytes_of(size) // page_bytes
            if self.read_only_reason:
                pages = min(pages, os.fstat(fd).st_size // page_bytes)
                if not pages:
                    raise self._refusal(f"{self.read_only_reason}, and it has no records")
            else:
                self._allocate(fd, pages * page_bytes)
            return self._with_head(fd, found.id if found.page_bytes == page_bytes else 0, page_bytes, pages)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise self._refusal(error.strerror or str(error)) from None
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise

    def _page_bytes(self, size: int, found: _Head) -> int:
        """The file's page size, so that records stay, unless `size` needs a larger one."""
        least = page_bytes_for(size)
        if 0 < found.page_bytes < least:
            log.warning(
                "L2 file://%s: size=%d needs pages of %d bytes and its file has pages of %d: the tier begins empty",
                self.path, size, least, found.page_bytes,
            )  # fmt: skip
        return max(least, found.page_bytes)

    def _open_writable(self) -> int:
        """The data file; -1 if the folder is read-only."""
        try:
            return self.open_file(_DATA, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            self.read_only_reason = f"the folder is read-only: {error.strerror}"
            return -1

    def _open_readable(self) -> int:
        """The data file of a read-only folder."""
        try:
            return self.open_file(_DATA, os.O_RDONLY)
        except FileNotFoundError:
            raise self._refusal(f"{self.read_only_reason}, and it has no records") from None

    def _allocate(self, fd: int, size: int) -> None:
        """All the space of the data file; what it has beyond stays until `cut`."""
        before = os.fstat(fd).st_size
        all_files = size + 2 * self.journal_bytes + _LEAST_SPARE_BYTES
        try:
            free = os.fstatvfs(fd)
            if free.f_bavail * free.f_frsize + self._used_bytes() < all_files:  # else a full disk would be left behind
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.disk.allocate(fd, size)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(fd, before)
            raise self._refusal(
                f"{all_files} bytes for it could not be had: {error.strerror}; give a smaller ?size="
            ) from None

    def _used_bytes(self) -> int:
        """Bytes that the tier's files use of the file system."""
        used = 0
        for name in (_DATA, *_OTHERS):
            with suppress(FileNotFoundError):
                used += 512 * os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_blocks
        return used

    def _with_head(self, fd: int, id: int, page_bytes: int, pages: int) -> DataFile:
        """The file, opened for direct I/O if its file system can, with a head of its own if it has no `id`."""
        direct = self._direct(fd)
        used = direct if direct >= 0 else fd
        if not id and not self.read_only_reason:
            id = secrets.randbits(63) + 1
            head = _HEAD.pack(_MAGIC, FORMAT, page_bytes, id)
            with mmap.mmap(-1, _DIRECT_BYTES) as page:
                page.write(head + _SUM.pack(checksum(head)))
                os.pwritev(used, [page], 0)
        if direct >= 0:
            os.close(fd)
        return DataFile(used, id, page_bytes, pages, direct >= 0)

    def _direct(self, fd: int) -> int:
        """A descriptor for direct I/O; -1 if that does not work here."""
        try:
            direct = self.open_file(_DATA, (os.O_RDONLY if self.read_only_reason else os.O_RDWR) | os.O_DIRECT)
        except OSError:
            return -1
        try:
            with mmap.mmap(-1, _DIRECT_BYTES) as page:
                os.preadv(direct, [page], 0)
        except OSError:
            os.close(direct)
            return -1
        return direct

    def _read_head(self, raw: bytes) -> _Head:
        if len(raw) < _HEAD.size + _SUM.size or not raw.startswith(_MAGIC):
            return _Head()
        _, format, page_bytes, id = _HEAD.unpack_from(raw)
        if format > FORMAT:
            raise self._refusal(f"its data file has format {format}, and this version knows {FORMAT}")
        intact = _SUM.unpack_from(raw, _HEAD.size)[0] == checksum(raw[: _HEAD.size])
        return _Head(id, page_bytes) if intact else _Head()

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"--l2 file://{self.path}: {why}")


def _open_folder(path: str) -> int:
    try:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            if not os.path.isdir(path):
                raise ConfigError(f"--l2 file://{path}: the folder cannot be made: {error.strerror}") from None
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"--l2 file://{path}: {error.strerror}") from None
