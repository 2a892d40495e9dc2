"""KV that engines hold in their own memory, read from their KV events: over real sockets, in order, with losses."""

from __future__ import annotations

import random
import threading

import msgspec
import pytest
import zmq
from msgspec.structs import replace
from support.daemon import wait_until
from support.engine_publisher import CLEARED, EnginePublisher, as_array, removed, stored
from support.followed_engine import BLOCKS, connected, exported, leading, number_of, status, wait_for, wait_for_batch

from kvserver.protocol import KVGroup, ObjectGroup
from kvserver.routing import KVIndex


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
