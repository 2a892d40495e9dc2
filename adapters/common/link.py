"""The connection to the daemon, kept by a thread that is not the engine's.

The thread sends Hello; for a worker it also attaches and registers. Then it watches the lifeline. It retries, with jitter, for as
long as the engine runs. The engine's threads only read `session`: None means no cache at present. A `Breaker` counts timeouts.
While it is open the engine waits for nothing, until the thread has received an answer.

Owns: connecting, registering, probing. Refuses to know: lookups, loads and stores.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvserver._native import WordPage
from kvserver.adapters.common.cache_status import CONNECTED, STARTING, CacheStatus, refused
from kvserver.adapters.common.log import log
from kvserver.protocol import (
    HelloReply,
    NotPermitted,
    Registered,
    RegisterWorker,
    Unregistered,
    UnregisterWorker,
    barrier,
    stranger_at,
)
from kvserver.protocol.client import Attachment, Channel, Client, RequestFailed, WatchedClient, has_listener

WORDS = 4096  # copies in flight at once
BREAKER_LIMIT = 3  # timeouts in a row
_HELLO_SECONDS = 2.0
_REGISTER_SECONDS = 10.0
_REFRESH_SECONDS = 1.0  # between two refreshes, at least
GPU_MARGIN_SECONDS = 1.0  # from the daemon's death until its driver has ended what it still had queued
_RETRY_SECONDS = (0.1, 1.0)  # first and largest pause between attempts
_ABSENT_SECONDS = 0.25  # the largest while there is no daemon: the attempt is cheap then, and each request a miss


@dataclass
class Session:
    """A daemon process as seen by one half of one engine.

    The link's thread sets `ended` once and for all: the daemon then neither reads nor writes the registered memory. `channel` is
    used and closed by one owner only: the send queue in a worker, the engine's thread in a scheduler.
    """

    hello: HelloReply
    channel: Channel
    registration: int = 0
    words: WordPage | None = None
    lifeline: WatchedClient | Attachment | None = None  # its end shows the daemon's; a worker's is its attachment
    ended: threading.Event = field(default_factory=threading.Event)


@dataclass
class Registration:
    """A worker's registration: makes the message from the session's Hello and attachment; carries the descriptors.

    `margin_seconds`: how long a GPU may still write after its daemon has died.
    """

    fds: list[int]
    message: Callable[[HelloReply, int], RegisterWorker]
    margin_seconds: float = 0.0


class Breaker:
    """Counts timeouts in a row; any answer closes it. Used by one engine thread and the link's thread.

    The closing answer is received by the link's thread, or by the engine's thread as a late reply.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._failures = 0
        self._wake = wake

    @property
    def open(self) -> bool:
        return self._failures >= BREAKER_LIMIT

    def answered(self) -> None:
        was_open, self._failures = self.open, 0
        if was_open:
            log.info("kvserver answers again: the engine uses its cache")

    def timed_out(self) -> None:
        self._failures += 1
        if self._failures == BREAKER_LIMIT:
            log.warning("kvserver does not answer; running without cache until it does")
            self._wake()


def absence(endpoint: str) -> CacheStatus | None:
    """Reason why nothing can be sent to the endpoint, found without sending; None if there is none."""
    if not has_listener(endpoint):
        return CacheStatus("no_daemon", f"no kvserver at {endpoint}")
    if stranger := stranger_at(endpoint):
        return CacheStatus("foreign_daemon", stranger)
    if why := barrier(endpoint):
        return CacheStatus("not_permitted", why)
    return None


def failure(endpoint: str, error: Exception) -> CacheStatus:
    """The status that follows from a failed attempt to talk to the daemon at the endpoint."""
    if isinstance(error, RequestFailed):
        return CacheStatus(refused(error.code), str(error))
    if isinstance(error, NotPermitted):
        return CacheStatus("not_permitted", str(error))
    if isinstance(error, TimeoutError) and has_listener(endpoint):
        return CacheStatus("no_answer", f"kvserver at {endpoint} does not answer")
    if isinstance(error, OSError):
        return CacheStatus("no_daemon", str(error))
    log.debug("kvserver link", exc_info=True)
    return CacheStatus("other", f"{type(error).__name__}: {error}")


class Link:
    """Connection of one half of an engine to the daemon.

    REQUIRES: start() once, stop() once; the engine's thread may read `session` and `breaker`.
    """

    def __init__(self, endpoint: str, name: str, registration: Registration | None = None) -> None:
        self.session: Session | None = None
        self.breaker = Breaker(self._wake)
        self._endpoint = endpoint
        self._name = name
        self._registration = registration
        self._attempted = threading.Event()
        self._stopping = False
        self._closed = False
        self._refresh = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._why = STARTING  # why there is no session
        self._thread = threading.Thread(target=self._run, name=f"kvserver-{name}", daemon=True)

    def start(self, wait_seconds: float) -> None:
        """Start the thread; wait `wait_seconds` at most until the first attempt has succeeded or failed."""
        self._thread.start()
        self._attempted.wait(wait_seconds)

    def refresh(self) -> None:
        """Check, within a second, whether the daemon is still the one of the session: it stated that it does not know this engine."""
        if not self._refresh:
            self._refresh = True
            self._wake()

    def usable(self) -> Session | None:
        """The session, if there is one, it has not ended and the breaker is closed."""
        session = self.session
        return session if session is not None and not session.ended.is_set() and not self.breaker.open else None

    @property
    def cache_status(self) -> CacheStatus:
        """Cache status of this half: whether it has a daemon, and why not."""
        if self.usable() is not None:
            return CONNECTED
        if self.session is not None and self.breaker.open:
            return CacheStatus("breaker_open", "kvserver did not answer in time; nothing is sent until it answers")
        return self._why

    def stop(self, wait_seconds: float = 1.0) -> bool:
        """Unregister and end the thread, which ends once the server has closed its mappings.

        Waits `wait_seconds` at most; True if the thread has ended. If False, the thread goes on, at most until the
        process ends, and the server may read and write as before; stop() may be called again. REQUIRES: start().
        """
        self._stopping = True
        self._wake()
        self._thread.join(wait_seconds)
        if self._thread.is_alive():
            return False
        if not self._closed:
            self._closed = True
            for fd in (self._wake_read, self._wake_write, *(self._registration.fds if self._registration else ())):
                os.close(fd)
        return True

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _RETRY_SECONDS[0]
        while not self._stopping:
            former, session = self.session, self._connect()
            self._attempted.set()
            if session is not None:
                pause = _RETRY_SECONDS[0]
                self.breaker.answered()
                self.session, hello = session, session.hello
                log.info("%s: connected to kvserver %s, boot %s", self._name, hello.server_version, hello.boot_id)
            if former is not None:
                self._end(former)
            if session is None:
                self._sleep(pause * random.uniform(0.5, 1.5))
                pause = min(pause * 2, _ABSENT_SECONDS if self._why.reason == "no_daemon" else _RETRY_SECONDS[1])
                continue
            replaced = False
            try:
                replaced = self._watch(session)
            except Exception:
                log.exception("%s: the connection to kvserver cannot be watched; connecting again", self._name)
                self._sleep(_RETRY_SECONDS[1])
            finally:
                if not replaced:
                    self._end(session)
        if self.session is not None:
            self._end(self.session)

    def _end(self, session: Session) -> None:
        if self.session is session:
            self.session = None
        self._hang_up(session)
        session.ended.set()

    def _connect(self) -> Session | None:
        """Attempt to connect once; None if it failed, with the reason logged once."""
        if (absent := absence(self._endpoint)) is not None:
            self._note_absence(absent)
            return None
        with contextlib.ExitStack() as unfinished:
            try:
                session = self._greet(unfinished)
                unfinished.callback(session.channel.close)
                if not session.channel.wait_writable(_HELLO_SECONDS):
                    raise TimeoutError(f"kvserver at {self._endpoint} accepts no second connection")
            except Exception as error:
                self._note_absence(failure(self._endpoint, error))
                return None
            unfinished.pop_all()
        self._why = CacheStatus("no_daemon", "the connection to kvserver ended")
        return session

    def _greet(self, unfinished: contextlib.ExitStack) -> Session:
        """A session; what must be closed should none come of it is in `unfinished`."""
        client = WatchedClient(self._endpoint, _HELLO_SECONDS)
        unfinished.callback(client.close)
        hello = client.hello(self._name)
        if self._registration is None:
            return Session(hello, Channel(self._endpoint), lifeline=client)
        words = WordPage(WORDS)
        attachment = Attachment(hello.fd_path, hello.token, [*self._registration.fds, words.fd], _HELLO_SECONDS)
        unfinished.callback(attachment.close)
        message = self._registration.message(hello, attachment.number)
        answer = client.ask(message, Registered, _REGISTER_SECONDS)
        client.close()
        return Session(hello, Channel(self._endpoint), answer.registration, words, attachment)

    def _note_absence(self, why: CacheStatus) -> None:
        """Log a reason once, not at every attempt."""
        if why != self._why:
            log.warning("%s: running without cache: %s", self._name, why.detail)
            self._why = why

    def _watch(self, session: Session) -> bool:
        """Return when the session is over; while the breaker is open, send Hello until the daemon answers.

        True if another daemon answers and only lookups and notices are sent in this session. The session is then used until the
        next one is connected, since requests in between would miss.
        """
        keeps, pause, refresh_at = self._registration is None, _RETRY_SECONDS[0], 0.0
        while not self._stopping:
            left = 3600.0
            if keeps and self._refresh and (left := refresh_at - time.monotonic()) <= 0:
                self._refresh, left = False, 3600.0
                refresh_at = time.monotonic() + _REFRESH_SECONDS
                if self._boot_id() != session.hello.boot_id:
                    return True
            seconds = pause * random.uniform(0.5, 1.5) if self.breaker.open else left
            if self._wait(session.lifeline, seconds):
                log.warning("%s: the connection to kvserver ended", self._name)
                return False
            if not self.breaker.open:
                pause = _RETRY_SECONDS[0]
            elif self._boot_id():
                self.breaker.answered()
            elif keeps and not self._stopping:
                pause = min(pause * 2, _RETRY_SECONDS[1])
        return False

    def _boot_id(self) -> str:
        """The boot_id of the daemon at the endpoint; empty if none answers."""
        try:
            with Client(self._endpoint, _HELLO_SECONDS) as client:
                return client.hello(self._name).boot_id
        except (RequestFailed, OSError, TimeoutError):
            return ""

    def _wait(self, lifeline: WatchedClient | Attachment | None, seconds: float) -> bool:
        """Wait until woken, until the time is over, or until the lifeline ended (True)."""
        poller = select.poll()  # not select(): an engine may have thousands of descriptors
        poller.register(self._wake_read, select.POLLIN)
        if lifeline is not None:
            if not lifeline.alive():
                return True
            poller.register(lifeline.fileno(), select.POLLIN)
        poller.poll(seconds * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        return lifeline is not None and not lifeline.alive()

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            self._wait(None, left)

    def _hang_up(self, session: Session) -> None:
        """Returns when the server has closed its mappings or its process has ended; never if the server hangs."""
        attachment = session.lifeline
        if not isinstance(attachment, Attachment):
            if attachment is not None:
                attachment.close()
            return
        if not self._unregistered(session, attachment) and not attachment.detached:
            # The server dies. The kernel closes its sockets before it releases its GPU, which may still write.
            attachment.wait_for_death()
            time.sleep(self._registration.margin_seconds if self._registration is not None else 0)
        attachment.close()

    def _unregistered(self, session: Session, attachment: Attachment) -> bool:
        """True once the server has answered that it closed its mappings; False if it has ended the connection instead."""
        bye = UnregisterWorker(boot_id=session.hello.boot_id, registration=session.registration)
        while attachment.alive():
            with contextlib.suppress(RequestFailed, OSError, TimeoutError), Client(self._endpoint, 1.0) as client:
                client.ask(bye, Unregistered)
                return True
            # No answer, or the server received an earlier one: it ends the connection when it has closed the mappings.
            self._wait(attachment, _RETRY_SECONDS[1])
        return False

    def _wake(self) -> None:
        if self._closed:
            return
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\1")
