"""Client sockets of engines: those that were never closed must not hang a garbage collector, and waits for replies may be short."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.daemon import wait_until

from kvserver.protocol import Status
from kvserver.protocol.client import Channel
from kvserver.protocol.fine_wait import wait_readable

DROPPED = """
import gc, sys
from kvserver.protocol.client import Channel
for _ in range(20):
    channels = [Channel(sys.argv[1]) for _ in range(5)]
    for channel in channels:
        channel.others = channels
        channel.wait_writable(0.01)
    del channel, channels
    gc.collect()
print("collected")
"""


def test_channels_dropped_in_a_cycle_are_closed_by_the_collector(daemon):
    """The context of a socket that is still open waits for it, for ever, if the collector comes to it first."""
    for endpoint in (daemon.endpoint, daemon.endpoint + "-nobody"):
        done = subprocess.run(
            [sys.executable, "-c", DROPPED, endpoint], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout == "collected\n"


@pytest.mark.parametrize("seconds", [0.0, 0.0003, 1.5])
def test_a_wait_of_any_length_finds_the_reply_once_it_has_arrived(daemon, seconds):
    channel = Channel(daemon.endpoint)
    try:
        assert not channel.wait(0.0003), "nothing was sent"
        assert channel.wait_writable(20)
        number = channel.send(Status())
        wait_until(lambda: channel.wait(seconds), 20, "the reply")
        assert [answered for answered, _ in channel.receive()] == [number]
        assert not channel.wait(0.0003), "the reply was received"
    finally:
        channel.close()


def test_a_wait_for_a_descriptor_ends_when_it_is_readable():
    ready = os.eventfd(1)
    try:
        wait_readable(ready, 3600)  # else the test does not end
        os.eventfd_read(ready)
        wait_readable(ready, 0.0003)
    finally:
        os.close(ready)
