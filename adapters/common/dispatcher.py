"""The scheduler's side of the link: sends messages to the daemon, and passes each reply to the part that sent the message.

Owns: the session in use, and the messages in it without a reply. Refuses to know: what messages mean. Used by the engine's
scheduler thread alone; only wait() waits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.link import Link, Session
from kvserver.adapters.common.log import log
from kvserver.protocol import Error, ErrorCode, HelloReply, Reply, Request

# Errors of another daemon than the session's: it replaced a dead one, and this engine's workers are registered with it.
_RENEW = {
    ErrorCode.UNKNOWN_INSTANCE.value,
    ErrorCode.BAD_KEYS.value,
    ErrorCode.DUPLICATE_INSTANCE.value,
    ErrorCode.REPORT_GAP.value,
}

OnReply: TypeAlias = Callable[[Reply], None]


class Dispatcher:
    def __init__(self, link: Link, counters: Counter[str], faults: Faults) -> None:
        self.on_session: list[Callable[[HelloReply | None], None]] = []  # another daemon than before, or none
        self.on_refusal: list[Callable[[int, Error], None]] = []  # any message was refused: its number
        self.replied_at = 0.0
        self._link = link
        self._counters = counters
        self._faults = faults
        self._session: Session | None = None
        self._on_reply: dict[int, OnReply] = {}  # by message number

    def usable(self) -> HelloReply | None:
        """The daemon's Hello, if messages can be sent. Messages of a former session will not be answered."""
        usable, current = self._link.usable(), self._link.session
        if current is not self._session:
            self.close()
            self._session = current
            for begin in self.on_session:
                with self._faults.guarded("a new session"):
                    begin(current.hello if current is not None else None)
        return usable.hello if usable is not None and usable is current else None

    def send(self, message: Request, on_reply: OnReply | None = None) -> int | None:
        """The message's number; None if it cannot be sent. A message without `on_reply` is a notice.

        After a notice that cannot be sent, the next connection may be to another daemon, which the link then finds out.
        """
        number = self._session.channel.send(message) if self._session is not None else None
        if on_reply is None and number is None:
            self._link.refresh()
        elif on_reply is not None and number is not None:
            self._on_reply[number] = on_reply
        return number

    def forget(self, number: int) -> None:
        """Ignore the reply to this message."""
        self._on_reply.pop(number, None)

    def receive(self) -> None:
        """Pass on every reply that has arrived."""
        if self._session is None:
            return
        for number, reply in self._session.channel.receive():
            self._link.breaker.answered()
            self.replied_at = time.monotonic()
            if (on_reply := self._on_reply.pop(number, None)) is not None:
                with self._faults.guarded("an answer"):
                    on_reply(reply)
            if isinstance(reply, Error):
                self._note_refusal(reply)
                for refused in self.on_refusal:
                    with self._faults.guarded("an answer"):
                        refused(number, reply)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for a reply. True if one has arrived."""
        return self._session is not None and self._session.channel.wait(seconds)

    def timed_out(self) -> None:
        """The daemon of this session has not replied in time."""
        if self._link.session is self._session and not self._link.breaker.open:
            self._link.breaker.timed_out()

    def close(self) -> None:
        if self._session is not None:
            self._session.channel.close()
            self._session = None
        self._on_reply.clear()

    def _note_refusal(self, error: Error) -> None:
        self._counters[f"refused_{error.code}"] += 1
        if self._counters[f"refused_{error.code}"] == 1:
            log.warning("kvserver refused a message of the scheduler: %s: %s", error.code, error.message)
        if error.code in _RENEW:
            self._link.refresh()
