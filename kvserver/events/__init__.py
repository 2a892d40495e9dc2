"""Typed events of the server, and the bus that hands them to subscribers.

It also has the tools of subscribers with a thread of their own: a bounded queue (`runner`), and files that log rotation may move
away (`appended_file`).
"""

from kvserver.events.appended_file import AppendedFile
from kvserver.events.bus import Bus, Subscriber
from kvserver.events.chunk_events import publish_evicted
from kvserver.events.runner import QUEUE_COST, Runner
from kvserver.events.types import (
    NAMES,
    BlockReport,
    ChunksDescribed,
    ChunksEvicted,
    ChunksLoaded,
    ChunksStored,
    CopyBegan,
    CopyEnded,
    CopyRefused,
    ErrorSent,
    Event,
    InstanceDescribed,
    InstanceDisconnected,
    InstanceRegistered,
    L1Cleared,
    L1Resynced,
    L2Cleared,
    L2Removed,
    L2Resynced,
    L2Stored,
    LookupEnded,
    NamespaceFormed,
    RequestEnded,
    ResyncPart,
    WorkerDisconnected,
    WorkerRegistered,
)
