"""One topic for each attached instance: what it can read now, and the same numbers on all of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from support.kv_feed import chunk, namespace_prefix
from support.kv_publisher import Published, from_snapshot
from support.kv_subscriber import events_of

from kvserver.kv_events import NotOneTopic
from kvserver.kv_events.types import Tier

ONE, OTHER = namespace_prefix("one"), namespace_prefix("other")


@pytest.fixture
def published() -> Iterator[Published]:
    """With an instance of each namespace prefix."""
    made = Published(kv_events_topic="kv@{instance}@{model}")
    made.feed.reader_connected("a", ONE)
    made.feed.reader_connected("b_dp3", OTHER)
    yield made
    assert made.publisher.status().streams[0].unbalanced_blocks == 0
    made.close()


def types(payload: bytes) -> list[str]:
    return [event["type"] for event in events_of(payload)]


def test_each_topic_carries_what_its_instance_can_read(published: Published) -> None:
    a, b = published.subscriber("kv@a@model"), published.subscriber("kv@b_dp3@model")
    published.feed.stored(ONE, chunk("x", "y"))
    published.feed.stored(OTHER, chunk("x", "z"), tier=Tier.L2)
    last = published.sequence()
    published.catch_up(a, b)
    assert a.blocks.resident == published.feed.blocks(ONE)
    assert b.blocks.resident == published.feed.blocks(OTHER)
    assert last in a.batches
    assert last in b.batches


def test_a_topic_without_news_has_an_empty_batch(published: Published) -> None:
    a, b = published.subscriber("kv@a@model"), published.subscriber("kv@b_dp3@model")
    published.sequence()  # the first batches are out
    published.feed.stored(ONE, chunk("x"))
    last = published.sequence()
    published.catch_up(a, b)
    assert types(a.batches[last]) == ["BlockStored"]
    assert types(b.batches[last]) == []


def test_an_instance_that_connects_later_begins_with_all_cleared_and_all_resident_blocks(published: Published) -> None:
    published.feed.stored(ONE, *(chunk(f"{i}") for i in range(250)), chunk("x", "y"))
    published.feed.reader_connected("late", ONE)
    a, late = published.subscriber("kv@a@model"), published.subscriber("kv@late@model")
    published.sequence()
    for _, sequence, payload in late.replay(0):
        late.apply(sequence, payload)
    assert late.blocks.resident == published.feed.blocks(ONE)
    replayed = [kind for _, _, payload in late.replay(published.boot_micros + 1) for kind in types(payload)]
    assert replayed[0] == "AllBlocksCleared"
    assert replayed.count("AllBlocksCleared") == 1
    assert [kind for _, _, payload in a.received for kind in types(payload)].count("AllBlocksCleared") == 1


def test_new_weights_remove_the_old_blocks_and_publish_the_resident_ones(published: Published) -> None:
    published.feed.stored(ONE, *(chunk(f"old {i}") for i in range(256)), chunk("shared", "old"))
    published.feed.stored(OTHER, *(chunk(f"new {i}") for i in range(256)), chunk("shared", "new"))
    a = published.subscriber("kv@a@model")
    for _, sequence, payload in a.replay(published.boot_micros + 1):
        a.apply(sequence, payload)
    published.catch_up(a)
    assert a.blocks.resident == published.feed.blocks(ONE)
    published.feed.reader_connected("a", OTHER)
    published.feed.removed(ONE, chunk("shared", "old"))
    published.feed.removed(OTHER, chunk("new 0"))
    published.feed.stored(OTHER, chunk("new 300"))
    published.catch_up(a)
    assert a.blocks.resident == published.feed.blocks(OTHER)


def test_weights_that_go_and_return_are_published_once(published: Published) -> None:
    published.feed.stored(ONE, *(chunk(f"{i}") for i in range(256)))
    a = published.subscriber("kv@a@model")
    published.sequence()
    for _, sequence, payload in a.replay(published.boot_micros + 1):
        a.apply(sequence, payload)
    for at in (OTHER, ONE, OTHER, ONE):
        published.feed.reader_connected("a", at)
    published.feed.removed(ONE, chunk("7"))
    published.catch_up(a)
    assert a.blocks.resident == published.feed.blocks(ONE)


def test_when_an_instance_disconnects_its_topic_alone_is_cleared(published: Published) -> None:
    a, b = published.subscriber("kv@a@model"), published.subscriber("kv@b_dp3@model")
    published.feed.stored(ONE, chunk("x"))
    published.feed.stored(OTHER, chunk("z"))
    published.feed.reader_disconnected("a")
    published.feed.stored(OTHER, chunk("zz"))
    published.catch_up(b)
    a.follow(lambda: a.last > published.boot_micros and not a.blocks.resident)
    assert b.blocks.resident == published.feed.blocks(OTHER)
    assert published.stream().topics == ["kv@b_dp3@model"]


def test_a_subscriber_of_all_topics_soon_sees_a_batch_on_each(published: Published) -> None:
    everything = published.subscriber("kv@")
    everything.follow(lambda: {topic for topic, _, _ in everything.received} == {b"kv@a@model", b"kv@b_dp3@model"})


def test_batches_state_the_data_parallel_rank_of_their_instance(published: Published) -> None:
    ranks = [
        msgspec.msgpack.decode(published.subscriber(topic).received[0][2])[2]
        for topic in ("kv@a@model", "kv@b_dp3@model")
    ]
    assert ranks == [0, 3]


def test_a_snapshot_is_of_one_topic(published: Published) -> None:
    published.feed.stored(ONE, chunk("x"))
    published.feed.stored(OTHER, chunk("z"))
    with pytest.raises(NotOneTopic) as caught:
        published.publisher.snapshot("model")
    assert caught.value.several
    assert caught.value.known == [{"model": "model", "form": "int", "topics": ["kv@a@model", "kv@b_dp3@model"]}]
    taken = published.publisher.snapshot("model", topic="kv@a@model")
    assert from_snapshot(taken).resident == published.feed.blocks(ONE)
