"""Stores and Retrieves on their way to the daemon, and the answers on their way back.

A copy may begin only when the engine's own work on its blocks is done. On a CPU it is done when the step has run:
`DirectSendQueue` sends at once. A GPU works later than the engine's thread queues. `OrderedSendQueue` records an event between
two steps; a thread of its own waits for the event, without the GIL, and then sends. So no process waits for another process's
work on the GPU, and the engine's thread waits for no event. With asynchronous scheduling the next step is queued when a step is
accepted; a store waits only for the step that computed its KV.

Who may still write while a message waits here, or after it was dropped: the engine only, for the daemon has not received the
message. If the word is cancelled while its message is sent, the daemon drops the message by its word.

Owns: the session's channel, and the order of messages. Refuses to know: stores and loads, what a copy's end means.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvserver._native import State
from kvserver.adapters.common.link import Session
from kvserver.protocol import Reply, Retrieve, Store

_LOOK_SECONDS = 0.0005  # state words may change while the thread waits for an event
_CLOSE_SECONDS = 0.5
_MARKS = 8  # steps; a message for an older one waits longer than it needs


@dataclass(frozen=True)
class NotSent:
    """Reason why a posted message was not sent."""

    reason: str  # cancelled, late, full, failed, or `gone`: the session has ended
    error: Exception | None = None  # raised by the engine's own work, or by the sender


Message: TypeAlias = Store | Retrieve
Answer: TypeAlias = Reply | NotSent


class SendQueue(Protocol):
    """Queue of messages to the daemon, used by the engine's thread alone."""

    def adopt(self, session: Session | None) -> None:
        """Use this session from now on, or none; the channel of the session before is closed."""

    def begin_step(self, step: int) -> None:
        """Mark the end of the work that was queued so far, in front of this step's. Raises what `record` raises: then nothing is sent in the step."""

    def post(self, message: Message, computed_in: int | None = None) -> bool:
        """Send the message behind the work of step `computed_in`, or of all steps before this one. False if it cannot be sent.

        REQUIRES: the message's word is armed in the adopted session's page.
        """

    def receive(self) -> list[tuple[int, Answer]]:
        """Answers since the last call: (the message's sequence, or 0; its answer). One per message while the session lasts."""

    def wait(self, seconds: float) -> None:
        """Wait `seconds` at most for an answer or for a time at which a state word may have changed."""

    def is_queued(self, sequence: int) -> bool:
        """True while this message still waits here for the engine's work."""

    def close(self) -> None:
        """End the queue. Never waits without a limit."""


class DirectSendQueue:
    def __init__(self) -> None:
        self.session: Session | None = None
        self._sequences: dict[int, int] = {}  # by request number

    def adopt(self, session: Session | None) -> None:
        if self.session is not None:
            self.session.channel.close()
        self.session = session
        self._sequences.clear()

    def begin_step(self, step: int) -> None:
        """Do nothing: no message is queued."""

    def post(self, message: Message, computed_in: int | None = None) -> bool:
        number = self.session.channel.send(message) if self.session is not None else None
        if number is None:
            return False
        self._sequences[number] = message.sequence
        return True

    def receive(self) -> list[tuple[int, Answer]]:
        replies = self.session.channel.receive() if self.session is not None else ()
        return [(self._sequences.pop(number, 0), reply) for number, reply in replies]

    def wait(self, seconds: float) -> None:
        if self.session is None:
            time.sleep(seconds)
        else:
            self.session.channel.wait(max(seconds, 0.001))

    def is_queued(self, sequence: int) -> bool:
        return False

    def close(self) -> None:
        self.adopt(None)


class WorkEvent(Protocol):
    """The part of torch.cuda.Event that is used."""

    def record(self) -> None:
        """Mark the end of the work queued so far on the current stream."""

    def synchronize(self) -> None:
        """Wait for the marked work, without the GIL."""


@dataclass(frozen=True)
class _QueuedMessage:
    session: Session
    message: Message
    event: WorkEvent

    def is_wanted(self) -> bool:
        """True while the message's word is as it was armed."""
        words, word = self.session.words, self.message
        return words is not None and words.move(word.word, word.sequence, State.PENDING, State.PENDING)

    def cancel(self) -> None:
        if self.session.words is not None:
            self.session.words.move(self.message.word, self.message.sequence, State.PENDING, State.CANCELLED)


@dataclass(frozen=True)
class _Adopt:
    session: Session | None


class OrderedSendQueue:
    """First-in, first-out queue with a thread that waits for the GPU.

    Two threads share four fields, whose single operations are atomic under the GIL: `_tasks` (engine appends, thread takes),
    `_answers` (the reverse), `_queued` (engine adds, thread discards) and `_closing`. All else belongs to one thread. The thread
    may wait for ever for an event of a GPU that hangs. It is a daemon thread: close() leaves it, and its channel ends with the
    process.
    """

    def __init__(self, make_event: Callable[[], WorkEvent]) -> None:
        self._make_event = make_event
        self._session: Session | None = None  # the engine's thread's
        self._marks: deque[tuple[int, WorkEvent]] = deque(
            maxlen=_MARKS
        )  # (a step, in front of its work), the engine's thread's
        self._tasks: deque[_QueuedMessage | _Adopt] = deque()
        self._answers: deque[tuple[int, Answer]] = deque()
        self._queued: set[int] = set()
        self._closing = False
        self._answer_ready = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sender = DirectSendQueue()  # the thread's
        self._thread = threading.Thread(target=self._run, name="kvserver-sender", daemon=True)
        self._thread.start()

    # ---- the engine's thread ------------------------------------------------------------------

    def adopt(self, session: Session | None) -> None:
        self._session = session
        self._enqueue(_Adopt(session))

    def begin_step(self, step: int) -> None:
        marks, self._marks = self._marks, deque(maxlen=_MARKS)
        event = self._make_event()
        event.record()
        self._marks.extend((*marks, (step, event)))

    def post(self, message: Message, computed_in: int | None = None) -> bool:
        if self._session is None or not self._marks:
            return False
        newest = self._marks[-1][1]
        event = next((event for step, event in self._marks if computed_in is not None and step > computed_in), newest)
        self._queued.add(message.sequence)
        self._enqueue(_QueuedMessage(self._session, message, event))
        return True

    def _enqueue(self, task: _QueuedMessage | _Adopt) -> None:
        if not self._closing:
            self._tasks.append(task)
            os.eventfd_write(self._wake, 1)

    def receive(self) -> list[tuple[int, Answer]]:
        self._answer_ready.clear()
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def wait(self, seconds: float) -> None:
        self._answer_ready.wait(min(seconds, _LOOK_SECONDS))

    def is_queued(self, sequence: int) -> bool:
        return sequence in self._queued

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            os.close(self._wake)

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            if not self._tasks:
                self._wait()
                self._collect()
                continue
            task = self._tasks.popleft()
            if isinstance(task, _Adopt):
                self._sender.adopt(task.session)
            else:
                self._deliver(task)
                self._collect()
        self._sender.close()

    def _deliver(self, queued: _QueuedMessage) -> None:
        sequence = queued.message.sequence
        try:
            queued.event.synchronize()
            if not self._closing and (reason := self._send(queued)) is not None:
                queued.cancel()
                self._put_answer(sequence, NotSent(reason))
        except Exception as error:
            queued.cancel()
            self._put_answer(sequence, NotSent("failed", error))
        finally:
            self._queued.discard(sequence)

    def _send(self, queued: _QueuedMessage) -> str | None:
        """Send the message; return the reason if it was not sent."""
        if not queued.is_wanted():
            return "cancelled"
        if self._sender.session is not queued.session or queued.session.ended.is_set():
            return "gone"
        if time.monotonic_ns() > queued.message.deadline_ns:
            return "late"
        return None if self._sender.post(queued.message) else "full"

    def _wait(self) -> None:
        """Wait for a reply or for a wake-up."""
        if self._sender.session is not None:
            self._sender.session.channel.wait_or(self._wake)
            return
        poller = select.poll()  # not select(): an engine may have thousands of descriptors
        poller.register(self._wake, select.POLLIN)
        poller.poll()

    def _collect(self) -> None:
        """Pass received replies on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        try:
            for answer in self._sender.receive():
                self._put_answer(*answer)
        except Exception as error:  # no message of this channel can be decoded any more
            self._put_answer(0, NotSent("failed", error))
            self._sender.adopt(None)

    def _put_answer(self, sequence: int, answer: Answer) -> None:
        self._answers.append((sequence, answer))
        self._answer_ready.set()
