"""The folder of a file tier and its data file.

Owns: who may use the folder, the lock that one daemon has on it, and how much of `size` each file may use. Refuses to know:
what the files contain, but for the data file's first page.

The data file's first page: magic, u32 format, u32 page bytes, u64 id, XXH3-64 of these; the rest is zero. The id ties the
journal to the file: a file that was replaced has none of the journal's records.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass

from kvserver._native import checksum
from kvserver.cache import page_bytes_for
from kvserver.l2.files.disk import Disk
from kvserver.protocol import ConfigError

_MAGIC = b"KVSL2DAT"
FORMAT = 1
_HEAD = struct.Struct("<8sIIQ")
_SUM = struct.Struct("<Q")
_DIRECT_BYTES = 4096  # whole ones at aligned offsets and addresses suit O_DIRECT on all known disks
_DATA = "data"
_OTHERS = ("journal", "journal.new", "generations")
_LEAST_SPARE_BYTES = 16 << 10  # of a small file of generations, and its replacement
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class FormatError(Exception):
    """A file is of a format of later versions; it stays untouched."""


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


class Folder:
    """An open and locked folder, and its data file. ConfigError, naming the folder, if it cannot be used."""

    def __init__(self, path: str, size: int, read_only: bool, disk: Disk) -> None:
        self.path = path
        self.disk = disk
        self.journal_bytes = journal_bytes_of(size)
        self.read_only_reason = "the tier is configured read-only" if read_only else ""
        self.fd = _open_folder(path)
        try:
            self._check_owner()
            self._lock()
            self.data = self._open_data(size)
        except BaseException:
            os.close(self.fd)
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
        """Why a restart would not find these files; "" if it would. Waits for the file system."""
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
        os.close(self.fd)

    def _check_owner(self) -> None:
        found = os.fstat(self.fd)
        if found.st_uid != os.geteuid():
            raise self._refusal(f"it belongs to uid {found.st_uid}, and this is uid {os.geteuid()}")
        if found.st_mode & 0o022:
            raise self._refusal("other users may write to it: chmod 700")

    def _lock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal("another daemon uses it") from None
        except OSError as error:
            raise self._refusal(f"it cannot be locked: {error.strerror}") from None

    def _open_data(self, size: int) -> DataFile:
        page_bytes = page_bytes_for(size)
        pages = data_bytes_of(size) // page_bytes
        fd = -1
        try:
            fd = self._open_writable(pages * page_bytes) if not self.read_only_reason else -1
            if fd < 0:
                fd = self.open_file(_DATA, os.O_RDONLY)
                pages = min(pages, os.fstat(fd).st_size // page_bytes)
                if not pages:
                    raise self._refusal("it is read-only, and has no records")
            return self._with_head(fd, page_bytes, pages)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise self._refusal(error.strerror or str(error)) from None
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise

    def _open_writable(self, size: int) -> int:
        """The data file with all its space; -1 if the folder is read-only."""
        try:
            fd = self.open_file(_DATA, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            self.read_only_reason = f"the folder is read-only: {error.strerror}"
            return -1
        before = os.fstat(fd)
        all_files = size + 2 * self.journal_bytes + _LEAST_SPARE_BYTES
        try:
            if before.st_size > size:
                self.disk.truncate(fd, size)
            free = os.fstatvfs(fd)
            if free.f_bavail * free.f_frsize + self._used_bytes() < all_files:  # else a full disk would be left behind
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.disk.allocate(fd, size)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(fd, min(before.st_size, size))
            os.close(fd)
            raise self._refusal(
                f"{all_files} bytes for it could not be had: {error.strerror}; give a smaller ?size="
            ) from None
        return fd

    def _used_bytes(self) -> int:
        """What its files use of the file system."""
        used = 0
        for name in (_DATA, *_OTHERS):
            with suppress(FileNotFoundError):
                used += 512 * os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_blocks
        return used

    def _with_head(self, fd: int, page_bytes: int, pages: int) -> DataFile:
        """The file, opened for direct I/O if its file system can, with a head."""
        direct = self._direct(fd)
        used = direct if direct >= 0 else fd
        raw = self.disk.read(fd, _HEAD.size + _SUM.size, 0)
        id = self._read_head(raw, page_bytes)
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

    def _read_head(self, raw: bytes, page_bytes: int) -> int:
        """The file's id; 0 if there is no head, or one for pages of another size."""
        if len(raw) < _HEAD.size + _SUM.size or not raw.startswith(_MAGIC):
            return 0
        _, format, bytes_of_page, id = _HEAD.unpack_from(raw)
        if format > FORMAT:
            raise self._refusal(f"its data file has format {format}, and this version knows {FORMAT}")
        intact = _SUM.unpack_from(raw, _HEAD.size)[0] == checksum(raw[: _HEAD.size])
        return int(id) if intact and bytes_of_page == page_bytes else 0

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
