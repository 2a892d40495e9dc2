"""What L1 and L2 hold, told to whoever routes requests.

`types` what observers are told; `hub` makes it of the loop's events and knows what is in each chunk, which `descriptions`
reads out of stores; `observers` runs each observer in a thread of its own; `ledger` counts blocks for them. The rest are
observers: `publisher` (ZMQ), `feed` (engines that publish themselves), `index` (what matches a prompt), `lines` (a file).
"""

from kvserver.kv_events.feed import Feed
from kvserver.kv_events.hub import Hub
from kvserver.kv_events.observers import Observers
from kvserver.kv_events.publisher import NotOneTopic, Snapshot, ZmqPublisher
from kvserver.kv_events.types import MakeObserver, ObserverContext
from kvserver.routing import KVIndex, Match, Reader

__all__ = [
    "Feed",
    "Hub",
    "KVIndex",
    "MakeObserver",
    "Match",
    "NotOneTopic",
    "ObserverContext",
    "Observers",
    "Reader",
    "Snapshot",
    "ZmqPublisher",
]
