"""Status of KV events and of the daemon's own observers, as parts of `/status` (`status`)."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class KVEventsStatus(Struct, frozen=True, kw_only=True):
    """The events that are published to routers and engines."""

    events: int = 0
    described_chunks: int = 0  # objects
    state_bytes: int = 0
    unannounced: dict[str, int] = {}  # objects, by reason
    recounts: int = 0
    observers: list[dict[str, Any]] = []  # name, state, reason, and what each shows of itself


class StreamStatus(Struct, frozen=True, kw_only=True):
    """Status of one stream of the publisher: one model and form of hashes."""

    model_name: str = ""
    hash_form: str = ""
    state: str = "starting"  # "bound", or why it is not
    endpoint: str = ""
    replay_endpoint: str = ""
    topics: list[str] = []
    sequence: int = 0  # of the last batch
    first_sequence: int = 0
    buffered_batches: int = 0
    buffered_bytes: int = 0
    held_blocks: int = 0  # announced and not removed since
    pending_chunks: int = 0
    unbalanced_blocks: int = 0
    state_bytes: int = 0
    subscribers: int = 0
    replayed_batches: int = 0
    bad_requests: int = 0


class PublisherStatus(Struct, frozen=True, kw_only=True):
    streams: list[StreamStatus] = []
    refused_streams: int = 0


class EngineEventsStatus(Struct, frozen=True, kw_only=True):
    """The stream of KV events that an engine publishes itself."""

    state: str = "waiting"
    reason: str | UnsetType = UNSET  # why it is refused, if it is
    endpoint: str = ""
    replay: bool = False  # missed batches can be requested
    incomplete_seconds: float | None = None  # since when blocks may be missing
    sequence: int | None = None  # of the last batch
    batches: int = 0
    malformed: int = 0  # messages, batches and events
    lost_gaps: int = 0  # that no replay filled
    restarts: int = 0


class IndexStatus(Struct, frozen=True, kw_only=True):
    blocks: int = 0
    memory_bytes: int = 0
    most_bytes: int = 0
    refused_blocks: int = 0
    dropped_reaches: int = 0
    engines: dict[str, EngineEventsStatus | None] = {}  # by instance; None: it publishes no KV events


class FollowerStatus(Struct, frozen=True, kw_only=True):
    """An engine that publishes what the feed hands it."""

    instance_id: str = ""
    follow: int = 0
    whole: bool = False
    queued_chunks: int = 0
    unbalanced_blocks: int = 0


class FeedStatus(Struct, frozen=True, kw_only=True):
    beginnings: int = 0
    followers: list[FollowerStatus] = []
