"""Which engines are followed: those of this machine, as long as they are connected and the index has an owner for them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.daemon import wait_until
from support.engine_publisher import EnginePublisher, stored
from support.followed_engine import BLOCKS, connected, exported, leading, status, wait_for

from kvserver.kv_events.types import KeysStored, ReaderDisconnected, Tier
from kvserver.protocol import ObjectGroup
from kvserver.routing import KVIndex
from kvserver.routing.engine_subscription import unreadable

OWNERS = 64  # of the index


def test_an_engine_that_goes_leaves_nothing(index, engine):
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS))
    wait_for(index, len(BLOCKS))
    index.observe(ReaderDisconnected(2, 0, "engine", "model"))
    wait_until(lambda: index.status().blocks == 0)
    assert index.instance("engine") is None


def test_next_incarnation_of_an_engine_is_replayed_from_the_start(index, engine):
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:2]))
    wait_for(index, 2)
    index.observe(connected(engine))  # reported again: the same stream goes on
    engine.publish(stored(BLOCKS[2:3]))
    wait_for(index, 3)
    assert engine.asked == [0]
    index.observe(connected(engine, incarnation="2"))
    wait_until(lambda: engine.asked == [0, 0])
    wait_for(index, 3)


def test_an_endpoint_elsewhere_is_refused_and_reported(index, engine):
    index.observe(connected(engine, events_endpoint="tcp://192.0.2.1:5557"))
    assert status(index)["state"] == "refused"
    assert "192.0.2.1" in status(index)["reason"]
    assert exported(index, "following") == [(("engine", "model"), 0)]
    assert exported(index, "gaps") == [(("engine", "model"), 0)]


def test_an_engine_that_publishes_nothing_has_no_series_and_one_that_left_none_more(index, engine):
    assert exported(index, "following") == exported(index, "gaps") == []
    index.observe(connected(engine, events_endpoint=""))
    assert exported(index, "following") == exported(index, "gaps") == []
    index.observe(connected(engine))
    wait_until(lambda: exported(index, "following") == [(("engine", "model"), 1)])
    index.observe(ReaderDisconnected(2, 0, "engine", "model"))
    assert exported(index, "following") == exported(index, "gaps") == []


@pytest.mark.parametrize("field", ["events_endpoint", "events_replay_endpoint"])
def test_invalid_address_of_an_engine_is_refused_and_uses_no_place(index, engine, field):
    for _ in range(70):  # more than may be followed
        index.observe(connected(engine, incarnation="other", **{field: "ipc:///" + "long" * 100}))
        wait_until(lambda: status(index).get("state") == "refused")
        index.observe(ReaderDisconnected(2, 0, "engine", "model"))
    index.observe(connected(engine))
    engine.publish(stored(BLOCKS[:2]))
    wait_for(index, 2)


def follow_silent_engines(index: KVIndex, engine: EnginePublisher, count: int) -> None:
    """Connect engines that publish nothing: each has an owner in the index."""
    for number in range(count):
        silent = f"{engine.endpoint}.silent{number}"
        index.observe(connected(engine, f"other {number}", events_endpoint=silent, events_replay_endpoint=""))
    wait_until(lambda: status(index, f"other {count - 1}").get("state") == "waiting")


def test_an_engine_for_which_the_index_has_no_owner_is_refused_until_there_is_one(index, engine):
    follow_silent_engines(index, engine, OWNERS)
    index.observe(connected(engine))
    wait_until(lambda: status(index).get("state") == "refused")
    assert "too few free owners" in status(index)["reason"]
    assert (("engine", "model"), 0) in exported(index, "following")
    assert leading(index) == 0
    index.observe(ReaderDisconnected(2, 0, "other 7", "model"))
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:3]))
    wait_for(index, 3)
    assert status(index)["state"] == "complete"


def test_an_engine_that_left_does_not_wait_for_an_owner(index, engine):
    follow_silent_engines(index, engine, OWNERS)
    index.observe(connected(engine))
    wait_until(lambda: status(index).get("state") == "refused")
    index.observe(ReaderDisconnected(2, 0, "engine", "model"))
    index.observe(ReaderDisconnected(3, 0, "other 7", "model"))
    index.observe(connected(engine, "next"))
    engine.publish(stored(BLOCKS[:3]))
    wait_for(index, 3, "next")
    assert "engine" not in index.status().engines


def test_an_engine_of_two_groups_leaves_the_last_owner_to_others(index, engine):
    follow_silent_engines(index, engine, OWNERS - 1)
    groups = (ObjectGroup("full", (1,), 16), ObjectGroup("window", (0,), 16, tokens=31))
    index.observe(replace(connected(engine, "two"), object_groups=groups))
    wait_until(lambda: status(index, "two").get("state") == "refused")
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:3]))
    wait_for(index, 3)


def test_namespaces_that_no_engine_reads_make_room_for_an_engine(index, engine):
    for number in range(OWNERS):
        index.observe(KeysStored(Tier.L1, number.to_bytes(64, "big"), BLOCKS[:1]))
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:3]))
    wait_for(index, 3)
    assert index.status().dropped_reaches == 1


def test_an_index_that_follows_no_engines_connects_to_none(engine):
    index = KVIndex(64 << 20, follow_engines=False)
    index.observe(connected(engine))
    assert index.status().engines == {"engine": None}
    index.close()


@pytest.mark.parametrize(
    "endpoint", ["ipc:///run/events", "tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://localhost:1"]
)
def test_endpoints_of_this_machine_are_read(endpoint):
    assert unreadable(endpoint) == ""


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "ipc://",
        "tcp://*:5557",
        "tcp://127.0.0.1",
        "tcp://host:1",
        "tcp://0.0.0.0:1",
        "inproc://a",
        "tcp://[::1:5",
        "tcp://127.0.0.1:x",
    ],
)
def test_remote_and_malformed_endpoints_are_not_read(endpoint):
    assert unreadable(endpoint)
