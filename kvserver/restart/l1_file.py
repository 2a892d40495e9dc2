"""The file that is L1's memory, and its state file.

Owns: who may use the file, its lock, size and reserved memory, and how a state is replaced and removed. Refuses to know: what the state
contains (`state`).

The file is on a memory file system. Writing to a page for which that has no memory is a SIGBUS, so only reserved memory is used. The memory
outlives the daemon: it is free again when the file is removed. On hugetlbfs no file can be written, so the state is beside the endpoint there.

Two daemons can use one file, one after the other, with their states in different places. So each use has a number, which is the file's time
of access: random, and so late that neither a mount with relatime nor a change of the file's size replaces it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from kvserver.config import HUGE_PAGE_BYTES, Placement, Settings, file_system_of, huge_pages_at, l1_state_path
from kvserver.copy import chosen_l1
from kvserver.protocol import ConfigError

_RESERVED_AT_ONCE = 256 << 20
_LEAST_BYTES = 64 << 20  # of a file whose size is that of an L1 of --l1-size auto
_FIRST_USE = 2**32 * 10**9  # ns: in the year 2106


class L1File:
    """An open and locked file. ConfigError, naming it, if it cannot be used."""

    kept_if = ""  # for people, behind what stays

    def __init__(self, path: str, endpoint: str = "") -> None:
        self.path = path
        try:
            Path(path).parent.mkdir(mode=0o700, exist_ok=True)
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise self._refusal(error.strerror or str(error)) from None
        try:
            self._check()
        except BaseException:
            os.close(self.fd)
            raise
        state = l1_state_path(path, endpoint)
        self._state, self._new_state = state, state.with_name(f"{state.name}.new")
        self.state_path, self.freed_by = str(state), f"rm {path} {state}"
        self._look()

    def _look(self) -> None:
        self._page_bytes = os.fstatvfs(self.fd).f_bsize
        found = os.fstat(self.fd)
        self.size_before, self.use_before = found.st_size, found.st_atime_ns
        self.size = 0  # bytes that are L1, in whole pages of the file system
        self.reserved_bytes = 0  # the first ones have memory

    # ---- size ---------------------------------------------------------------------------------

    @property
    def allocated_bytes(self) -> int:
        """Memory that the file has already."""
        return os.fstat(self.fd).st_blocks * 512

    @property
    def inode(self) -> int:
        return os.fstat(self.fd).st_ino

    def choose(self, settings: Settings) -> tuple[int, Placement]:
        """Bytes of L1, and their placement. With --l1-size auto L1 is as large as before, if there was one. ConfigError as of choose_l1()."""
        changed = {"l1_huge_pages": self._pages_for(settings.l1_huge_pages)}
        if settings.l1_size == "auto" and self.size_before >= _LEAST_BYTES:
            changed["l1_size"] = str(self.size_before)
        return chosen_l1(msgspec.structs.replace(settings, **changed), self.allocated_bytes)

    def _pages_for(self, wanted: str) -> str:
        """The value of --l1-huge-pages that the file system has."""
        if self._kind == "tmpfs":
            if wanted in HUGE_PAGE_BYTES:
                raise self._refusal(
                    f"on tmpfs there are no explicit huge pages, so --l1-huge-pages {wanted} is refused"
                )
            return "off" if wanted == "off" else "transparent"
        own = huge_pages_at(self.path)
        if not own or wanted not in ("auto", own):
            raise self._refusal(f"its huge pages have {self._page_bytes} bytes, so --l1-huge-pages {wanted} is refused")
        return own

    def resize(self, size: int) -> None:
        """Make L1 so large. ConfigError if the file system has not so much memory. A file that is larger stays so until shrink()."""
        if self._kind == "hugetlbfs":
            size = -(-size // self._page_bytes) * self._page_bytes
        found = os.fstatvfs(self.fd)
        left = found.f_bavail * found.f_frsize + self.allocated_bytes
        if found.f_blocks and size > left:
            raise self._refusal(
                f"L1 is {size} bytes and its file system has {left} left; lower --l1-size or enlarge it"
            )
        try:
            os.ftruncate(self.fd, max(size, self.size_before))
        except OSError as error:
            raise self._refusal(error.strerror or str(error)) from None
        self.size = size
        if self.size_before <= size <= self.allocated_bytes:
            self.reserved_bytes = size

    def shrink(self) -> None:
        """Free the memory beyond L1. REQUIRES: the daemon starts for good."""
        if self.size < self.size_before:
            os.ftruncate(self.fd, self.size)
            if self.allocated_bytes >= self.size:
                self.reserved_bytes = self.size

    def reserve_more(self) -> bool:
        """Reserve the next part; True if there is more. Waits for the kernel. OSError if there is no memory."""
        left = self.size - self.reserved_bytes
        if left > 0:
            part = min(_RESERVED_AT_ONCE, left)
            os.posix_fallocate(self.fd, self.reserved_bytes, part)
            self.reserved_bytes += part
        return left > _RESERVED_AT_ONCE

    # ---- the state ----------------------------------------------------------------------------

    def begin_use(self) -> int:
        """Give the file a new number, which no state has. Returns it. OSError if that fails."""
        os.utime(self.fd, ns=(_FIRST_USE + secrets.randbelow(_FIRST_USE), os.fstat(self.fd).st_mtime_ns))
        return os.fstat(self.fd).st_atime_ns

    def read_state(self) -> bytes | None:
        """The file's bytes; None if there is no file. OSError if it cannot be read, or is not this user's own file."""
        try:
            fd = os.open(self._state, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(1, "it is not a regular file that only this user may use")
            return file.read()

    def remove_state(self) -> None:
        """Durable when it returns. OSError if a later daemon may still find one."""
        for path in (self._new_state, self._state):
            with suppress(FileNotFoundError):
                path.unlink()
                self._sync_folder()

    def write_state(self, parts: Sequence[bytes]) -> None:
        """Durable when it returns. OSError: there is none, or the whole one."""
        new = self._new_state
        with suppress(FileNotFoundError):
            new.unlink()
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise
        new.replace(self._state)
        self._sync_folder()

    def _sync_folder(self) -> None:
        fd = os.open(self._state.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # ---- inside -------------------------------------------------------------------------------

    def _check(self) -> None:
        found = os.fstat(self.fd)
        if not stat.S_ISREG(found.st_mode):
            raise self._refusal("it is not a regular file")
        if found.st_uid != os.geteuid():
            raise self._refusal(f"it belongs to uid {found.st_uid}, and this is uid {os.geteuid()}")
        if found.st_mode & 0o077:
            raise self._refusal("other users may use it: chmod 600")
        self._kind = file_system_of(found.st_dev)
        if self._kind not in ("tmpfs", "hugetlbfs"):
            kind = self._kind or "an unknown file system"
            raise self._refusal(f"it is on {kind}; name a file on tmpfs or hugetlbfs, as below /dev/shm")
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal("another daemon uses it") from None

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"--l1-file {self.path}: {why}")
