"""The hub describes chunks by the pages that their engine's own events name, whichever comes first."""

from __future__ import annotations

import queue
import random
import struct
import sys
import threading
from collections.abc import Iterator

import pytest
from support.kv_chunks import Prompt, Witness, prompt, scheduler

from kvserver.events import (
    ChunksEvicted,
    ChunksStored,
    InstanceDescribed,
    InstanceDisconnected,
    L1Cleared,
    L1Resynced,
    L2Cleared,
    L2Removed,
    L2Resynced,
    L2Stored,
    ResyncPart,
)
from kvserver.kv_events import Description, Hub
from kvserver.kv_events import pages as pages_module
from kvserver.kv_events.types import KVStored, Tier
from kvserver.protocol import SGLANG_HASH, SGLANG_PAIRS_HASH, ObjectGroup

HERE, THERE = b"n" * 32, b"o" * 32
SIZE = 4
TEXT = prompt(*range(32), chunk_blocks=1)


def pages(of: Prompt) -> list[Description]:
    """Descriptions as SGLang's events make them: 8 bytes name a page."""
    names = [key[-8:] for key in of.keys]
    return [
        Description(8, name, parent, struct.pack(f"<{SIZE}I", *of.tokens[at * SIZE : (at + 1) * SIZE]), SIZE)
        for at, (parent, name) in enumerate(zip([b"", *names], names, strict=False))
    ]


class SGLang:
    """A hub that knows the engine, and a witness of its events."""

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        self.witness = Witness()
        self.hub = Hub(memory_bytes, self.witness.observe)
        self.hub.reads_pages = True
        self.connect("engine")

    def connect(
        self,
        name: str,
        algorithm: str = SGLANG_HASH,
        groups: tuple[ObjectGroup, ...] = (),
        endpoint: str = "tcp://127.0.0.1:1",
    ) -> None:
        described = scheduler(name, hash_algorithm=algorithm, events_endpoint=endpoint)
        self.hub.handle(InstanceDescribed(1, described, HERE, 1, SIZE, groups))

    def store(self, of: Prompt, namespace: bytes = HERE, instance: str = "engine") -> None:
        self.hub.handle(ChunksStored(5, instance, "m", namespace, b"".join(of.keys)))

    def evict(self, *keys: bytes, namespace: bytes = HERE) -> None:
        self.hub.handle(ChunksEvicted(6, namespace, b"".join(keys)))

    @property
    def announced(self) -> list[bytes]:
        return [key for _, key in self.witness.resident]

    @property
    def undescribed(self) -> int:
        return self.hub.status().unannounced["undescribed"]


@pytest.fixture
def world() -> SGLang:
    return SGLang()


def check(world: SGLang) -> None:
    chunks = list(world.witness.resident.values())
    assert [chunk.key for chunk in chunks] == TEXT.keys
    assert [chunk.description for chunk in chunks] == pages(TEXT)
    assert world.undescribed == 0
    assert {event.instance_id for event in world.witness.events if isinstance(event, KVStored)} == {"engine"}


def test_pages_that_come_before_their_chunks_describe_them(world: SGLang) -> None:
    world.hub.describe_pages("engine", pages(TEXT))
    assert world.announced == []
    world.store(TEXT)
    check(world)


def test_pages_that_come_after_their_chunks_describe_them(world: SGLang) -> None:
    world.store(TEXT)
    assert (world.announced, world.undescribed) == ([], 0)
    world.hub.describe_pages("engine", pages(TEXT)[:3])
    world.hub.describe_pages("engine", pages(TEXT)[3:])
    check(world)


def test_a_chunk_that_left_before_its_page_came_is_not_announced(world: SGLang) -> None:
    world.store(TEXT)
    world.evict(*TEXT.keys[4:])
    world.evict(*TEXT.keys[:4], namespace=THERE)
    world.hub.describe_pages("engine", pages(TEXT))
    assert world.announced == TEXT.keys[:4]
    assert world.undescribed == 4
    world.store(TEXT)
    assert world.announced == TEXT.keys, "the page waits for the next store"


@pytest.mark.parametrize("event", [L1Cleared(7, HERE[:8]), L1Resynced(7, ResyncPart.BEGIN)])
def test_nothing_is_announced_of_what_was_cleared(world: SGLang, event: L1Cleared | L1Resynced) -> None:
    world.store(TEXT)
    world.hub.handle(event)
    world.hub.describe_pages("engine", pages(TEXT))
    assert (world.announced, world.undescribed) == ([], len(TEXT.keys))


def test_an_announced_chunk_is_removed_when_it_leaves(world: SGLang) -> None:
    world.store(TEXT)
    world.hub.describe_pages("engine", pages(TEXT))
    world.evict(*TEXT.keys)
    assert world.announced == []


def test_a_late_page_announces_its_chunk_in_the_tiers_that_have_it_then(world: SGLang) -> None:
    world.store(TEXT)
    names = b"".join(TEXT.keys)
    world.hub.handle(L2Stored(7, HERE, names, 0))
    world.hub.handle(L2Removed(8, HERE, TEXT.keys[0], 0))
    world.hub.describe_pages("engine", pages(TEXT)[:3])
    in_l2 = world.witness.tiers[Tier.L2][()]
    assert (world.announced, [key for _, key in in_l2]) == (TEXT.keys[:3], TEXT.keys[1:3])
    world.hub.handle(L2Cleared(9, b""))
    world.hub.describe_pages("engine", pages(TEXT)[3:])
    assert (world.announced, [*in_l2]) == (TEXT.keys, [])
    assert world.undescribed == 0


def test_another_engines_pages_describe_nothing_of_this_ones(world: SGLang) -> None:
    world.connect("other")
    world.store(TEXT)
    world.hub.describe_pages("other", pages(TEXT))
    world.hub.describe_pages("unknown", pages(TEXT))
    assert world.announced == []


@pytest.mark.parametrize(
    ("reads", "algorithm", "groups", "endpoint"),
    [
        (False, SGLANG_HASH, (), "ipc:///x"),
        (True, SGLANG_HASH, (), ""),
        (True, SGLANG_PAIRS_HASH, (), "ipc:///x"),
        (True, "sha256", (), "ipc:///x"),
        (True, SGLANG_HASH, (ObjectGroup("full", (0,), SIZE), ObjectGroup("window", (1,), SIZE, tokens=9)), "ipc:///x"),
    ],
)
def test_pages_are_kept_only_where_they_are_wanted_and_name_the_chunks_of_one_group(
    world: SGLang, reads: bool, algorithm: str, groups: tuple[ObjectGroup, ...], endpoint: str
) -> None:
    world.hub.reads_pages = reads
    world.connect("another", algorithm, groups, endpoint)
    world.hub.describe_pages("another", pages(TEXT))
    world.store(TEXT, instance="another")
    assert (world.announced, world.undescribed) == ([], len(TEXT.keys))


def test_what_waits_is_bounded_and_the_oldest_is_dropped(world: SGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "_MOST", 3)
    world.store(TEXT)
    assert world.undescribed == len(TEXT.keys) - 3
    world.hub.describe_pages("engine", pages(TEXT))
    assert world.announced == TEXT.keys[-3:]
    other = prompt(*range(100, 132), chunk_blocks=1)
    world.hub.describe_pages("engine", pages(other))
    world.store(other)
    assert world.announced == [*TEXT.keys[-3:], *other.keys[-3:]]


def test_pages_that_wait_use_an_eighth_of_the_memory_and_no_more_than_is_free() -> None:
    size = pages(TEXT)[1].size
    world = SGLang(8 * size)
    world.hub.describe_pages("engine", pages(TEXT))
    assert size - 8 <= world.hub.status().state_bytes <= size, "one page"
    world.store(TEXT)
    assert world.announced == TEXT.keys[-1:]
    for page in pages(TEXT):
        world.hub.describe_pages("engine", [page])
    assert world.announced == TEXT.keys[-1:] + TEXT.keys[:-1]
    assert 7 * size < world.hub.status().state_bytes <= 8 * size
    other = pages(prompt(*range(100, 132), chunk_blocks=1))
    world.hub.describe_pages("engine", other)
    assert world.hub.status().state_bytes <= 8 * size
    world.evict(*TEXT.keys)
    world.hub.describe_pages("engine", [*other, *other])
    assert world.hub.status().state_bytes == other[-1].size
    world.hub.handle(InstanceDisconnected(8, "engine", "m", died=True))
    assert world.hub.status().state_bytes == 0


@pytest.fixture
def busy_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("busy_threads")
def test_pages_that_are_described_while_the_loop_clears_and_resyncs_disturb_neither(world: SGLang) -> None:
    waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    failed: list[Exception] = []

    def describe() -> None:
        try:
            while (key := waiting.get()) is not None:
                world.hub.describe_pages("engine", [Description(8, key[-8:], b"", bytes(SIZE * 4), SIZE)])
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=describe)
    thread.start()
    try:
        for number in range(400):
            world.hub.handle(L2Resynced(7, ResyncPart.BEGIN))
            for namespace in (random.randbytes(32) for _ in range(4)):
                key = random.randbytes(32)
                world.hub.handle(ChunksStored(5, "engine", "m", namespace, key))
                world.hub.handle(L2Stored(7, namespace, key, 0))
                waiting.put(key)
            world.hub.handle(L1Cleared(7, b"" if number % 40 == 0 else b"another"))
            world.hub.handle(L2Resynced(7, ResyncPart.END))
    finally:
        waiting.put(None)
        thread.join()
    assert failed == []
    world.hub.handle(L1Cleared(8, b""))
    world.hub.handle(L2Cleared(8, b""))
    world.hub.handle(InstanceDisconnected(8, "engine", "m", died=False))
    status = world.hub.status()
    assert (world.announced, status.described_chunks, status.state_bytes) == ([], 0, 0)


def test_an_engine_that_disconnects_leaves_nothing_that_waits(world: SGLang) -> None:
    world.hub.describe_pages("engine", pages(TEXT)[:4])
    world.hub.handle(InstanceDisconnected(8, "engine", "m", died=True))
    world.hub.describe_pages("engine", pages(TEXT))
    world.connect("engine")
    world.store(TEXT)
    assert world.announced == []
    world.hub.handle(InstanceDisconnected(8, "engine", "m", died=True))
    assert world.undescribed == len(TEXT.keys)
