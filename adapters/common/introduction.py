"""When an engine's scheduler sends its description to the daemon: to each daemon, after changes, and from time to time.

Refuses to know: what is described.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvserver.adapters.common.dispatcher import Dispatcher

from kvserver.protocol import DescribeScheduler, Error, ErrorCode

_AGAIN_SECONDS = (
    5.0  # the daemon forgets an instance that registers again, as after sleep; a repeated description costs nothing
)
_REFUSED_SECONDS = 0.5
_UNKNOWN = {ErrorCode.UNKNOWN_INSTANCE.value, ErrorCode.NOT_READY.value}


class Introduction:
    """again() when the result of `describe` has changed."""

    def __init__(self, dispatcher: Dispatcher, describe: Callable[[], DescribeScheduler]) -> None:
        self._dispatcher = dispatcher
        self._describe = describe
        self._number: int | None = None  # of the last one
        self._due = 0.0
        dispatcher.on_session.append(lambda hello: self.again())
        dispatcher.on_refusal.append(self._refused)

    def again(self) -> None:
        self._due = 0.0

    def send(self) -> None:
        """Send the description if it is due. If it cannot be sent, it is due again in the next pass."""
        now = time.monotonic()
        if now < self._due or self._dispatcher.usable() is None:
            return
        self._number = self._dispatcher.send(self._describe())
        if self._number is not None:
            self._due = now + _AGAIN_SECONDS

    def _refused(self, number: int, error: Error) -> None:
        """A daemon that does not know the instance has no description of it either, whatever message it refused."""
        if number == self._number or error.code in _UNKNOWN:
            self._due = min(self._due, time.monotonic() + _REFUSED_SECONDS)
