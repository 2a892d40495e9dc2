"""What an engine states when it registers: whether its block pool is new, or only a full state reports what is in it."""

from __future__ import annotations

import pytest
from made_up_model import prompt
from modelless import Engine
from support.daemon import Daemon, wait_until

TOKENS = prompt(1, 200)


def l0(daemon: Daemon) -> dict[str, object]:
    (instance,) = daemon.status()["instances"]
    return instance["l0"]


def end(engine: Engine, daemon: Daemon) -> None:
    engine.close()
    wait_until(lambda: daemon.status()["instances"] == [], what="the engine has disconnected")


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_restarted_without_work_is_in_sync(make_daemon, make_engine, ranks):
    daemon = make_daemon()
    former = make_engine(daemon, world_size=ranks)
    former.generate("r", TOKENS)
    wait_until(lambda: l0(daemon)["allocations"])
    end(former, daemon)
    make_engine(daemon, world_size=ranks, engine_id=former.config.kv_transfer_config.engine_id)
    wait_until(lambda: l0(daemon).get("lost"), what="the same instance")
    assert l0(daemon)["unsure"] == 0


def test_an_idle_engine_is_out_of_sync_with_the_next_daemon_until_it_works(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon)
    engine.generate("r", TOKENS)
    daemon.kill()
    daemon.start()
    wait_until(lambda: daemon.status()["instances"], 20, "it registers")
    wait_until(lambda: l0(daemon).get("unsure") == 1)
    wait_until(lambda: engine.generate_free("r") and l0(daemon)["unsure"] == 0, 20, "a full state")


def test_an_engine_that_never_worked_is_in_sync_with_the_next_daemon(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon)
    engine.execute(engine.scheduler.schedule())  # a step in which nothing is computed
    daemon.kill()
    daemon.start()
    wait_until(lambda: daemon.metric("kvserver_l0_unsure") is not None, 20, "it registers")
    assert l0(daemon)["unsure"] == 0
