"""The daemon published as soon as its address was bound. A subscriber that waited for the address had not connected yet: of 20 batches
it missed 19, without a replay address for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
import zmq
from support.kv_feed import chunk, namespace_prefix
from support.kv_publisher import Published
from support.kv_subscriber import Subscriber
from support.ports import reserved_port

HERE = namespace_prefix("weights")
BATCHES = 20


@pytest.fixture
def endpoint() -> Iterator[str]:
    holder, port = reserved_port()
    with holder:
        yield f"tcp://127.0.0.1:{port}"


def publish(endpoint: str, stack: ExitStack) -> Published:
    """A publisher with 20 batches from its start on."""
    published = stack.enter_context(closing(Published(kv_events_endpoint=endpoint, kv_events_replay_endpoint="")))
    published.feed.reader_connected("engine", HERE)
    for number in range(BATCHES):
        published.feed.stored(HERE, chunk(f"{number}"))
        published.sequence()  # closes the batch
    return published


def refused(subscriber: Subscriber) -> Callable[[], None]:
    """Returns a function that waits until the subscriber was refused once: its next try is some time off."""
    monitor = subscriber.sub.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)

    def wait() -> None:
        assert monitor.poll(10_000), "the subscriber did not try to connect"

    return wait


def test_a_subscriber_that_waits_receives_all_batches_without_a_replay(endpoint: str) -> None:
    with ExitStack() as stack:
        waiting = stack.enter_context(closing(Subscriber(endpoint)))
        refused(waiting)()
        published = publish(endpoint, stack)
        published.catch_up(waiting)
        assert waiting.missed == 0
        assert waiting.blocks.resident == published.feed.blocks(HERE)
        assert [number for _, number, _ in waiting.received] == [
            published.boot_micros + at for at in range(BATCHES + 1)
        ]


def test_batches_wait_for_the_first_subscriber_for_seconds_only(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvserver.kv_events.stream_sockets.MOST_CONNECT_SECONDS", 0.2)
    with ExitStack() as stack:
        published = publish(endpoint, stack)
        published.stream()
        late = Subscriber(endpoint)
        stack.enter_context(closing(late))
        late.follow(lambda: late.last >= published.boot_micros + BATCHES)
    assert late.received[0][1] == published.boot_micros
