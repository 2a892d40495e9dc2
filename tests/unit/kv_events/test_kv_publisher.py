"""The ZMQ publisher on real sockets: batches, replay, late subscribers, readers that do not read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.daemon import wait_until
from support.kv_feed import chunk, namespace_prefix
from support.kv_publisher import Published
from support.kv_subscriber import Subscriber, events_of

from kvserver.kv_events import stream_sockets
from kvserver.kv_events.publisher import publisher_families
from kvserver.protocol import KVGroup
from kvserver.protocol.kv_status import PublisherStatus

HERE = namespace_prefix("weights")


@pytest.fixture
def publish() -> Iterator[Callable[..., Published]]:
    made: list[Published] = []

    def make(**settings: Any) -> Published:
        made.append(Published(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert all(row.unbalanced_blocks == 0 for row in each.publisher.status().streams)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(0)


@pytest.fixture
def published(publish: Callable[..., Published]) -> Published:
    """With one instance."""
    made = publish()
    made.feed.reader_connected("engine", HERE)
    return made


def types(payload: bytes) -> list[str]:
    return [event["type"] for event in events_of(payload)]


def test_a_batch_is_closed_by_time_and_numbers_count_up_from_the_boot(published: Published) -> None:
    subscriber = published.subscriber()
    assert subscriber.last == published.boot_micros
    for name in "abc":
        published.feed.stored(HERE, chunk(name))
        message = subscriber.receive()
        assert message is not None
        subscriber.accept(message)
    assert [number - published.boot_micros for _, number, _ in subscriber.received] == [0, 1, 2, 3]
    assert types(subscriber.received[0][2]) == ["AllBlocksCleared"]


def test_a_burst_becomes_batches_of_bounded_size(published: Published) -> None:
    subscriber = published.subscriber()
    chunks = [chunk(*(f"{i}.{j}" for j in range(16))) for i in range(1000)]
    for at in range(0, 1000, 250):
        published.feed.stored(HERE, *chunks[at : at + 250])
    published.catch_up(subscriber)
    batches = [events_of(payload) for _, _, payload in subscriber.received[1:]]
    assert max(len(batch) for batch in batches) <= 64
    assert 16 <= len(batches) < 200
    published.feed.removed(HERE, *chunks[:250])
    for at in range(250, 1000, 250):
        published.feed.removed(HERE, *chunks[at : at + 250])
    published.catch_up(subscriber)
    removed = [
        event
        for _, _, payload in subscriber.received
        for event in events_of(payload)
        if event["type"] == "BlockRemoved"
    ]
    assert max(len(event["block_hashes"]) for event in removed) <= 1024
    assert sum(len(event["block_hashes"]) for event in removed) == 16_000


def test_blocks_of_two_chunks_are_published_once(published: Published) -> None:
    subscriber, one, other = published.subscriber(), chunk("a", "b", "c"), chunk("a", "b", "x")
    published.feed.stored(HERE, one, other)
    published.feed.removed(HERE, one)
    published.catch_up(subscriber)  # its Blocks fail for a block that is published twice
    assert subscriber.blocks.resident == published.feed.blocks(HERE)
    stored = [event for _, _, payload in subscriber.received for event in events_of(payload) if "token_ids" in event]
    assert [len(event["block_hashes"]) for event in stored] == [3, 1]
    assert stored[1]["parent_block_hash"] == stored[0]["block_hashes"][1]


def test_a_new_subscriber_alone_receives_that_all_is_cleared(published: Published) -> None:
    first = published.subscriber()
    published.feed.stored(HERE, chunk("a"))
    published.catch_up(first)
    late = published.subscriber()
    assert [(number, types(payload)) for _, number, payload in late.received] == [
        (published.boot_micros, ["AllBlocksCleared"])
    ]
    published.feed.stored(HERE, chunk("b"))
    published.catch_up(first, late)
    assert [number - published.boot_micros for _, number, _ in first.received] == [0, 1, 2]
    assert [number - published.boot_micros for _, number, _ in late.received] == [0, 2]


def test_subscribers_that_connect_and_leave_at_once_disturb_no_other(published: Published) -> None:
    first = published.subscriber()
    published.feed.stored(HERE, chunk("a"))
    published.catch_up(first)
    for _ in range(300):
        hasty = Subscriber(published.stream().endpoint)
        hasty.close()
    published.feed.stored(HERE, chunk("b"))
    published.catch_up(first)
    assert [types(payload) for _, _, payload in first.received].count(["AllBlocksCleared"]) == 1
    assert (first.missed, first.blocks.resident) == (0, published.feed.blocks(HERE))
    wait_until(lambda: published.stream().subscribers == 1)


def test_a_subscriber_receives_its_prefix_only_until_it_unsubscribes(publish: Callable[..., Published]) -> None:
    published = publish(kv_events_topic="kv-events")
    published.feed.reader_connected("engine", HERE)
    whole, other = published.subscriber(""), Subscriber(published.stream().endpoint, topic="other")
    kv = published.subscriber("kv")
    wait_until(lambda: published.stream().subscribers == 3)
    published.feed.stored(HERE, chunk("a"))
    published.catch_up(whole, kv)
    kv.sub.setsockopt(zmq.UNSUBSCRIBE, b"kv")
    wait_until(lambda: published.stream().subscribers == 2)
    published.feed.stored(HERE, chunk("b"))
    published.catch_up(whole)
    assert (len(whole.received), len(kv.received)) == (3, 2)
    assert kv.receive(50) is None
    assert other.receive(50) is None
    other.close()


def test_a_gap_is_filled_by_a_replay(published: Published) -> None:
    subscriber = published.subscriber()
    for name in "abcdef":
        published.feed.stored(HERE, chunk(name))
        published.sequence()
        message = subscriber.receive()
        if name in "af":  # the others are lost
            subscriber.accept(message)
    assert (subscriber.missed, subscriber.blocks.resident) == (0, published.feed.blocks(HERE))
    assert published.stream().replayed_batches >= 4


def test_a_replay_of_everything_begins_with_the_first_batch(published: Published) -> None:
    published.feed.stored(HERE, chunk("a"))
    last = published.sequence()
    subscriber = published.subscriber()
    replayed = subscriber.replay(0)
    batches = [
        (number, types(payload)) for _, number, payload in replayed if types(payload)
    ]  # without the empty batches, which show newcomers a gap
    assert batches == [(published.boot_micros, ["AllBlocksCleared"]), (last, ["BlockStored"])]
    assert [payload for _, _, payload in subscriber.replay(last + 1) if types(payload)] == []
    assert subscriber.replay(1 << 63) == []


def test_a_replay_of_batches_no_longer_kept_begins_with_the_oldest_kept(publish: Callable[..., Published]) -> None:
    published = publish(kv_events_buffer="1MiB")
    published.feed.reader_connected("engine", HERE)
    subscriber = published.subscriber()
    for i in range(8):
        published.feed.stored(HERE, *(chunk(*(f"{i}.{j}.{k}" for k in range(16))) for j in range(250)))
    last = published.sequence()
    row = published.stream()
    assert row.buffered_bytes <= 1 << 20
    oldest = last - row.buffered_batches + 1
    assert oldest > published.boot_micros + 2
    numbers = [number for _, number, _ in subscriber.replay(published.boot_micros)]
    assert numbers == [published.boot_micros, *range(oldest, last + 1)]
    assert [number for _, number, _ in subscriber.replay(published.boot_micros + 1)] == [*range(oldest, last + 1)]


def test_a_client_with_a_req_socket_gets_a_batch_for_each_of_its_requests(
    published: Published, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """As in vLLM's example: it takes one reply to each request, be it one to the request before."""
    for name in "abc":
        published.feed.stored(HERE, chunk(name))
        last = published.sequence()
    replay = context.socket(zmq.REQ)
    replay.connect(published.stream().replay_endpoint)
    numbers: list[int] = []
    while len(numbers) <= last - published.boot_micros:
        replay.send((published.boot_micros + len(numbers)).to_bytes(8, "big"))
        assert replay.poll(10_000)
        _, number, payload = replay.recv_multipart()
        if payload and int.from_bytes(number, "big") == published.boot_micros + len(numbers):
            numbers.append(int.from_bytes(number, "big"))
    assert numbers == list(range(published.boot_micros, last + 1))


def test_bad_requests_are_counted_and_others_are_answered(
    published: Published, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    subscriber = published.subscriber()
    bad = context.socket(zmq.DEALER)
    bad.connect(published.stream().replay_endpoint)
    for frames in ([b"x"], [b"", b"short"], [b"", bytes(8), b"kv", b"more"], [b"", b""], [bytes(8)]):
        bad.send_multipart(frames)
    wait_until(lambda: published.stream().bad_requests == 5)
    assert len(subscriber.replay(0)) == 1


def stopped_subscriber(endpoint: str, replay_endpoint: str) -> subprocess.Popen[str]:
    """A process that subscribes, requests a replay of everything, and is stopped before it reads any of it."""
    program = f"""
import os, signal, zmq
context = zmq.Context()
sub, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
sub.connect({endpoint!r}), replay.connect({replay_endpoint!r})
sub.setsockopt(zmq.SUBSCRIBE, b"")
sub.recv_multipart()
replay.send_multipart([b"", bytes(8)])
replay.poll()
os.kill(os.getpid(), signal.SIGSTOP)
"""
    return subprocess.Popen([sys.executable, "-c", program], text=True)


def test_a_stopped_subscriber_slows_no_other(publish: Callable[..., Published]) -> None:
    published = publish(kv_events_buffer="256MiB")
    published.feed.reader_connected("engine", HERE)
    subscriber, row = published.subscriber(), published.stream()
    stopped = stopped_subscriber(row.endpoint, row.replay_endpoint)
    try:
        wait_until(lambda: Path(f"/proc/{stopped.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        for i in range(40):
            published.feed.stored(HERE, *(chunk(*(f"{i}.{j}.{k}" for k in range(16))) for j in range(256)))
            published.catch_up(subscriber)
        assert subscriber.missed == 0
        assert subscriber.blocks.resident == published.feed.blocks(HERE)
        assert len(subscriber.replay(0)) == published.stream().buffered_batches
        published.publisher.close()  # nor does it delay the end
    finally:
        os.kill(stopped.pid, signal.SIGKILL)
        stopped.wait()


def test_the_end_of_the_daemon_clears_every_stream(published: Published) -> None:
    subscriber = published.subscriber()
    published.feed.stored(HERE, chunk("a"))
    published.catch_up(subscriber)
    published.publisher.close()
    subscriber.follow(lambda: not subscriber.blocks.resident)
    assert types(subscriber.received[-1][2]) == ["AllBlocksCleared"]


def test_forms_and_models_have_streams_of_their_own(published: Published) -> None:
    published.feed.reader_connected("raw", HERE, form="bytes")
    published.feed.reader_connected("other", namespace_prefix("other"), model_name="other/model")
    one = chunk("a", "b")
    published.feed.stored(HERE, one)
    published.feed.stored(namespace_prefix("other"), chunk("c"))
    published.stream(2)
    integers, raw, other = (published.subscriber(number=number) for number in range(3))
    published.feed.stored(HERE, chunk("d"))
    published.feed.removed(HERE, one)
    for number, subscriber in enumerate((integers, raw, other)):
        published.sequence(number)
        for message in subscriber.replay(published.boot_micros):
            subscriber.accept(message)
    assert integers.blocks.resident == published.feed.blocks(HERE)
    assert raw.blocks.resident == published.feed.blocks(HERE, form="bytes")
    assert other.blocks.resident == published.feed.blocks(namespace_prefix("other"))
    rows = published.publisher.status().streams
    assert [(row.model_name, row.hash_form) for row in rows] == [
        ("model", "int"), ("model", "bytes"), ("other/model", "int")
    ]  # fmt: skip
    assert len({row.endpoint for row in rows} | {row.replay_endpoint for row in rows}) == 6


def test_a_late_instance_brings_blocks_that_are_resident_already(published: Published) -> None:
    chunks = [chunk(f"{i}") for i in range(1000)]
    elsewhere = namespace_prefix("elsewhere")
    for at in range(0, 1000, 250):
        published.feed.stored(elsewhere + b"lora", *chunks[at : at + 250])
    subscriber = published.subscriber()
    published.feed.reader_connected("late", elsewhere)
    published.feed.removed(elsewhere + b"lora", *chunks[:100])
    published.catch_up(subscriber)
    assert subscriber.blocks.resident == published.feed.blocks(HERE, elsewhere)


def test_there_are_at_most_64_streams(publish: Callable[..., Published]) -> None:
    published = publish()
    for i in range(70):
        published.feed.reader_connected(f"engine {i}", HERE, model_name=f"model {i}")
    status = published.publisher.status()
    assert len(status.streams) == 64
    assert status.refused_streams == 6


def test_each_kv_cache_group_has_events_of_its_own(publish: Callable[..., Published]) -> None:
    published = publish()
    published.feed.reader_connected("engine", HERE, groups=(KVGroup("full_attention"), KVGroup("sliding_window", 128)))
    subscriber, one = published.subscriber(), chunk("a", "b")
    published.feed.stored(HERE, one)
    published.catch_up(subscriber)
    assert subscriber.blocks.resident == published.feed.blocks(HERE, groups=2)
    stored = events_of(subscriber.received[-1][2])
    assert [(event["group_idx"], event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")) for event in stored] == [
        (0, "full_attention", None), (1, "sliding_window", 128)
    ]  # fmt: skip
    published.feed.removed(HERE, one)
    published.catch_up(subscriber)
    assert subscriber.blocks.resident == set()


def test_addresses_of_further_streams_are_found_by_counting(publish: Callable[..., Published], tmp_path: Path) -> None:
    published = publish(
        kv_events_endpoint=f"ipc://{tmp_path}/kv", kv_events_replay_endpoint=f"ipc://{tmp_path}/{{model}}.{{form}}"
    )
    for number, model_name in enumerate(("a/b", "a:b", "c")):
        published.feed.reader_connected(f"engine {number}", HERE, model_name=model_name)
    rows = [published.stream(number) for number in range(3)]
    assert [row.endpoint.removeprefix(f"ipc://{tmp_path}/") for row in rows] == ["kv", "kv-1", "kv-2"]
    assert [row.replay_endpoint.removeprefix(f"ipc://{tmp_path}/") for row in rows] == [
        "a_b.int",
        "a_b.int-1",
        "c.int",
    ]
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("kv", "kv-2", "c.int")} == {0o600}


def test_an_address_in_use_is_reported_and_the_snapshot_goes_on(
    publish: Callable[..., Published], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_sockets, "RETRY_SECONDS", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        published = publish(kv_events_endpoint=f"tcp://127.0.0.1:{port}")
        published.feed.reader_connected("engine", HERE)
        published.feed.stored(HERE, chunk("a"))
        state = wait_until(
            lambda: next((row.state for row in published.publisher.status().streams if row.state != "starting"), None)
        )
        assert state.startswith(f"cannot bind tcp://127.0.0.1:{port}: Address already in use")
        assert len(published.publisher.snapshot().chunks) == 1
    subscriber = published.subscriber()  # the publisher tries to bind again
    assert [number for _, number, payload in subscriber.replay(0) if types(payload)] == [
        published.boot_micros,
        published.boot_micros + 1,
    ]


def test_a_late_subscriber_of_a_quiet_stream_soon_sees_the_gap(published: Published) -> None:
    published.feed.stored(HERE, chunk("a"))
    published.sequence()
    late = published.subscriber()
    late.follow(lambda: late.blocks.resident == published.feed.blocks(HERE))
    assert [types(payload) for _, _, payload in late.received] == [["AllBlocksCleared"], []]


def test_an_ipc_address_that_another_process_serves_is_left_to_it(
    publish: Callable[..., Published], tmp_path: Path
) -> None:
    one = publish(kv_events_endpoint=f"ipc://{tmp_path}/kv")
    one.feed.reader_connected("engine", HERE)
    one.stream()
    other = publish(kv_events_endpoint=f"ipc://{tmp_path}/kv")
    other.feed.reader_connected("engine", HERE)
    wait_until(lambda: "another process serves it" in other.publisher.status().streams[0].state)
    one.subscriber()


def test_without_an_address_nothing_is_published() -> None:
    with pytest.raises(AssertionError):
        Published(kv_events_endpoint="", kv_events_replay_endpoint="")


def test_numbers_are_wall_clock_microseconds(published: Published) -> None:
    assert abs(published.boot_micros / 1e6 - time.time()) < 3600
    time_, _, rank = msgspec.msgpack.decode(published.subscriber().received[0][2])
    assert (abs(time_ - time.time()) < 3600, rank) == (True, 0)


def test_older_consumers_are_sent_arrays(publish: Callable[..., Published]) -> None:
    published = publish(kv_events_format="array")
    published.feed.reader_connected("engine", HERE)
    subscriber = published.subscriber()
    published.feed.stored(HERE, chunk("a", "b"), chunk("c"))
    published.feed.removed(HERE, chunk("c"))
    published.catch_up(subscriber)
    assert subscriber.blocks.resident == published.feed.blocks(HERE)
    raw = [event for _, _, payload in subscriber.received for event in msgspec.msgpack.decode(payload)[1]]
    assert [event[0] for event in raw] == ["AllBlocksCleared", "BlockStored", "BlockStored", "BlockRemoved"]


def test_a_network_address_is_warned_of(publish: Callable[..., Published], caplog: pytest.LogCaptureFixture) -> None:
    publish(kv_events_endpoint="tcp://127.0.0.1:0", kv_events_replay_endpoint="tcp://[::1]:0")
    assert not caplog.records
    publish(kv_events_endpoint="tcp://*:0")
    assert [record.message for record in caplog.records] == [
        "KV events carry token ids, and every client that can connect to tcp://*:0 can read them"
    ]


def test_the_metrics_agree_with_the_status(published: Published) -> None:
    published.subscriber()
    published.feed.stored(HERE, chunk("a", "b"))
    published.sequence()
    found = {family.name: dict(family.points) for family in publisher_families(published.publisher.status())}
    stream = ("model", "int")
    assert found["kvserver_kv_events_batches"] == {stream: 2}
    assert found["kvserver_kv_events_held_blocks"] == {stream: 2}
    assert found["kvserver_kv_events_subscribers"] == {stream: 1}
    assert found["kvserver_kv_events_bound"] == {stream: 1}
    assert found["kvserver_kv_events_refused_streams"] == {(): 0}
    assert {family.name for family in publisher_families(PublisherStatus())} == set(found)
