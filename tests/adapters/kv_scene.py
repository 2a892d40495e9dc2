"""Engines without a model that publish KV events, and a daemon that publishes too: both streams name the same blocks.

Owns: the streams' readers. Refuses to know: what is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_events_log import Log
from modelless import Engine
from support.daemon import Daemon, wait_until
from support.kv_audience import Subscriber
from vllm.distributed.kv_events import KVEventBatch

from kvserver.protocol import Clear, Cleared
from kvserver.protocol.client import Client

PER_CHUNK = 4  # blocks


class Scene:
    """A daemon that publishes, a subscriber of its stream, and engines that publish too."""

    def __init__(self, daemon: Daemon, engines: list[Engine]) -> None:
        self.daemon = daemon
        self.engines = engines
        self.logs = [Log(engine) for engine in engines]
        self.stream = Subscriber(str(daemon.flags["kv_events_endpoint"]), KVEventBatch)
        self.wait_connected()

    def wait_connected(self, clears: int = 0) -> None:
        """Until the subscriber has received a daemon's first message, which is sent once it knows an engine."""
        self.step_until(lambda: self.stream.audience.clears > clears)

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Engines serve short requests, so that they publish."""
        wait_until(lambda: [engine.generate_free("s") for engine in self.engines] and condition(), 20)

    def wrong(self, resident: set[tuple[int, Any]]) -> str:
        """What the daemon's stream names wrongly, by the daemon's /status; "" if nothing."""
        l1 = self.daemon.status()["l1"]
        blocks = l1["chunks"] * PER_CHUNK + l1["tail_blocks"]  # of no test here are blocks in both
        return f"{blocks} blocks in L1, {len(resident)} on the stream" if len(resident) != blocks else ""

    def agree(self) -> set[Any]:
        """The names of L1's blocks by all streams, as soon as they agree, group by group, with what is resident."""

        def differences() -> list[str]:
            resident = self.resident
            found = [self.wrong(resident)]
            for number, log in enumerate(self.logs):
                named = log.by_group("CPU")
                if named != resident:
                    found.append(f"engine {number}: {len(named - resident)} more, {len(resident - named)} less")
            return [each for each in found if each]

        try:
            self.step_until(lambda: not differences())
        except AssertionError as error:
            raise AssertionError(f"{differences()}, {self.daemon.status()['kv_events']}") from error
        return {name for _, name in self.resident}

    @property
    def resident(self) -> set[tuple[int, Any]]:
        """(KV cache group, block), as the daemon's stream has them."""
        return self.stream.by_group("CPU")

    def clear(self) -> None:
        with Client(self.daemon.endpoint) as client:
            client.ask(Clear(), Cleared)
