"""The system calls below a file tier, in one place, so that tests can put faults there.

Owns: nothing. `calls` are those of the threads that move records; None is the system's.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

from kvserver._native import FileCalls

_FALLOC_FL_KEEP_SIZE = 1
_RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    function = getattr(_libc, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if function(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Disk:
    """System calls of a file tier. A method raises OSError as its call does."""

    calls: FileCalls | None = None

    def open(self, name: str, flags: int, folder: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)

    def allocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def reserve(self, fd: int, size: int) -> None:
        """Space for so many bytes; the file's length stays. Not all file systems can."""
        _call("fallocate", fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(size))

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer at the end of the file only."""
        parts = []
        while size:
            part = os.pread(fd, size, offset)
            if not part:
                break
            parts.append(part)
            size -= len(part)
            offset += len(part)
        return b"".join(parts)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            view = view[written:]
            offset += written

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def replace_file(self, name: str, raw: bytes, folder: int) -> None:
        """Write a file anew as a whole; durable when this returns. OSError: it has the old content or the new one."""
        fd = self.open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, folder)
        try:
            self.write(fd, raw, 0)
            self.sync(fd)
        finally:
            os.close(fd)
        self.replace(f"{name}.new", name, folder)
        self.sync(folder)

    def replace(self, name: str, new_name: str, folder: int) -> None:
        """Rename, durably once `sync` of the folder returned."""
        os.replace(name, new_name, src_dir_fd=folder, dst_dir_fd=folder)

    def exchange(self, name: str, new_name: str, folder: int) -> None:
        """Rename both, durably once `sync` of the folder returned. One that replaces the other where that cannot be done."""
        try:
            _call("renameat2", folder, name.encode(), folder, new_name.encode(), _RENAME_EXCHANGE)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOSYS, errno.EINVAL):
                raise
            self.replace(name, new_name, folder)
