"""A late consumer ends with the same blocks as one from the start, however the tiers were used: random runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.kv_feed import chunk, namespace_prefix
from support.kv_publisher import Published, from_snapshot
from support.kv_subscriber import Blocks, Subscriber

from kvserver.kv_events.types import KVChunk, Tier

PREFIXES = [namespace_prefix("one"), namespace_prefix("other")]
NAMESPACES = [*PREFIXES, PREFIXES[0] + b"lora".ljust(32)]
STEPS = 400


def some_chunk(generator: random.Random) -> KVChunk:
    """Of a tree of prompts, so that chunks share blocks."""
    path = [f"{generator.randrange(3)}" for _ in range(4)]
    return chunk(*("/".join(path[: depth + 1]) for depth in range(4)))


def step(generator: random.Random, published: Published) -> None:
    feed, namespace, tier = published.feed, generator.choice(NAMESPACES), generator.choice(list(Tier))
    here = [each for (at, name, _), each in feed.resident.items() if (at, name) == (tier, namespace)]
    match generator.random():
        case draw if draw < 0.6:
            fresh = {each.key: each for each in (some_chunk(generator) for _ in range(generator.randrange(1, 5)))}
            wanted = [each for each in fresh.values() if (tier, namespace, each.key) not in feed.resident]
            if wanted:
                feed.stored(namespace, *wanted, tier=tier)
        case draw if draw < 0.95 and here:
            feed.removed(namespace, *generator.sample(here, min(len(here), generator.randrange(1, 6))), tier=tier)
        case draw if draw < 0.97 and here:  # the tier is cleared
            feed.removed(namespace, *here, tier=tier)
        case _:
            feed.reader_connected(
                "wandering", generator.choice(PREFIXES)
            )  # a and b stay: blocks without a reader are not published


def expected(published: Published) -> set[tuple[str, int | None, int | bytes]]:
    return published.feed.blocks(*PREFIXES)


def by_snapshot(published: Published) -> Subscriber:
    """Subscribes, reads a snapshot, and applies the batches after it."""
    late = published.subscriber()
    taken = published.publisher.snapshot()
    late.blocks, late.last = from_snapshot(taken), taken.sequence
    return late


def by_replay(published: Published) -> Subscriber:
    late = published.subscriber()
    for _, sequence, payload in late.replay(0):
        late.apply(sequence, payload)
    return late


def forgetful(subscriber: Subscriber, generator: random.Random) -> None:
    """Loses some of the messages that are there."""
    while message := subscriber.receive(0):
        if generator.random() < 0.7:
            subscriber.accept(message)


@pytest.fixture
def publish() -> Iterator[Callable[..., Published]]:
    made: list[Published] = []

    def make(**settings: str) -> Published:
        made.append(Published(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("seed", range(4))
def test_late_consumers_know_what_those_from_the_start_know(seed: int, publish: Callable[..., Published]) -> None:
    generator, published = random.Random(seed), publish()
    for name, at in zip("ab", PREFIXES, strict=True):
        published.feed.reader_connected(name, at)
    first, lossy = published.subscriber(), published.subscriber()
    late: list[Subscriber] = []
    for number in range(STEPS):
        step(generator, published)
        if generator.random() < 0.3:
            published.sequence()  # ends a batch
        forgetful(lossy, generator)
        if number % 100 == 50:
            late += [by_snapshot(published), by_replay(published)]
    published.catch_up(first, *late)
    assert first.blocks.resident == expected(published)
    for each in late:
        assert (each.missed, each.blocks.resident) == (0, expected(published))
    published.feed.stored(PREFIXES[0], chunk("the last"))
    published.catch_up(lossy)
    assert (lossy.missed, lossy.blocks.resident) == (0, expected(published))
    assert from_snapshot(published.publisher.snapshot()).resident == expected(published)
    status = published.publisher.status().streams[0]
    assert (status.held_blocks, status.unbalanced_blocks) == (len(expected(published)), 0)


@pytest.mark.parametrize("seed", range(2))
def test_consumers_live_through_restarts(seed: int, tmp_path: Path, publish: Callable[..., Published]) -> None:
    generator = random.Random(seed)
    paths = {"kv_events_endpoint": f"ipc://{tmp_path}/e", "kv_events_replay_endpoint": f"ipc://{tmp_path}/r"}
    steady: Subscriber | None = None
    for _ in range(3):
        published = publish(**paths)
        for name, at in zip("ab", PREFIXES, strict=True):
            published.feed.reader_connected(name, at)
        steady = steady or published.subscriber()
        for _ in range(60):
            step(generator, published)
            published.sequence()
            forgetful(steady, generator)
        published.feed.stored(PREFIXES[0], chunk("the last"))  # shows a gap to a consumer that lost all
        published.catch_up(steady)
        assert steady.blocks.resident == expected(published)
        published.publisher.close()


def test_a_consumer_of_a_repeated_event_fails() -> None:
    """The check that all of these tests rest on."""
    event = {"type": "BlockStored", "medium": "CPU", "group_idx": 0, "block_hashes": [1]}
    blocks = Blocks()
    blocks.apply_event(event)
    with pytest.raises(AssertionError):
        blocks.apply_event(event)
    with pytest.raises(AssertionError):
        Blocks().apply_event({**event, "type": "BlockRemoved"})
