"""Publishes which chunks are in L1 and L2, for routers.

`types` are the events that observers receive. `hub` makes them from the loop's events, with the contents of each chunk:
`descriptions` reads these from stores, `pages` matches those of engines' own events, and `described` keeps them. `observers` makes and runs the observers: `publisher` (ZMQ),
`feed` (engines that publish events themselves) and `lines` (a file). `ledger` counts blocks for them.

The feed and a stream share no log. A stream keeps encoded batches for all its subscribers, and drops the oldest ones. The feed keeps
references to chunks for one engine, and restarts an engine that falls behind from a snapshot.
"""

from kvserver.kv_events.feed import Feed
from kvserver.kv_events.hub import Hub
from kvserver.kv_events.lines import make_lines
from kvserver.kv_events.observers import Observers
from kvserver.kv_events.publisher import NotOneTopic, Snapshot, make_publisher, publisher_families
from kvserver.kv_events.snapshot import MOST_SNAPSHOT_SECONDS, Busy, Encoding, snapshot_parts
from kvserver.kv_events.types import (
    Description,
    DirectEvent,
    KeysCleared,
    KeysRemoved,
    KeysStored,
    KVChunk,
    KVEvent,
    KVRemoved,
    KVStored,
    ObserverContext,
    ReaderCame,
    ReaderConnected,
    ReaderDisconnected,
    ReaderGone,
    Tier,
)
