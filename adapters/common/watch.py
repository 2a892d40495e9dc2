"""Queries the daemon whether it serves the engines of this front end, also while they are idle and report nothing.

Owns: a thread with a connection of its own, and the engines' names. Refuses to know: what follows from the answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from kvserver.adapters.common.cache_status import CacheStatus, from_hello
from kvserver.adapters.common.link import absence, failure
from kvserver.adapters.common.log import log
from kvserver.adapters.common.notices import EngineNames
from kvserver.protocol.client import Client

_INTERVAL_SECONDS = 1.0
_ANSWER_SECONDS = 2.0

Answered = Callable[[int, CacheStatus, float], None]  # (engine index; its status; when the query was sent)


class Watch:
    """Thread that queries the daemon. It ends some seconds after `stop` is set."""

    def __init__(self, endpoint: str, engines: Mapping[int, EngineNames], answered: Answered) -> None:
        """`engines`: by index."""
        self.stop = threading.Event()
        self._endpoint = endpoint
        self._engines = engines
        self._answered = answered
        self._client: Client | None = None
        threading.Thread(target=self._run, name="kvserver-watch", daemon=True).start()

    def _run(self) -> None:
        failed = False
        while not self.stop.is_set():
            try:
                self._ask()
            except Exception:
                if not failed:
                    log.exception(
                        "kvserver: vllm:kvserver_connected may be wrong, since the query failed (further faults are not logged)"
                    )
                failed = True
            self.stop.wait(_INTERVAL_SECONDS)
        self._hang_up()

    def _ask(self) -> None:
        began = time.monotonic()
        why = absence(self._endpoint)
        try:
            if why is None:
                self._client = self._client or Client(self._endpoint, _ANSWER_SECONDS)
                for index, names in self._engines.items():
                    began = time.monotonic()
                    reply = self._client.hello("watch", names.instance_id, names.incarnation)
                    self._answered(index, from_hello(reply.standing, reply.standing_text), began)
                return
        except Exception as error:
            why = failure(self._endpoint, error)
        self._hang_up()  # queries that the daemon has not read are dropped with the connection
        for index in self._engines:
            self._answered(index, why, began)

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
