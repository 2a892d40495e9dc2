"""Client sockets that were never closed: an engine must not hang in its garbage collector because of them."""

from __future__ import annotations

import subprocess
import sys

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
