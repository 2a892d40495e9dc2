"""The form of log lines: one line of text, or of JSON, on stderr.

Owns: the form, also of warnings and uncaught exceptions. Refuses to know: what is logged.
Rule of levels: a change of state is one line at info; the steps of a single request are debug.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any

from kvserver.config.settings import Settings

log = logging.getLogger("kvserver")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(settings: Settings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    log.critical("uncaught %s", kind.__name__, exc_info=(kind, error, traceback))


def _uncaught_in_thread(hook: threading.ExceptHookArgs) -> None:
    assert hook.exc_value is not None
    name = hook.thread.name if hook.thread else "?"
    log.critical(
        "thread %s: uncaught %s",
        name,
        hook.exc_type.__name__,
        exc_info=(hook.exc_type, hook.exc_value, hook.exc_traceback),
    )
