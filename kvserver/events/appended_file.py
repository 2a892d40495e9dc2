"""A file to which lines are appended, and which log rotation may move away.

Owns: the descriptor. Refuses to know: the lines.
"""

from __future__ import annotations

import logging
import os
import stat

from kvserver.config import LOG_FD

log = logging.getLogger(__name__)


class AppendedFile:
    """A file open for appending. REQUIRES: one thread calls all but reopen(). OSError if the file cannot be opened, or a write fails."""

    def __init__(self, path: str, mode: int = 0o666) -> None:
        """`mode`: permissions of a file that is made, less the umask."""
        self._path, self._mode = path, mode
        self._reopens = False
        self._open()

    def _open(self) -> None:
        is_redirected = self._path == "/dev/stderr" and stat.S_ISSOCK(os.fstat(2).st_mode)  # see config/stderr.py
        path = f"/proc/self/fd/{LOG_FD}" if is_redirected else self._path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        flags |= os.O_NONBLOCK  # the open of a named pipe fails, and does not wait for a reader
        descriptor = os.open(path, flags, self._mode)
        os.set_blocking(descriptor, True)
        self._file = open(descriptor, "ab")  # noqa: SIM115, until close()
        self.bytes = os.fstat(descriptor).st_size

    def reopen(self) -> None:
        """Open the path anew at the next renew(). From any thread, and from a signal's handler."""
        self._reopens = True

    def renew(self) -> bool:
        """True if a reopen() was due and the file is the one that has the path now. The old file stays if there is none."""
        if not self._reopens:
            return False
        self._reopens = False
        old = self._file
        try:
            self._open()
        except OSError as error:
            log.warning(
                "cannot reopen %s: %s; lines still go to the file that had this name", self._path, error.strerror
            )
            return False
        old.close()
        log.info("reopened %s", self._path)
        return True

    def write(self, line: bytes) -> None:
        self._file.write(line)
        self.bytes += len(line)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
