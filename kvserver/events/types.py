"""What happened, for whoever watches: lifecycles, metrics, traces, logs.

Events are frozen structs of one union. The loop publishes them and goes on; a thread of the bus hands them to the
subscribers, in order. Nothing waits: an event for which the queue has no room is dropped and counted.

Owns: the events, the queue, the draining thread. Refuses to know: what anybody makes of them.

Units: `*_ns` is CLOCK_MONOTONIC nanoseconds, the same in all processes of a machine; wall time is for output only.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, get_args

import msgspec

from kvserver.protocol import WAIT_SECONDS, ChunkContents, DescribeScheduler, Histogram, Payload, RegisterWorker

log = logging.getLogger(__name__)

QUEUE_COST = 1 << 16  # outstanding events; one that carries bytes counts once more per _COST_BYTES
_COST_BYTES = 4096
_NAP_SECONDS = 0.01  # the thread lets events gather, so that the loop rarely pays for waking it


class RecountPart(enum.Enum):
    BEGIN = 0
    SLICE = 1
    END = 2


class _Event(msgspec.Struct, frozen=True, tag=True, gc=False):
    time_ns: int  # when it happened


# ---- instances and workers --------------------------------------------------------------------


class InstanceCame(_Event, frozen=True):
    instance_id: str
    model_name: str
    incarnation: str
    num_blocks: int
    block_tokens: int
    has_computed: bool = False  # before it registered: its blocks may have content


class InstanceGone(_Event, frozen=True):
    instance_id: str
    model_name: str
    incarnation: str
    died: bool  # its connection ended; False: it said goodbye


class InstanceDescribed(_Event, frozen=True):
    """What its scheduler said of it; again whenever `reach` is another."""

    description: DescribeScheduler
    reach: bytes  # it can read the namespaces whose id begins so
    chunk_blocks: int
    block_tokens: int


class NamespaceFormed(_Event, frozen=True):
    """All ranks of the instance are registered and agree. `ranks` is what each registered, in rank order."""

    instance_id: str
    model_name: str
    namespace: bytes  # without a variant
    ranks: tuple[RegisterWorker, ...]


class WorkerCame(_Event, frozen=True):
    instance_id: str
    model_name: str
    rank: int
    device: str


class WorkerGone(_Event, frozen=True):
    instance_id: str
    model_name: str
    rank: int
    died: bool


# ---- requests of engines ----------------------------------------------------------------------


class LookupEnded(_Event, frozen=True):
    """`time_ns` is its end; the missed chunks are those from the first that was not READY on.

    `missed` counts them by MissReason; its first reason is that of the first missing chunk.
    """

    instance_id: str
    model_name: str
    request_id: str
    began_ns: int
    chunks: int
    hit_chunks: int
    chunk_tokens: int
    traceparent: str = ""
    prompt_tokens: int = 0  # 0: not reported
    namespace: bytes = b""
    missed: tuple[tuple[str, int], ...] = ()
    missing_key: bytes = b""  # of the first missing chunk
    other_namespace: bytes = b""  # one that has that chunk, if this is its reason
    unavailable: str = ""  # why nothing could be found, if this is its reason


class CopyBegan(_Event, frozen=True):
    """A store or a load was given to the device."""

    instance_id: str
    model_name: str
    rank: int
    direction: str  # "store" or "load"
    request_id: str
    chunks: int


class CopyEnded(_Event, frozen=True):
    """`device_ns` is what the device spent on it; `outcome` is "done" or why not."""

    instance_id: str
    model_name: str
    rank: int
    direction: str
    request_id: str
    began_ns: int
    chunks: int
    bytes: int
    device_ns: int
    outcome: str


class CopyRefused(_Event, frozen=True):
    """A store or a load that was not given to the device: nothing was copied."""

    instance_id: str
    model_name: str
    rank: int
    direction: str
    request_id: str
    code: str  # an ErrorCode


class RequestEnded(_Event, frozen=True):
    """The last five as in EndRequest, but they fit together: local and loaded tokens are at most the prompt's."""

    instance_id: str
    model_name: str
    sequence: int
    request_id: str
    prompt_tokens: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    loads: int = 0
    failed_loads: int = 0
    not_loaded: str = ""  # why not, if the engine knows


class BlockReport(_Event, frozen=True):
    """A ReportBlockAllocations as it came; the loop has checked its form."""

    instance_id: str
    model_name: str
    sequence: int
    payload: Payload


class ErrorSent(_Event, frozen=True):
    request: str  # its type
    code: str


# ---- L1 ---------------------------------------------------------------------------------------


class ChunksStored(_Event, frozen=True):
    """Became READY by a store of the instance. `keys` is KEY_BYTES each."""

    instance_id: str
    model_name: str
    namespace: bytes
    keys: bytes
    chunk_bytes: int  # of one, all ranks


class ChunksDescribed(_Event, frozen=True):
    """What is in chunks that were stored before, or will be by the store that said so. The hashes are its word only."""

    instance_id: str
    namespace: bytes
    keys: bytes
    block_tokens: int
    contents: ChunkContents


class ChunksLoaded(_Event, frozen=True):
    """Were copied to the instance: an access."""

    instance_id: str
    model_name: str
    namespace: bytes
    keys: bytes


class ChunksEvicted(_Event, frozen=True):
    namespace: bytes
    keys: bytes


class L1Cleared(_Event, frozen=True):
    """All chunks of the namespaces whose id begins with `namespace` are gone."""

    namespace: bytes
    chunks: int


class L1Recounted(_Event, frozen=True):
    """All that is READY, in several events, because some were dropped: begin, any number of slices, end.

    What happens meanwhile is told as ever, between the slices.
    """

    part: RecountPart
    namespace: bytes = b""
    keys: bytes = b""


Event: TypeAlias = (
    InstanceCame
    | InstanceGone
    | InstanceDescribed
    | NamespaceFormed
    | WorkerCame
    | WorkerGone
    | LookupEnded
    | CopyBegan
    | CopyEnded
    | CopyRefused
    | RequestEnded
    | BlockReport
    | ErrorSent
    | ChunksStored
    | ChunksDescribed
    | ChunksLoaded
    | ChunksEvicted
    | L1Cleared
    | L1Recounted
)
TYPES: tuple[type[Any], ...] = get_args(Event)


class Subscriber(Protocol):
    """Runs in the bus's thread. What it raises is counted and harms nobody else."""

    name: str

    def handle(self, event: Event) -> None: ...

    def close(self) -> None:
        """Called once, after the last event; subscribers close in reverse order."""
        ...


_NEVER_DROPPED = (
    InstanceCame,
    InstanceGone,
    InstanceDescribed,
    NamespaceFormed,
    WorkerCame,
    WorkerGone,
)  # few, and what follows means nothing without


_OF_CHUNKS = (ChunksStored, ChunksEvicted, L1Cleared, L1Recounted)  # whoever misses one no longer knows what L1 holds


class Bus:
    """REQUIRES: one thread publishes; start() before close(), both once."""

    def __init__(self, subscribers: Sequence[Subscriber] = (), limit: int = QUEUE_COST) -> None:
        self.subscribers = tuple(subscribers)
        self.published = dict.fromkeys((t.__name__ for t in TYPES), 0)
        self.dropped = dict.fromkeys((t.__name__ for t in TYPES), 0)
        self.errors: Counter[str] = Counter()  # what subscribers raised, by their names
        self.lag_seconds = 0.0  # from an event's time until the thread took it: the longest of the last round
        self._waits = Histogram(WAIT_SECONDS)  # the same of every event
        self.lost_chunks = False  # what became of chunks was dropped; whoever tells all anew sets it back
        self._limit = limit
        self._queue: queue.SimpleQueue[tuple[Event, int] | None] = queue.SimpleQueue()
        self._cost_in = 0  # written by the publisher only
        self._cost_out = 0  # by the thread only; the difference is what is queued
        self._last_errors: dict[str, str] = {}
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    # ---- the publisher's ----------------------------------------------------------------------

    def publish(self, event: Event, size: int = 0) -> bool:
        """Queue it; False if there was no room. Never waits. `size`: bytes that it carries."""
        if not self.subscribers:
            return True
        name = type(event).__name__
        cost = 1 + size // _COST_BYTES
        if self._cost_in - self._cost_out + cost > self._limit and not isinstance(event, _NEVER_DROPPED):
            self.dropped[name] += 1
            self.lost_chunks |= isinstance(event, _OF_CHUNKS)
            return False
        self._cost_in += cost
        self.published[name] += 1
        self._queue.put((event, cost))
        return True

    @property
    def half_empty(self) -> bool:
        return self._cost_in - self._cost_out < self._limit // 2

    # ---- from any thread ----------------------------------------------------------------------

    @property
    def failure(self) -> str:
        """Why nothing is drained any more; empty while all is well."""
        if self._failure or not self._thread.ident or self._thread.is_alive():
            return self._failure
        return "the event thread has ended"

    def flush(self, seconds: float = 5.0) -> bool:
        """Wait until everything published so far was handled, at most so long. False if it was not."""
        target, deadline = self._cost_in, time.monotonic() + seconds
        while self._cost_out < target:
            if time.monotonic() > deadline or self.failure:
                return False
            time.sleep(0.001)
        return True

    def status(self) -> dict[str, Any]:
        return {
            "published": sum(self.published.values()),
            "dropped": sum(self.dropped.values()),
            "published_types": dict(self.published),
            "dropped_types": dict(self.dropped),
            "queue_depth": self._cost_in - self._cost_out,
            "lag_seconds": round(self.lag_seconds, 6),
            "waits": self._waits.status(),
            "subscribers": [
                {"name": s.name, "errors": self.errors[s.name], "last_error": self._last_errors.get(s.name, "")}
                for s in self.subscribers
            ],
        }

    # ---- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float = 5.0) -> None:
        """Hand over what is queued, for at most so long, then close the subscribers in reverse order."""
        self._queue.put(None)
        self._thread.join(seconds)
        for subscriber in reversed(self.subscribers):
            self._guarded(subscriber, subscriber.close)

    def _run(self) -> None:
        try:
            while self._drain():
                time.sleep(_NAP_SECONDS)
        except BaseException as error:
            self._failure = f"the event thread has ended: {type(error).__name__}: {error}"
            log.critical("%s", self._failure, exc_info=True)

    def _drain(self) -> bool:
        """Wait for an event, then hand over all there are. False at the end."""
        item = self._queue.get()
        lag = 0.0
        while item is not None:
            event, cost = item
            waited = (time.monotonic_ns() - event.time_ns) * 1e-9
            self._waits.observe(waited)
            lag = max(lag, waited)
            for subscriber in self.subscribers:
                self._guarded(subscriber, subscriber.handle, event)
            self._cost_out += cost
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                self.lag_seconds = lag
                return True
        return False

    def _guarded(self, subscriber: Subscriber, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            self.errors[subscriber.name] += 1
            self._last_errors[subscriber.name] = f"{type(error).__name__}: {error}"[:500]
            if self.errors[subscriber.name] == 1:
                log.exception("subscriber %s (further errors of it are only counted)", subscriber.name)
