"""Sends the engine stats to the daemon, from a thread of the engine's front end.

A daemon that is absent, hangs or does not know the engine costs the engine nothing.

Owns: the socket, and how often it sends. Refuses to know: how the stats are added up, and how the daemon uses them.
"""

from __future__ import annotations

import contextlib
import threading

from kvserver.adapters.common.link import absence
from kvserver.adapters.common.log import log
from kvserver.protocol import EngineLoad, Error
from kvserver.protocol.client import Channel

_CONNECT_SECONDS = 2.0
_LONGEST_REST = 8  # intervals, for an engine that the daemon does not know


def send_stats(endpoint: str, stats: EngineLoad, stop: threading.Event) -> None:
    """Send the current `stats` once in each interval, more rarely while the daemon refuses, until `stop` is set."""
    interval = stats.interval_seconds
    try:
        with contextlib.closing(Channel(endpoint)) as channel:
            while not stop.is_set():
                if any(isinstance(reply, Error) for _, reply in channel.receive()):
                    # The daemon does not know the engine yet, or never will.
                    stats.interval_seconds = min(stats.interval_seconds * 2, interval * _LONGEST_REST, 86400.0)
                else:
                    stats.interval_seconds = interval
                if absence(endpoint) is None and channel.wait_writable(_CONNECT_SECONDS):
                    channel.send(stats)
                stop.wait(stats.interval_seconds)
    except Exception:
        log.exception("kvserver: the stats of this engine are no longer sent to the daemon")
