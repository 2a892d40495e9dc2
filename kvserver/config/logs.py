"""The form of log records: one line of text, or of JSON, on stderr.

Owns: the form, also of warnings and uncaught exceptions. Refuses to know: what is logged.
Rule of levels: a change of state is one line at info; the steps of a single request are debug.
Fields of a record are its `extra`, named as the labels of metrics: `instance_id`, `model_name`, `rank`, `tier`.
structlog and python-json-logger were compared. Neither does more here than `JsonLines`, and each is one more package to install.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

from kvserver import __version__
from kvserver.config.settings import Settings

log = logging.getLogger("kvserver")

MOST_LINES = 10_000  # that wait to be written
_LAST_SECONDS = 1.0  # for these at the end
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "version": __version__,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LogHandler(logging.Handler):
    """Hands lines to a thread, which writes them: the log's reader may stand still, and its disk may hang or be full.

    A line that finds MOST_LINES waiting is dropped, and so is one that could not be written. Both are counted.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream
        # Signals and destructors log in the midst of anything, also of emit(): so a queue and a lock that may be entered again.
        self._lines = queue.SimpleQueue[str | threading.Event]()  # an event is set in its turn
        self._dropped = 0  # guarded by:
        self._counting = threading.RLock()
        self._is_cut = False  # what was written ends within a line
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._lines.qsize() < MOST_LINES:
                self._lines.put(self.format(record))
            else:
                self._count_dropped(1)
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, _LAST_SECONDS at most."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(_LAST_SECONDS)

    def _count_dropped(self, more: int) -> int:
        """Returns their number; a negative one takes these away."""
        with self._counting:
            self._dropped += more
            return self._dropped

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            if count := self._count_dropped(0):
                text = "%d records of the log were dropped: it took no more"
                notice = logging.LogRecord(log.name, logging.WARNING, "", 0, text, (count,), None)
                if self._write(self.format(notice)):
                    self._count_dropped(-count)
            if not self._write(line):
                self._count_dropped(1)

    def _write(self, line: str) -> bool:
        raw = f"{line}\n".encode(errors="backslashreplace")
        raw = b"\n" + raw if self._is_cut else raw
        try:
            while raw:
                raw = raw[os.write(self.stream.fileno(), raw) :]
                self._is_cut = bool(raw)
        except (OSError, ValueError):  # the disk is full, or the reader has ended
            return False
        return True


def set_up_logging(settings: Settings) -> None:
    handler = LogHandler(sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    sys.unraisablehook = _uncaught_in_destructor
    threading.excepthook = _uncaught_in_thread


def log_refused_start(reason: str, log_format: str) -> None:
    """Report why the daemon does not start. The settings may be what is wrong, so the format is given by itself."""
    if log_format != "json":
        with suppress(OSError):  # the exit code states it, too
            print(f"kvserver: {reason}", file=sys.stderr)
        return
    set_up_logging(Settings(log_format="json"))
    log.critical("%s", reason)


def _uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    log.critical("uncaught %s", kind.__name__, exc_info=(kind, error, traceback))


def _uncaught_in_destructor(hook: sys.UnraisableHookArgs) -> None:
    error = hook.exc_value or hook.exc_type()
    text = hook.err_msg or "Exception ignored in"
    log.error("%s %r", text, hook.object, exc_info=(hook.exc_type, error, hook.exc_traceback))


def _uncaught_in_thread(hook: threading.ExceptHookArgs) -> None:
    assert hook.exc_value is not None
    name = hook.thread.name if hook.thread else "?"
    log.critical(
        "thread %s: uncaught %s",
        name,
        hook.exc_type.__name__,
        exc_info=(hook.exc_type, hook.exc_value, hook.exc_traceback),
    )
