"""Of an engine whose KV cache group 0 is a window, vllm-router 0.1.17 read the window alone, and Dynamo 1.6.1 took removals from the window
for removals from full attention: both lost prompts that were in L1. The routers themselves are in daemon/test_routers.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.kv_feed import chunk, describe, named, namespace_prefix
from support.kv_publisher import Published
from support.kv_subscriber import events_of

from kvserver.kv_events.types import KVChunk
from kvserver.protocol import KVGroup

HERE = namespace_prefix("weights")
WINDOW_FIRST = (KVGroup("sliding_window", 32), KVGroup("full_attention"))


@pytest.fixture
def publish() -> Iterator[Any]:
    made: list[Published] = []

    def make(**settings: str) -> Published:
        made.append(Published(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def announced(
    published: Published, topic: str = "", groups: tuple[KVGroup, ...] = WINDOW_FIRST
) -> set[tuple[str, str, int]]:
    """Type, kind and number of the group, of an object of full attention and of its window."""
    published.feed.reader_connected("engine", HERE, groups=groups)
    subscriber = published.subscriber(topic)
    full = KVChunk(named("b"), describe("a", "b", members=(1,)))
    window = KVChunk(named("b"), describe("b", parent="a", members=(0,)))
    published.feed.stored(HERE, full, window)
    published.feed.removed(HERE, window)
    published.catch_up(subscriber)
    events = [event for _, _, payload in subscriber.received for event in events_of(payload)]
    return {
        (event["type"], event.get("kv_cache_spec_kind", ""), event["group_idx"])
        for event in events
        if "group_idx" in event
    }


def test_full_attention_is_group_0_on_the_daemons_stream(publish) -> None:
    assert announced(publish()) == {
        ("BlockStored", "full_attention", 0),
        ("BlockStored", "sliding_window", 1),
        ("BlockRemoved", "", 1),
    }


def test_a_topic_of_one_instance_has_the_numbers_of_its_engine(publish) -> None:
    """A consumer may know the engine's own events by the same name."""
    assert announced(publish(kv_events_topic="kv@{instance}"), "kv@engine") == {
        ("BlockStored", "full_attention", 1),
        ("BlockStored", "sliding_window", 0),
        ("BlockRemoved", "", 0),
    }


def test_mla_counts_as_full_attention(publish) -> None:
    groups = (KVGroup("mamba"), KVGroup("mla_attention"))
    assert ("BlockStored", "mla_attention", 0) in announced(publish(), groups=groups)


def test_a_snapshot_has_the_numbers_of_its_stream(publish) -> None:
    published = publish()
    published.feed.reader_connected("engine", HERE, groups=WINDOW_FIRST)
    published.feed.stored(HERE, chunk("a", members=(1,)))
    assert [number for number, _ in published.publisher.snapshot().groups] == [1, 0]
