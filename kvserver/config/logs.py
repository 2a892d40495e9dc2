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
import select
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

from kvserver import __version__
from kvserver.config.settings import Settings

log = logging.getLogger("kvserver")

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
    """Writes to a stream whose reader may stand still, and whose disk may be full. What it does not take at once is dropped and counted."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        text, count = "%d records of the log were dropped: it took no more", self._dropped
        notice = [logging.LogRecord(log.name, logging.WARNING, "", 0, text, (count,), None)] if count else []
        try:
            lines = "".join([f"{self.format(each)}\n" for each in [*notice, record]])
            self._dropped = 0 if self._write(lines.encode(errors="backslashreplace")) else count + 1
        except Exception:
            self.handleError(record)

    def _write(self, raw: bytes) -> bool:
        """False if the stream did not take all of it."""
        fd, place = self.stream.fileno(), select.poll()
        place.register(fd, select.POLLOUT)
        with suppress(OSError):
            while raw and place.poll(0):  # then a write of so many bytes does not wait
                raw = raw[os.write(fd, raw[: select.PIPE_BUF]) :]
        return not raw


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
