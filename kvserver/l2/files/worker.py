"""Thread of a file tier for everything that may wait for the disk and is no record.

Owns: the thread, and the order of its tasks. What follows from a task's end runs in the loop's thread, by finish().
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from kvserver.l2.files.folder import FormatError

log = logging.getLogger(__name__)

Then = Callable[[Any, Exception | None], None]  # the result, or why there is none


@dataclass(frozen=True)
class _Task:
    call: Callable[[], Any]
    then: Then


class FileWorker:
    """Thread and its queue of tasks. REQUIRES: the loop's thread uses it; `notify` may be called by any thread."""

    def __init__(self, name: str, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._ended: deque[tuple[_Task, Any, Exception | None]] = deque()
        self._began_ns = 0  # of the task that runs; 0: none
        self._thread = threading.Thread(target=self._run, name=f"l2-{name}", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], Any], then: Then) -> None:
        """Run `call` after all tasks before it; then `then` in finish()."""
        self._tasks.put(_Task(call, then))

    def finish(self) -> None:
        """Run what follows from the tasks that have ended."""
        while self._ended:
            task, result, error = self._ended.popleft()
            task.then(result, error)

    @property
    def stalled_ns(self) -> int:
        """Nanoseconds that the present task has been running; 0 without one."""
        began_ns = self._began_ns
        return time.monotonic_ns() - began_ns if began_ns else 0

    def close(self, deadline_ns: int) -> bool:
        """End after the tasks that wait. Waits until the deadline; false if the thread still runs."""
        self._tasks.put(None)
        self._thread.join(max(0.0, (deadline_ns - time.monotonic_ns()) * 1e-9))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._began_ns = time.monotonic_ns()
            try:
                self._ended.append((task, task.call(), None))
            except (OSError, FormatError) as error:
                self._ended.append((task, None, error))
            except Exception as error:  # a bug, which must not end the thread
                log.exception("a task of %s failed", threading.current_thread().name)
                self._ended.append((task, None, error))
            self._began_ns = 0
            self._notify()
