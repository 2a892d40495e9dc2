"""What engines hold in their own memory, read from their KV events: over real sockets, in order, with losses."""

from __future__ import annotations

import random
import tempfile
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from msgspec.structs import replace
from support.daemon import wait_until
from support.engine_publisher import CLEARED, EnginePublisher, as_array, removed, stored

from kvserver.kv_events import Description
from kvserver.kv_events.types import KeysStored, ReaderConnected, ReaderDisconnected, Tier
from kvserver.protocol import SGLANG_HASH, SGLANG_PAIRS_HASH, DescribeScheduler, KVGroup, ObjectGroup
from kvserver.routing import KVIndex
from kvserver.routing.engine_subscription import unreadable

PREFIX = b"r" * 32
OWNERS = 64  # of the index
BLOCKS = [bytes([n]) * 32 for n in range(1, 200)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as path:  # not tmp_path: a socket's path has little room
        yield Path(path)


@pytest.fixture
def index() -> Iterator[KVIndex]:
    index = KVIndex(64 << 20, follow_engines=True)
    yield index
    index.close()


@pytest.fixture
def engine(folder: Path) -> Iterator[EnginePublisher]:
    publisher = EnginePublisher(folder)
    yield publisher
    publisher.close()


def connected(engine: EnginePublisher, name: str = "engine", **more: Any) -> ReaderConnected:
    fields = {
        "instance_id": name,
        "incarnation": "1",
        "model_name": "model",
        "variant": "",
        "events_endpoint": engine.endpoint,
        "events_replay_endpoint": engine.replay_endpoint,
        "events_topic": engine.topic,
    }
    return ReaderConnected(1, 0, DescribeScheduler(**{**fields, **more}), PREFIX, 16, 16)


def leading(index: KVIndex, name: str = "engine", blocks: list[bytes] = BLOCKS) -> int:
    (match,) = index.match(index.known_engines(instance_ids=[name]), b"".join(blocks), len(blocks[0]))
    return match.l0


def status(index: KVIndex, name: str = "engine") -> dict[str, Any]:
    found = index.status().engines[name]
    return msgspec.to_builtins(found) if found is not None else {}


def exported(index: KVIndex, name: str) -> list[Any]:
    (family,) = (family for family in index.families() if family.name == f"kvserver_engine_events_{name}")
    return family.points


def wait_for(index: KVIndex, blocks: int, name: str = "engine") -> None:
    wait_until(lambda: leading(index, name) == blocks, what=f"{blocks} blocks; {status(index, name)}")


def wait_for_batch(index: KVIndex, number: int, name: str = "engine") -> None:
    wait_until(lambda: status(index, name).get("sequence") == number, what=f"batch {number}; {status(index, name)}")


def number_of(block: bytes) -> int:
    return int.from_bytes(block[-8:], "big")


def test_stored_removed_and_cleared_blocks_are_followed(index, engine):
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:5]), removed([BLOCKS[4]]))
    wait_for(index, 4)
    engine.publish(removed([BLOCKS[1]]))
    wait_for(index, 1)
    engine.publish(stored(BLOCKS[:3]), CLEARED, stored(BLOCKS[:2]))
    wait_for(index, 2)
    assert status(index)["state"] == "complete"


def test_integers_and_bytes_name_the_same_blocks(index, engine):
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(stored([number_of(block) for block in BLOCKS[:3]]), stored(BLOCKS[3:5]))
    wait_for(index, 5)
    engine.publish(removed([number_of(BLOCKS[3])]))
    wait_for(index, 3)


def test_the_arrays_of_older_engines_are_read(index, engine):
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    short = as_array(stored(BLOCKS[4:5]))[:6]  # older still: no medium
    engine.publish(as_array(stored(BLOCKS[:4])), short, as_array(removed([BLOCKS[1]])), as_array(stored([BLOCKS[1]])))
    wait_for(index, 5)
    engine.publish(as_array(CLEARED))
    wait_for(index, 0)


def test_a_block_that_two_requests_computed_goes_with_its_second_copy(index, engine):
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:2]), stored(BLOCKS[:2]), removed(BLOCKS[:2]))
    wait_for(index, 2)
    engine.publish(removed(BLOCKS[:1]))
    wait_for(index, 0)


def test_a_match_of_several_groups_is_a_boundary_that_the_engine_itself_would_find(index, engine):
    full, window = ObjectGroup("full", (1, 3), 16), ObjectGroup("window", (0, 2), 16, tokens=31)
    described = replace(connected(engine), object_groups=(full, window))
    index.observe(described)
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:5], group_idx=1), stored(BLOCKS[:5], group_idx=3), stored(BLOCKS[:1], group_idx=2))
    engine.publish(stored(BLOCKS[2:4], group_idx=0))
    wait_for(index, 4)
    engine.publish(removed([BLOCKS[3]], group_idx=0))
    wait_for(index, 0)
    engine.publish(stored([BLOCKS[0]], group_idx=0))
    wait_for(index, 1)
    engine.publish(CLEARED, stored(BLOCKS[:2], group_idx=0))
    wait_for_batch(index, 4)
    assert leading(index) == 0
    engine.publish(stored(BLOCKS[:3], group_idx=1))
    wait_for(index, 2)
    index.observe(replace(described, object_groups=(full, replace(window, members=(3,)))))
    wait_for(index, 0)  # read again from the start, by another group


def test_only_blocks_of_the_gpu_and_of_the_main_group_count(index, engine):
    groups = (KVGroup(kind="sliding_window", window=128), KVGroup(kind="full_attention"))
    index.observe(connected(engine, groups=groups))
    engine.wait_for_subscriber()
    engine.publish(
        stored(BLOCKS[:1], group_idx=1),
        stored(BLOCKS[1:2], medium=None),
        stored(BLOCKS[2:3], group_idx=0),
        stored(BLOCKS[2:3], medium="CPU"),
        removed(BLOCKS[:2], group_idx=0),
        removed(BLOCKS[:2], medium="STORAGE"),
    )
    wait_for_batch(index, 0)
    assert leading(index) == 2


def test_fields_that_are_not_known_yet_are_skipped(index, engine):
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(
        stored(BLOCKS[:2], session_id="s", whatever={"deep": [1, 2]}), [*as_array(stored(BLOCKS[2:4])), None, 0, "x"]
    )
    wait_for(index, 4)
    assert status(index)["malformed"] == 0


def test_events_published_before_the_connection_are_requested(index, engine):
    engine.publish(stored(BLOCKS[:3]))
    engine.publish(stored(BLOCKS[3:6]))
    index.observe(connected(engine))
    wait_for(index, 6)
    assert (engine.asked, status(index)["state"]) == ([0], "complete")


def test_late_index_of_an_engine_without_replay_is_incomplete_until_a_clear(index, folder):
    engine = EnginePublisher(folder, replays=False)
    engine.publish(stored(BLOCKS[:3]))
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:2]))
    wait_for(index, 2)
    assert status(index)["state"] == "incomplete"
    assert status(index)["incomplete_seconds"] >= 0
    engine.publish(CLEARED)
    wait_until(lambda: status(index)["state"] == "complete")
    engine.close()


def test_a_gap_is_replayed(index, engine):
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:1]))
    wait_for(index, 1)
    for n in range(1, 5):
        engine.publish(stored(BLOCKS[n : n + 1]), sent=False)
    engine.publish(stored(BLOCKS[5:6]))
    wait_for(index, 6)
    assert (engine.asked, status(index)["lost_gaps"], status(index)["state"]) == ([0, 1], 0, "complete")


@pytest.mark.parametrize("replays", [True, False])
def test_a_gap_that_cannot_be_replayed_drops_what_was_known(index, folder, replays):
    engine = EnginePublisher(folder, replays=replays, buffered=1)
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:5]))
    wait_for(index, 5)
    engine.publish(removed(BLOCKS[:5]), sent=False)
    engine.publish(stored(BLOCKS[:2]))
    wait_for(index, 2)
    assert leading(index, blocks=BLOCKS[2:]) == 0
    assert (status(index)["lost_gaps"], status(index)["state"]) == (1, "incomplete")
    assert exported(index, "gaps") == [(("engine", "model"), 1)]
    assert exported(index, "following") == [(("engine", "model"), 1)]
    engine.close()


def test_restarted_engine_has_only_its_new_blocks_in_the_index(index, engine):
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    for n in range(5):
        engine.publish(stored(BLOCKS[n : n + 1]))
    wait_for(index, 5)
    engine.restart()
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:1]))
    wait_for(index, 1)
    assert leading(index, blocks=BLOCKS[1:]) == 0
    assert (status(index)["restarts"], status(index)["state"]) == (1, "complete")


def test_an_engine_that_hangs_in_a_replay_is_read_on_after_a_while(index, folder, engine):
    engine.answers = False
    (folder / "2").mkdir()
    other = EnginePublisher(folder / "2")
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(stored(BLOCKS[:3]))
    index.observe(connected(other, "other"))
    other.wait_for_subscriber()
    other.publish(stored(BLOCKS[:7]))
    wait_for(index, 7, "other")
    wait_for(index, 3)
    other.close()


def test_an_engine_that_floods_keeps_no_other_from_being_read(index, folder, engine):
    (folder / "2").mkdir()
    flooding, stop = EnginePublisher(folder / "2"), threading.Event()

    def flood() -> None:
        while not stop.is_set():
            flooding.publish(stored(BLOCKS), removed(BLOCKS))

    index.observe(connected(flooding, "flooding"))
    flooding.wait_for_subscriber()
    thread = threading.Thread(target=flood)
    thread.start()
    try:
        index.observe(connected(engine))
        engine.wait_for_subscriber()
        for n in range(20):
            engine.publish(stored(BLOCKS[n : n + 1]))
            wait_for(index, n + 1)
    finally:
        stop.set()
        thread.join()
        flooding.close()


def test_malformed_messages_are_counted_and_harm_nothing(index, engine):
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    engine.publish(
        stored(BLOCKS[:1]), {"type": "Unheard"}, {"no": "type"}, 7, [], [7], stored([b"short"]), stored(["text"])
    )
    wait_for(index, 1)
    assert status(index)["malformed"] == 7
    topic = engine.topic.encode()
    engine.send_frames(topic, b"12345678")
    engine.send_frames(topic, b"1234", b"payload")
    engine.send_frames(topic + b"-other", bytes(8), b"of another topic that begins so")
    engine.publish(stored(BLOCKS[1:2]))
    wait_for(index, 2)
    assert status(index)["malformed"] == 9
    engine.publish_raw(b"\xc1 is no msgpack")
    wait_until(lambda: status(index)["state"] == "incomplete", what="the lost events are missed")
    assert status(index)["malformed"] == 10
    for raw in (msgspec.msgpack.encode({"a": "map"}), b"", b"\x91" * 5000, msgspec.msgpack.encode([1.0, "text"])):
        engine.publish_raw(raw)
    engine.publish(stored(BLOCKS[:3]))
    wait_for(index, 3)


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


def test_random_events_with_losses_end_where_the_engine_is(index, folder):
    """However batches are lost: as long as the replay has them, the index ends with what the engine holds."""
    generator = random.Random(7)
    engine = EnginePublisher(folder)
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    held: list[bytes] = []
    for _ in range(300):
        if held and generator.random() < 0.45:
            block = held.pop(generator.randrange(len(held)))
            engine.publish(removed([block]), sent=generator.random() < 0.9)
        elif generator.random() < 0.01:
            held.clear()
            engine.publish(CLEARED, sent=generator.random() < 0.9)
        else:
            block = generator.choice(BLOCKS[:40])
            held.append(block)
            event = stored([block] if generator.random() < 0.5 else [number_of(block)])
            engine.publish(event if generator.random() < 0.5 else as_array(event), sent=generator.random() < 0.9)
    engine.publish(stored([BLOCKS[50]]))
    held.append(BLOCKS[50])
    wait_for_batch(index, 300)
    assert {block for block in BLOCKS if leading(index, blocks=[block])} == set(held)
    assert status(index)["lost_gaps"] == 0
    engine.close()


def test_close_does_not_wait_for_an_engine(folder):
    index = KVIndex(64 << 20, follow_engines=True)
    context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    silent.bind(f"ipc://{folder}/replay")
    engine = EnginePublisher(folder, replays=False)
    engine.replay_endpoint = f"ipc://{folder}/replay"
    index.observe(connected(engine))
    engine.wait_for_subscriber()
    closing = threading.Thread(target=index.close)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()
    engine.close()
    context.destroy(0)


# ---- pages that SGLang's events describe ------------------------------------------------------


def sglang_page(first: int, **more: Any) -> Any:
    """Two pages of 16 tokens, of which the first follows block 0."""
    names = [int.from_bytes(block[-8:], "big", signed=True) for block in BLOCKS]
    fields = {"parent_block_hash": names[0], "token_ids": list(range(first, first + 32)), "session_id": "s"}
    return stored(names[first : first + 2], **{**fields, **more})


def test_sglangs_pages_are_handed_over_with_tokens_and_parents(index, engine):
    described: list[tuple[str, list[Description]]] = []
    index.read_pages(lambda name, pages: described.append((name, pages)))
    index.observe(connected(engine, hash_algorithm=SGLANG_HASH, hash_block_tokens=16))
    engine.wait_for_subscriber()
    undescribed = [
        sglang_page(3, cache_salt="salt"),
        sglang_page(5, lora_name="tuned"),
        sglang_page(7, medium="CPU_PINNED"),
        sglang_page(9, token_ids=[[1, 2]] * 32),
        sglang_page(11, token_ids=[1 << 32] * 32),
        sglang_page(13, token_ids=[1]),
        sglang_page(15, block_size=0),
        sglang_page(17, block_size=8, token_ids=list(range(16))),
        sglang_page(19, token_ids=[1 << 20] * (1 << 20)),
        {"type": "BlockStored", "block_hashes": "no"},
        removed(BLOCKS[:1]),
        CLEARED,
    ]
    engine.publish(*undescribed)
    engine.publish(sglang_page(150, session_id="x" * 300), *undescribed)
    engine.publish(sglang_page(1))
    wait_until(lambda: len(described) == 2, what=f"{described}")
    assert [name for name, _ in described] == ["engine"] * 2
    first, second = described[1][1]
    tokens = array("I", range(1, 33))
    assert first == Description(8, BLOCKS[1][-8:], BLOCKS[0][-8:], tokens[:16].tobytes(), 16, session_id="s")
    assert second == Description(8, BLOCKS[2][-8:], BLOCKS[1][-8:], tokens[16:].tobytes(), 16, session_id="s")
    assert [page.session_id for page in described[0][1]] == ["", ""]


def test_a_fault_in_what_receives_the_pages_does_not_end_the_subscription(index, engine, caplog):
    described: list[Any] = []

    def fail_twice(name: str, pages: list[Description]) -> None:
        described.append(pages)
        if len(described) < 3:
            raise KeyError(name)

    index.read_pages(fail_twice)
    index.observe(connected(engine, hash_algorithm=SGLANG_HASH, hash_block_tokens=16))
    engine.wait_for_subscriber()
    for first in (0, 1, 2):
        engine.publish(sglang_page(first))
    wait_until(lambda: len(described) == 3, what=f"{described}")
    wait_for(index, 4)
    assert [record.exc_info[0] for record in caplog.records] == [KeyError], "only the first is logged"


@pytest.mark.parametrize("algorithm", ["sha256", SGLANG_PAIRS_HASH])
def test_pages_of_vllm_and_of_pairs_are_not_handed_over(index, engine, algorithm):
    described: list[Any] = []
    index.read_pages(lambda name, pages: described.append(pages))
    index.observe(connected(engine, hash_algorithm=algorithm, hash_block_tokens=16))
    engine.wait_for_subscriber()
    engine.publish(sglang_page(1), stored(BLOCKS[:1]))
    wait_for(index, 3)
    assert described == []
