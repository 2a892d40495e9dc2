"""Where blocks of the first object group consist of smaller ones, their extra keys were joined in a time that grew with the square of
their number: one store of 60 chunks took the events' thread minutes, hours if chunks were long. An offset near 2^64 among them ended the
description with an error each time, and what was counted of its memory was never freed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from support.daemon import Daemon, wait_until
from support.kv_chunks import Prompt
from support.kv_follower import Follower
from support.memory import two_groups
from support.worker import Worker

from kvserver.protocol import KVEventsTaken, KVGroup, ObjectGroup

BLOCK = 64  # of the first group; the other's have one token
CHUNKS = 60
GROUPS = (ObjectGroup("full", (0,), BLOCK), ObjectGroup("window", (1,), 1, tokens=1))


@pytest.fixture
def engine(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Daemon, Worker]:
    daemon = make_daemon(kv_events_endpoint=f"ipc://{tmp_path_factory.mktemp('kv')}/events")
    return daemon, make_worker(daemon, geometry=replace(two_groups(), block_tokens=BLOCK), groups=GROUPS)


def published(daemon: Daemon, engine: Worker, extra_keys: list[list[object]]) -> list[list[object]]:
    """The extra keys of each of the first group's blocks that has some, if the smaller blocks have these."""
    one = Prompt(range(BLOCK * CHUNKS), chunk_blocks=BLOCK, block=1)
    engine.send(engine.description(groups=(KVGroup("full_attention"), KVGroup("sliding_window", 2))))
    follower = Follower(lambda message: engine.ask(message, KVEventsTaken), engine.instance_id, engine.incarnation)
    contents = one.contents(
        extra_keys=b"\xdc" + struct.pack(">H", BLOCK * CHUNKS) + b"".join(map(msgspec.msgpack.encode, extra_keys))
    )
    engine.store(one.keys, range(1, 1 + CHUNKS), contents=contents)

    def received() -> bool:
        follower.step()
        return follower.whole and len(follower.names) == CHUNKS

    wait_until(received, what="all blocks are published")
    assert not any(each["errors"] for each in daemon.status()["events"]["subscribers"])
    return [
        keys
        for each in sorted(follower.received, key=lambda each: one.hashes.index(each.hashes[:32]))
        for keys in (msgspec.msgpack.decode(each.extra_keys) if each.extra_keys else [])
    ]


def test_blocks_with_very_many_extra_keys_are_published_at_once(engine: tuple[Daemon, Worker]) -> None:
    many = [[(1 << 17) + 200 * block + key for key in range(200)] for block in range(BLOCK * CHUNKS)]
    expected = [[key for keys in many[first : first + BLOCK] for key in keys] for first in range(0, len(many), BLOCK)]
    assert published(*engine, many) == expected


@pytest.mark.parametrize("offset", [(1 << 63) - 1, (1 << 64) - 1, -(1 << 63)])
def test_an_offset_that_cannot_grow_harms_nothing(engine: tuple[Daemon, Worker], offset: int) -> None:
    keys: list[list[object]] = [[] for _ in range(BLOCK * CHUNKS)]
    keys[1] = [["image", offset]]
    assert published(*engine, keys) == [[["image", offset + (offset < 1 << 63)]]]
