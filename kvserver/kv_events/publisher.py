"""The observer that publishes KV events over ZMQ, as vLLM's ZmqEventPublisher does.

`observe` only counts and encodes, under a lock. The publisher's thread closes batches, sends them and answers replays.

Owns: the streams, the state that streams share, the thread. Refuses to know: how a stream makes batches (`stream`), and
ZMQ sockets (`stream_sockets`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq

from kvserver.config import Settings, parse_events_endpoint, parse_size
from kvserver.kv_events.resident import ResidentChunks
from kvserver.kv_events.stream import BATCH_SECONDS, Stream, StreamOptions
from kvserver.kv_events.stream_sockets import StreamSockets
from kvserver.kv_events.types import Description, KVEvent, KVRemoved, KVStored, ObserverContext, ReaderConnected, Tier
from kvserver.kv_events.wire import Form, Groups
from kvserver.protocol import SGLANG_HASHES
from kvserver.protocol.kv_status import PublisherStatus, StreamStatus
from kvserver.telemetry import Family, Kind, Metric, families_of

log = logging.getLogger(__name__)

MOST_STREAMS = 64
_SLICE = 64  # batches of one stream that are sent in one turn
_LEAST_BUFFER = 1 << 20
_IDLE_SECONDS = 1.0
_BEAT_SECONDS = 1.0
_LAST_SECONDS = 2.0  # for the thread to send the last batches
_LAST_LINGER_MS = 500


def make_publisher(context: ObserverContext) -> ZmqPublisher | None:
    """Publisher of the settings; None without --kv-events-endpoint, as a snapshot then has no sequence to name."""
    return ZmqPublisher(context) if context.settings.kv_events_endpoint else None


@dataclass(frozen=True)
class Snapshot:
    """Announcements of a topic after batch `sequence`. Later batches announce `pending` more chunks."""

    model_name: str
    hash_form: Form
    topic: str
    sequence: int
    boot_id: str
    groups: Groups
    chunks: list[tuple[Tier, Description]]
    pending: int


_STREAM: tuple[Metric[StreamStatus], ...] = (
    Metric("kvserver_kv_events_batches", "Batches of KV events that the ZMQ publisher sent.", Kind.COUNTER, lambda of: of.sequence - of.first_sequence + 1),
    Metric("kvserver_kv_events_held_blocks", "Blocks that the ZMQ publisher announced and has not removed since.", Kind.GAUGE, lambda of: of.held_blocks),
    Metric("kvserver_kv_events_replayed_batches", "Batches of KV events that the ZMQ publisher sent again on request.", Kind.COUNTER, lambda of: of.replayed_batches),
    Metric("kvserver_kv_events_subscribers", "Subscriptions to a stream of the ZMQ publisher.", Kind.GAUGE, lambda of: of.subscribers),
    Metric("kvserver_kv_events_bound", "1 while a stream of the ZMQ publisher is bound to its addresses, 0 while it cannot be.", Kind.GAUGE, lambda of: +(of.state == "bound")),
)  # fmt: skip
_PUBLISHER: tuple[Metric[PublisherStatus], ...] = (
    Metric("kvserver_kv_events_refused_streams", "Engines whose stream of KV events was refused: there were too many streams.", Kind.COUNTER, lambda of: of.refused_streams),
)  # fmt: skip


class NotOneTopic(LookupError):
    """The request matches no topic, or several. `known`: the streams and topics."""

    def __init__(self, several: bool, known: list[dict[str, Any]]) -> None:
        super().__init__(several)
        self.several, self.known = several, known


class ZmqPublisher:
    def __init__(self, context: ObserverContext) -> None:
        settings = context.settings
        self._boot_id = context.boot_id
        self._urls = [url for url in (settings.kv_events_endpoint, settings.kv_events_replay_endpoint) if url]
        self._options = StreamOptions(
            settings.kv_events_topic,
            settings.kv_events_format == "array",
            max(_LEAST_BUFFER, parse_size(settings.kv_events_buffer)),
            context.boot_micros,
        )
        self._lock = threading.Lock()  # of all below, and of all streams
        self._resident = ResidentChunks()
        self._streams: dict[tuple[str, str], Stream] = {}
        self._instances: dict[str, tuple[str, str]] = {}
        self._refused_streams = 0
        self._closing = False
        self._sleeps = False  # the thread waits, maybe longer than BATCH_SECONDS: wake it
        self._failure = ""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[tuple[str, str], StreamSockets] = {}  # of all streams; used by the thread only
        self._next_beat = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        _warn_of_readers(settings)
        self._thread = threading.Thread(target=self._run, name="kv-events-zmq", daemon=True)
        self._thread.start()

    # ---- from the observer's thread -------------------------------------------------------------

    def observe(self, event: KVEvent) -> None:
        if self._failure:
            raise RuntimeError(self._failure)
        with self._lock:
            match event:
                case KVStored():
                    self._resident.add(event.tier, event.namespace, event.chunks)
                    for stream in self._streams.values():
                        stream.stored(event)
                case KVRemoved():
                    for chunk in event.chunks:
                        self._resident.remove(event.tier, event.namespace, chunk.group, [chunk.key])
                    for stream in self._streams.values():
                        stream.removed(event)
                case ReaderConnected():
                    self._reader_connected(event)
                case _:
                    self._reader_disconnected(event.instance_id)
            self._wake_thread()

    def _wake_thread(self) -> None:
        if self._sleeps:
            self._sleeps = False
            os.eventfd_write(self._wake, 1)

    def _reader_connected(self, event: ReaderConnected) -> None:
        scheduler = event.scheduler
        of_sglang = scheduler.hash_algorithm in SGLANG_HASHES
        form: Form = "signed" if of_sglang else scheduler.hash_form or "int"  # vLLM's own default
        name = (scheduler.model_name, form)
        if self._instances.get(scheduler.instance_id, name) != name:
            self._reader_disconnected(scheduler.instance_id)
        if name not in self._streams:
            if len(self._streams) >= MOST_STREAMS:
                self._refused_streams += 1
                return
            stream = self._streams[name] = Stream(scheduler.model_name, form, self._options, self._resident)
            self._sockets[name] = StreamSockets(self._context, stream, len(self._sockets), self._urls)
        self._instances[scheduler.instance_id] = name
        self._streams[name].reader_connected(scheduler.instance_id, event.namespace_prefix, scheduler.groups)

    def _reader_disconnected(self, instance_id: str) -> None:
        if name := self._instances.pop(instance_id, None):
            self._streams[name].reader_disconnected(instance_id)

    # ---- for pages -------------------------------------------------------------------------------

    def snapshot(self, model_name: str = "", form: str = "", topic: str = "") -> Snapshot:
        """Empty parameters match everything. NotOneTopic unless exactly one topic matches."""
        with self._lock:
            views = [
                (stream, view)
                for stream in self._streams.values()
                for view in stream.views.values()
                if model_name in ("", stream.model_name)
                and form in ("", stream.form)
                and topic in ("", view.topic.decode())
            ]
            if len(views) != 1:
                raise NotOneTopic(bool(views), [_known(stream) for stream in self._streams.values()])
            stream, view = views[0]
            stream.close_batch()
            return Snapshot(
                stream.model_name, stream.form, view.topic.decode(), stream.next_sequence - 1, self._boot_id,
                stream.groups, view.announced(), len(view.waiting),
            )  # fmt: skip

    def status(self) -> PublisherStatus:
        with self._lock:
            streams = [self._stream_status(name) for name in self._streams]
            return PublisherStatus(streams=streams, refused_streams=self._refused_streams)

    def _stream_status(self, name: tuple[str, str]) -> StreamStatus:
        stream, sockets = self._streams[name], self._sockets[name]
        return StreamStatus(
            model_name=stream.model_name,
            hash_form=stream.form,
            topics=[topic.decode() for topic in stream.topics],
            sequence=stream.next_sequence - 1,
            first_sequence=stream.first_sequence,
            buffered_batches=len(stream.buffer),
            buffered_bytes=stream.buffered_bytes,
            held_blocks=stream.announced_blocks,
            pending_chunks=stream.pending,
            unbalanced_blocks=stream.unbalanced,
            state_bytes=stream.state_bytes,
            state=sockets.state,
            endpoint=sockets.endpoint,
            replay_endpoint=sockets.replay_endpoint,
            subscribers=sockets.subscriptions,
            replayed_batches=sockets.replayed,
            bad_requests=sockets.bad_requests,
        )

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._wake_thread()
        self._thread.join(_LAST_SECONDS)

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        try:
            while (wait := self._turn(poller)) is not None:
                self._sleeps = self._sleeps and wait > BATCH_SECONDS
                poller.poll(math.ceil(wait * 1000))
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            self._publish_last()
        except Exception as error:
            log.exception("the ZMQ publisher of KV events failed and stopped")
            self._failure = f"the publishing thread failed: {error!r}"
        finally:
            with self._lock:
                self._sleeps = False
                os.close(self._wake)
                for sockets in self._sockets.values():
                    sockets.close(_LAST_LINGER_MS)
            self._context.term()  # waits for the sockets to linger

    def _turn(self, poller: zmq.Poller) -> float | None:
        """Serve every stream once. Returns the most seconds until the next turn; None ends the thread."""
        with self._lock:
            if self._closing:
                return None
            self._sleeps = True  # events from now on wake it
            streams = [(stream, self._sockets[name]) for name, stream in self._streams.items()]
        waits = [_IDLE_SECONDS]
        for stream, sockets in streams:
            taken = {url for _, other in streams for url in (other.endpoint, other.replay_endpoint)}
            for socket in sockets.open(taken):
                poller.register(socket, zmq.POLLIN)
            waits.append(self._serve(stream, sockets))
        return min(waits)

    def _serve(self, stream: Stream, sockets: StreamSockets) -> float:
        """Serve one turn of one stream. Returns the seconds until its next turn."""
        sockets.receive_requests()
        with self._lock:
            wait, connect = self._advance(stream, sockets), sockets.connect_seconds
            fresh = [] if connect else stream.batches_after(sockets.published, _SLICE)
            replays, pinned = sockets.next_batches(), stream.pinned
        sockets.publish(fresh)
        sockets.receive_subscriptions(pinned)
        if connect:
            wait = min(wait, connect)
        if sockets.replaying:
            wait = min(wait, 0.0 if sockets.replay(replays) else BATCH_SECONDS)
        return wait if len(fresh) < _SLICE else 0.0

    def _advance(self, stream: Stream, sockets: StreamSockets) -> float:
        """Close a due batch and announce waiting chunks. Returns the seconds until there is more to do."""
        stream.announce_waiting()
        beat = sockets.wants_beat and time.monotonic() >= self._next_beat
        if stream.due_seconds == 0.0 or beat:
            stream.close_batch(even_empty=beat)
        if beat:
            sockets.wants_beat, self._next_beat = False, time.monotonic() + _BEAT_SECONDS
        due = stream.due_seconds
        return 0.0 if stream.pending else _IDLE_SECONDS if due is None else due

    def _publish_last(self) -> None:
        """Publish that all blocks are removed: the tiers end with the daemon."""
        with self._lock:
            for name, stream in self._streams.items():
                stream.announce_end()
                sockets = self._sockets[name]
                sockets.publish(stream.batches_after(sockets.published, len(stream.buffer)))


def publisher_families(status: PublisherStatus) -> list[Family]:
    rows = [(stream, (stream.model_name, stream.hash_form)) for stream in status.streams]
    return [*families_of(_STREAM, rows, ("model_name", "hash_form")), *families_of(_PUBLISHER, [(status, ())])]


def _known(stream: Stream) -> dict[str, Any]:
    return {"model": stream.model_name, "form": stream.form, "topics": [topic.decode() for topic in stream.topics]}


def _warn_of_readers(settings: Settings) -> None:
    for url in (settings.kv_events_endpoint, settings.kv_events_replay_endpoint):
        parsed = parse_events_endpoint(url)
        host = parsed[0].removeprefix("tcp://") if parsed is not None and url.startswith("tcp://") else "localhost"
        if host not in ("localhost", "[::1]") and not host.startswith("127."):
            log.warning("KV events carry token ids, and every client that can connect to %s can read them", url)
