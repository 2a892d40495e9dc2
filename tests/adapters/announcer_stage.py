"""An announcer at work between a consumer of the engine's stream and a daemon whose answers a test gives.

Owns: chunks by number, the clock. Refuses to know: what must be published.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from array import array
from pathlib import Path
from typing import Any

from peer import Peer as DaemonPeer
from support.kv_audience import Audience

from kvserver.adapters.common.announcer import Announcer
from kvserver.adapters.common.notices import EngineNames
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.events import TierEvents
from kvserver.protocol import KVBlocks, KVEventsTaken, KVGroup, Reply, TakeKVEvents

GROUPS = (KVGroup("full_attention"), KVGroup("sliding_window", 128))
TOKENS = 4  # of a block
PER_CHUNK = 3


def block_hash(prompt: int, index: int) -> bytes:
    return hashlib.sha256(f"{prompt}/{index}".encode()).digest()


def chunk(number: int, *, stored: bool = True, medium: str = "CPU", group: int = 0, **fields: Any) -> KVBlocks:
    """The second chunk of a prompt."""
    hashes = b"".join(block_hash(number, i) for i in range(PER_CHUNK))
    if not stored:
        return KVBlocks(False, medium, 32, hashes, group)
    tokens = array("I", range(number, number + PER_CHUNK * TOKENS)).tobytes()
    return KVBlocks(True, medium, 32, hashes, group, TOKENS, block_hash(number, -1), tokens, **fields)


def removal(number: int, **fields: Any) -> KVBlocks:
    return chunk(number, stored=False, **fields)


def hashes_of(*numbers: int) -> set[bytes]:
    return {block_hash(number, i) for number in numbers for i in range(PER_CHUNK)}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Stage:
    """An announcer between a consumer and a peer whose answers a test gives. close() at the end."""

    def __init__(self, clock: Clock, publishes: bool = True) -> None:
        self.clock = clock
        self.hook = PoolHook()
        self.consumer = Audience()
        self._folder = tempfile.mkdtemp(prefix="kvs-")
        self._peer = DaemonPeer(Path(self._folder))
        self._peer.listen()
        names = EngineNames("i", "n", "m")
        self.announcer = Announcer(self._peer.dispatcher, names, TierEvents(GROUPS), publishes)
        self.asked: list[TakeKVEvents] = []
        self._frames: list[Any] = []  # of these
        self.connect()

    def connect(self) -> None:
        """A new session, with no question on its way."""
        assert self._peer.link.connect().wait_writable(5)
        self._peer.dispatcher.usable()

    def hang_up(self) -> None:
        self._peer.link.session = None
        self._peer.dispatcher.usable()

    def end_pass(self, seconds: float = 1.0) -> bool:
        """Whether it asked the peer. Time passes before."""
        self.clock.now += seconds
        sent = self._peer.sent
        self.announcer.request_events()
        if self._peer.sent == sent:
            return False
        received = self._peer.receive(10)
        assert received is not None
        frames, request = received
        assert isinstance(request, TakeKVEvents)
        self.asked.append(request)
        self._frames.append(frames)
        return True

    def answer(self, reply: Reply, which: int = -1) -> None:
        """To the last question, or an earlier one."""
        self._peer.reply(self._frames[which], reply)

    def deliver(self, *events: KVBlocks, follow: int = 7, whole: bool = False, more: bool = False) -> None:
        """One question and its answer, with these events."""
        assert self.end_pass()
        cursor = self.asked[-1].cursor + len(events)
        self.answer(KVEventsTaken(follow=follow, cursor=cursor, events=list(events), whole=whole, more=more))

    def step(self) -> list[Any]:
        """What one step hands to vLLM."""
        events = self.announcer.drain_events(self.hook.clears)
        self.consumer.read(events)
        return events

    def blocks(self, medium: str = "CPU", group: int = 0) -> set[Any]:
        """What the consumer believes to be there."""
        return self.consumer.blocks(medium, group)

    def close(self) -> None:
        self._peer.close()
        shutil.rmtree(self._folder)
