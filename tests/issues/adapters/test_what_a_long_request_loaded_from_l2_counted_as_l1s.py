"""The daemon knew what it had read for a request until the request's lease ended: of requests that ran longer, tokens that were loaded
from L2 counted as of L1. Engines state how many of them came from L2.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from made_up_model import prompt
from modelless import Engine
from support.daemon import Daemon, wait_until

CHUNK = 64
MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]


def test_a_request_that_runs_longer_than_its_lease_has_its_tokens_from_l2(
    make_daemon: MakeDaemon, make_engine: MakeEngine, tmp_path: Path
) -> None:
    daemon = make_daemon(chunk_tokens=CHUNK, lease_seconds=1, l2=f"file://{tmp_path}/l2?size=64MiB")
    tokens = prompt(2, 2 * CHUNK + 20)
    first = make_engine(daemon)
    first.generate("cold", tokens)
    first.close()
    wait_until(lambda: (tier := daemon.tier())["objects"] > 0 and not tier["queue_objects"])
    daemon.terminate()
    daemon.start()
    daemon.wait_for_tiers()
    engine = make_engine(daemon)
    answer = engine.add("long", tokens, count=300)
    engine.run(until=lambda: len(answer.tokens) > 0)
    wait_until(lambda: not daemon.status()["books"]["leases"], what="the lease has ended")
    engine.run()

    def counted() -> dict[str, int]:
        rows = {row["instance_id"]: row["requests"] for row in daemon.status()["instances"]}
        found: dict[str, int] = rows[engine.config.kv_transfer_config.engine_id]["prompt_tokens"]
        return found

    expected = {"l0": 0, "l1": 0, "l2": 2 * CHUNK, "computed": 20}
    wait_until(lambda: counted() == expected)
