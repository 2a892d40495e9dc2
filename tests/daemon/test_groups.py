"""Models of several KV cache groups: each position has a block of each, over the same memory."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from itertools import chain

import msgspec
import pytest
from support.daemon import Daemon
from support.devices import on_each_device
from support.memory import two_groups
from support.worker import Worker, make_keys

from kvserver._native import NO_BLOCK, State
from kvserver.protocol import Error, Stored
from kvserver.protocol.client import RequestFailed

pytestmark = on_each_device
CHUNK = 4  # positions


@pytest.fixture
def hybrid(daemon: Daemon, make_worker: Callable[..., Worker]) -> Worker:
    worker = make_worker(daemon, geometry=two_groups())
    assert worker.chunk_blocks == CHUNK
    return worker


def positions(ids: Sequence[int]) -> list[tuple[int, int]]:
    """One block of each group from a list of ids."""
    return list(zip(ids[::2], ids[1::2], strict=True))


def flat(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """As they travel: [position][group], the null block where there is none."""
    return [0 if id == NO_BLOCK else id for id in chain.from_iterable(pairs)]


def test_what_two_groups_stored_is_loaded_byte_for_byte_and_nothing_else_is_written(hybrid: Worker) -> None:
    ids = random.Random(1).sample(range(1, 64), 48)
    source, target = positions(ids[:24]), positions(ids[24:])
    keys, content = make_keys(3), hybrid.memory.blocks(source)
    assert hybrid.store(keys, flat(source)) == Stored(stored=3, skipped=0)
    assert hybrid.lookup(keys) == 3

    hybrid.memory.fill()
    expected = hybrid.memory.image_with(dict(zip(target, content, strict=True)))
    assert hybrid.load(keys, flat(target)).chunks == 3
    assert hybrid.memory.image() == expected


@pytest.mark.parametrize("skip", [0, 1, 3])
@pytest.mark.parametrize("without", [0, 1])
def test_a_group_without_a_block_is_left_alone(daemon: Daemon, hybrid: Worker, skip: int, without: int) -> None:
    """A sliding window dropped the first positions of one group."""
    ids = random.Random(2).sample(range(1, 64), 32)
    source, target = positions(ids[:16]), positions(ids[16:])
    keys, content = make_keys(2), hybrid.memory.blocks(source)
    hybrid.store(keys, flat(source))

    hole = {0: lambda p: (NO_BLOCK, p[1]), 1: lambda p: (p[0], NO_BLOCK)}[without]
    holed = [hole(pair) if number < 5 else pair for number, pair in enumerate(target)][skip:]
    expected = hybrid.memory.image_with(dict(zip(holed, content[skip:], strict=True)))
    before = daemon.status()["totals"]["loaded_bytes"]
    hybrid.load(keys, flat(holed), skip=skip)
    assert hybrid.memory.image() == expected
    moved = sum(plane.run_bytes for pair in holed for plane in hybrid.geometry.planes if pair[plane.group] != NO_BLOCK)
    assert daemon.status()["totals"]["loaded_bytes"] - before == moved


def test_a_part_of_the_chunks_is_stored_from_the_right_blocks(hybrid: Worker) -> None:
    keys = make_keys(3)
    first, rest = positions(range(1, 9)), positions(range(9, 33))
    assert hybrid.store(keys[1:2], flat(first)).stored == 1
    content = [*hybrid.memory.blocks(rest[:4]), *hybrid.memory.blocks(first), *hybrid.memory.blocks(rest[8:])]
    assert hybrid.store(keys, flat(rest)) == Stored(stored=2, skipped=1)
    target = positions(range(40, 64))
    expected = hybrid.memory.image_with(dict(zip(target, content, strict=True)))
    hybrid.load(keys, flat(target))
    assert hybrid.memory.image() == expected


def test_a_bad_load_is_refused_and_writes_nothing(hybrid: Worker) -> None:
    keys = make_keys(1)
    hybrid.store(keys, list(range(20, 28)))
    image = hybrid.memory.image()
    operation = hybrid.begin_load(keys, [1, 2, 0, 0, 5, 6, 7, 8])
    reply = operation.reply()
    assert isinstance(reply, Error)
    assert (reply.code, "null block" in reply.message) == ("bad_blocks", True)
    assert operation.state == State.FAILED
    assert hybrid.memory.image() == image


def test_a_store_that_does_not_name_a_block_of_each_group_is_refused(hybrid: Worker) -> None:
    keys = make_keys(1)
    with pytest.raises(RequestFailed) as caught:
        hybrid.store(keys, [0, 2, 3, 4, 5, 6, 7, 8])
    assert caught.value.code == "bad_blocks"
    assert hybrid.lookup(keys) == 0


def test_models_whose_groups_differ_share_nothing(daemon: Daemon, make_worker: Callable[..., Worker]) -> None:
    geometry = two_groups()
    one = make_worker(daemon, geometry=geometry)
    planes = tuple(msgspec.structs.replace(plane, group=1 - plane.group) for plane in geometry.planes)
    other = make_worker(daemon, geometry=dataclasses.replace(geometry, planes=planes))
    keys = make_keys(1)
    one.store(keys, list(range(1, 9)))
    assert one.lookup(keys) == 1
    assert other.lookup(keys) == 0
