"""Times at which an engine's scheduler sends its description to the daemon: to each daemon, after changes, and once a second.

The daemon forgets an instance that registers again, as after sleep, and refuses one that has not registered. A repeated
description costs nothing. Refuses to know: what is described.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.protocol import DescribeScheduler

_AGAIN_SECONDS = 1.0


class Introduction:
    def __init__(self, dispatcher: Dispatcher, describe: Callable[[], DescribeScheduler]) -> None:
        self._dispatcher = dispatcher
        self._describe = describe
        self._due = 0.0
        dispatcher.on_session.append(lambda hello: self.again())

    def again(self) -> None:
        """The result of `describe` has changed, or the daemon."""
        self._due = 0.0

    def send(self) -> None:
        """Send the description if it is due. If it cannot be sent, it is due again in the next pass."""
        now = time.monotonic()
        usable = self._dispatcher.usable() is not None
        if usable and now >= self._due and self._dispatcher.send(self._describe()) is not None:
            self._due = now + _AGAIN_SECONDS
