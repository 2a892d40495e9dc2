"""The operator switches the daemon's serving off and on under an engine that goes on."""

from __future__ import annotations

import logging

from front_end import FrontEnd
from made_up_model import prompt
from support.daemon import Daemon, wait_until

CHUNK = 64
SOON = 10  # seconds: the daemon is asked once a second
FIRST, SECOND, THIRD, FOURTH = (prompt(seed, 3 * CHUNK + 10) for seed in range(40, 44))


def switch(daemon: Daemon, mode: str) -> None:
    assert daemon.http(f"/config/serving?value={mode}", "POST")[0] == 200


def test_an_engine_computes_while_serving_is_off_and_loads_again_without_a_restart(make_daemon, make_engine, caplog):
    daemon = make_daemon()
    cold = make_engine(daemon)
    for name, tokens in (("first", FIRST), ("second", SECOND), ("third", THIRD)):
        cold.generate(name, tokens)
    warm = make_engine(daemon)
    front = FrontEnd(warm)
    wait_until(lambda: front.connected, SOON, "connected")
    chunks = daemon.status()["l1"]["chunks"]
    with caplog.at_level(logging.WARNING, "vllm.kvserver"):
        switch(daemon, "off")
        assert warm.generate("off", FIRST).external == 0
        warm.generate("new", FOURTH)
        assert daemon.status()["l1"]["chunks"] == chunks, "nothing was stored, and L1 keeps what it had"
        wait_until(lambda: front.reason == "serving_off" and not front.connected, SOON, "the reason")
        assert front.reasons == [("serving_off", "serving is off (POST /config/serving)")]
        switch(daemon, "stores-off")
        assert warm.generate("stores off", SECOND).external == 3 * CHUNK
        wait_until(lambda: front.connected, SOON, "its cache is on: it loads")
        switch(daemon, "on")
        assert warm.generate("on", THIRD).external == 3 * CHUNK
    front.record_steps()
    for name in ("store_failures_total", "load_failures_total", "lookup_timeouts_total", "unsent_total"):
        assert front.series(name) == {(): 0.0}, name
    assert set(front.series("refused_total").values()) == {0.0}
    assert front.series("breaker_open") == {(): 0.0}
    warned = [one for one in caplog.records if one.name.startswith("vllm.kvserver") and one.levelno >= logging.WARNING]
    assert warned == [], "what an operator wants is no fault"
    front.close()
