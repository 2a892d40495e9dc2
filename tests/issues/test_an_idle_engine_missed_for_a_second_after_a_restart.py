"""A channel whose daemon was away tried to connect after ever longer pauses, up to a second. The scheduler half of an idle engine
keeps its channel over a restart of the daemon, so its requests missed for up to a second after the next daemon was ready.
"""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from kvserver.protocol.client import Channel

AWAY_SECONDS = 2.5  # by then the pauses were at their largest
SOON_SECONDS = 0.5


def test_channels_connect_soon_after_the_daemon_is_back(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/socket"
    channels = []
    for _ in range(8):  # whose attempts are at different times
        channels.append(Channel(endpoint))
        time.sleep(0.05)
    time.sleep(AWAY_SECONDS)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    try:
        router.bind(endpoint)
        back = time.monotonic()
        waits = []
        for channel in channels:
            assert channel.wait_writable(10)
            waits.append(time.monotonic() - back)
        assert max(waits) < SOON_SECONDS, waits
    finally:
        for channel in channels:
            channel.close()
        router.close(0)
        context.term()
