"""Descriptor 2 of the daemon, to which libraries write lines of their own: each becomes a record of the log.

valkey-glide prints errors whatever its logger is set to, and so may an observer of KV events. A library in Rust or C writes to
the descriptor, which no hook of Python sees. So descriptor 2 becomes a socket, whose lines a thread logs as warnings of the
logger `kvserver.stderr`. Records go to a duplicate of the former descriptor, with the number LOG_FD.

A line that a library writes just before it aborts the process is no record: native code copies it to the log as it is. Native
code that writes more than the socket's buffer (200 KB) while it has the GIL would wait for ever. None that the daemon loads does.

Owns: descriptor 2, its thread. Refuses to know: the form of records (`logs`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from kvserver._native import copy_last_words, next_lines
from kvserver.config.logs import LogHandler

log = logging.getLogger("kvserver.stderr")

LOG_FD = 10  # unless that was inherited: by it `kvserver doctor --bundle` finds the log
_LAST_LINES_SECONDS = 1.0


@contextlib.contextmanager
def library_lines_logged() -> Iterator[None]:
    """Log the lines that libraries write to stderr. REQUIRES: set_up_logging() was called; no other thread writes to stderr."""
    _open_if_closed()
    former = os.fdopen(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, LOG_FD), "w", 1, errors="backslashreplace")
    _write_records_to(former)  # before they would come back as lines
    read, write = socket.socketpair()
    os.dup2(write.fileno(), 2)
    write.close()
    logging.raiseExceptions = False  # a report of a full disk would come back as a line, and fail again
    if faulthandler.is_enabled():
        faulthandler.enable(file=former)
    copy_last_words(read.fileno(), former.fileno())
    reader = threading.Thread(target=_log_lines, args=(read,), name="stderr", daemon=True)
    reader.start()
    try:
        yield
    finally:
        copy_last_words(-1, -1)
        os.dup2(former.fileno(), 2)  # closes the last writing end: the thread reads the rest, and ends
        reader.join(_LAST_LINES_SECONDS)
        _write_records_to(sys.stderr)
        if faulthandler.is_enabled():
            faulthandler.enable(file=2)
        former.close()


def _open_if_closed() -> None:
    try:
        os.fstat(2)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)


def _write_records_to(stream: TextIO) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogHandler):
            handler.flush()
            handler.stream = stream


def _log_lines(read: socket.socket) -> None:
    with read:
        while lines := next_lines(read.fileno()):
            for line in lines.decode(errors="replace").split("\n"):
                if text := line.strip():
                    log.warning("%s", text)
