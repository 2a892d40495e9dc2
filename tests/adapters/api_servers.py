"""Two API servers of one engine, as vLLM starts them: a process each, whose metrics prometheus_client puts together.

A program: prints the exposition. The first server receives from the engine that it cannot have a cache, the second
receives only the daemon's answer, which does not contain that.
"""

from __future__ import annotations

import os
import tempfile

with tempfile.TemporaryDirectory() as folder:
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # before prometheus_client is imported
    from prometheus_client import CollectorRegistry, Gauge, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    from kvserver.adapters.common.board import Board
    from kvserver.adapters.common.cache_status import CONNECTED

    for server in ("first", "second"):
        child = os.fork()
        if child == 0:
            board = Board("vllm:kvserver_", Gauge, ["model_name", "engine"], {0: ["m", "0"]}, local=True)
            if server == "first":
                board.engine_reported(0, {"scheduler": ["unsupported", "so it is"]})
            board.daemon_answered(0, CONNECTED, began=1e18)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
