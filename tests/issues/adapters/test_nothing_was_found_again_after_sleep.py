"""vLLM resets the connector's cache before it sleeps, as after new weights, so an engine that had slept shared with itself only, for good."""

from __future__ import annotations

import pytest
from engine_core import EngineCore
from made_up_model import prompt
from support.daemon import wait_until
from vllm.platforms import current_platform

from kvserver.adapters.vllm import KVServerConnector

CHUNK = 64
TOKENS = prompt(1, 4 * CHUNK + 10)
KEEP = {"kvserver.on_sleep": "keep"}


def private(daemon, engine) -> str:
    instances = daemon.status()["instances"]
    (found,) = (each for each in instances if each["instance_id"] == engine.config.kv_transfer_config.engine_id)
    return found["private"]


@pytest.fixture(params=["sync", "async"])
def asynchronous(request):
    return request.param == "async"


@pytest.mark.parametrize("ranks", [1, 2])
def test_sleep_that_keeps_the_weights_keeps_what_was_stored(make_daemon, make_engine, asynchronous, ranks):
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, world_size=ranks, extra=KEEP)
    core = EngineCore(engine)
    engine.generate("cold", TOKENS)
    for n in range(2):
        core.operate(lambda: core.sleep(1))
        assert daemon.accounting()["mappings"] == 0
        assert core.operate(core.wake_up)
        assert engine.generate(f"warm {n}", TOKENS).external == 4 * CHUNK
    assert private(daemon, engine) == ""
    more = prompt(2, 3 * CHUNK)
    engine.generate("more", more)
    assert make_engine(daemon, world_size=ranks).generate("other", [*more, 1]).external == 3 * CHUNK


def test_memory_that_comes_back_in_parts_keeps_what_was_stored(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon, extra=KEEP)
    core = EngineCore(engine)
    engine.generate("cold", TOKENS)
    core.operate(lambda: core.sleep(1))
    assert not core.operate(lambda: core.wake_up(["weights"]))
    assert core.operate(lambda: core.wake_up(["kv_cache"]))
    assert engine.generate("warm", TOKENS).external == 4 * CHUNK


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_requests_of_each_mode_are_right_after_sleep(make_daemon, make_engine, asynchronous, mode):
    """Requests that run when vLLM is to sleep: they are aborted, end before it, or begin anew afterwards."""
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, extra=KEEP)
    core = EngineCore(engine)
    engine.generate("cold", TOKENS)
    running = engine.add("running", prompt(3, 2 * CHUNK + 5), count=CHUNK)
    engine.run(until=lambda: len(running.tokens) > 5)
    core.operate(lambda: core.sleep(1, mode))
    core.operate(core.wake_up)
    engine.run()
    assert running.right
    assert running.finish_reason == ("abort" if mode == "abort" else "length")
    assert engine.generate("warm", TOKENS).external == 4 * CHUNK
    assert make_engine(daemon).generate("other", TOKENS).external == 4 * CHUNK


@pytest.mark.parametrize("version", ["", "step-7"])
def test_after_sleep_the_engine_is_private_unless_configured_otherwise(make_daemon, make_engine, version):
    """As trainers do it: sleep at level 1, wake up, other weights, and no reset."""
    daemon = make_daemon()
    engine = make_engine(daemon)
    core = EngineCore(engine)
    engine.generate("cold", TOKENS)
    engine.config.kv_transfer_config.kv_connector_extra_config["kvserver.weights_version"] = version
    core.operate(lambda: core.sleep(1))
    core.operate(core.wake_up)
    engine.weights = 7
    assert engine.generate("new weights", TOKENS).external == 0
    wait_until(lambda: engine.generate_free("tick") and ("reset_cache" in private(daemon, engine)) == (not version))
    assert make_engine(daemon).generate("other", TOKENS).external == 4 * CHUNK, "of the old weights, which it has"
    assert engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize(
    "resets", ["no sleep", "before sleep", "after wake-up", "pause and release", "pause", "new version"]
)
def test_other_resets_mean_other_weights_also_where_sleep_keeps_them(make_daemon, make_engine, asynchronous, resets):
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, extra=KEEP)
    core = EngineCore(engine)
    engine.generate("cold", TOKENS)
    reset = lambda: core.reset_prefix_cache(reset_connector=True)  # noqa: E731
    if resets in ("before sleep", "no sleep"):
        assert reset()
    if resets in ("pause and release", "pause"):
        core.operate(core.pause_scheduler)
    if resets == "pause and release":
        core.operate(core.release_kv_cache_memory)
        core.operate(lambda: core.wake_up(["kv_cache"]))
    if resets == "pause":
        core.resume_scheduler()
    if resets == "new version":
        engine.config.kv_transfer_config.kv_connector_extra_config["kvserver.weights_version"] = "step-7"
    if resets in ("before sleep", "after wake-up", "new version"):
        core.operate(lambda: core.sleep(1))
        core.operate(core.wake_up)
    if resets == "after wake-up":
        assert reset()
    engine.weights = 7
    assert engine.generate("new weights", TOKENS).external == 0
    assert make_engine(daemon).generate("other", TOKENS).external == 4 * CHUNK, "of the old weights, which it has"
    assert engine.generate("again", prompt(9, CHUNK)).right


def test_a_reset_while_requests_run_stores_nothing_of_both_weights(make_daemon, make_engine, asynchronous):
    """Steps that were planned before the reset are reported after it, and explain nothing."""
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, extra=KEEP)
    engine.generate("cold", TOKENS)
    answer = engine.add("running", prompt(3, 2 * CHUNK), count=3 * CHUNK)
    engine.run(until=lambda: len(answer.tokens) > 5)
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    assert make_engine(daemon).generate("other", [*prompt(3, 2 * CHUNK), *answer.tokens]).external <= 2 * CHUNK
    assert "reset_cache" in private(daemon, engine)


def test_a_worker_that_reports_nothing_leaves_no_request_waiting(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    engine = make_engine(daemon, extra=KEEP)
    engine.generate("cold", TOKENS)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    with monkeypatch.context() as patch:
        patch.setattr(engine.connector.scheduler, "worker_report", lambda report: None)
        answer = engine.add("new weights", TOKENS)
        engine.run(5, until=lambda: answer.finish_reason is not None)
    assert (answer.right, answer.external) == (True, 0)
    engine.run()


@pytest.mark.parametrize(("device", "served"), [("cpu", True), ("cuda", False)])
def test_on_gpus_vllm_does_not_start_with_sleep_mode(monkeypatch, caplog, device, served):
    """Memory that sleep mode may take away on a GPU cannot be exported, so no request would find anything."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: device == "cpu")
    assert KVServerConnector.supports_sleep_mode(None) is served
    assert ("leave out --enable-sleep-mode" in caplog.text) is not served
