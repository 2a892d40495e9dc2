"""The stat logger: vLLM's stats reach the daemon, and no failure of it reaches the engine."""

from __future__ import annotations

import gc
import threading
from itertools import pairwise

import pytest
from made_up_model import prompt
from modelless import configure
from support.daemon import wait_until
from vllm.v1.metrics.loggers import StatLoggerManager, load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

from kvserver.adapters.vllm.names import names_of
from kvserver.adapters.vllm.stat_logger import KVServerStatLogger
from kvserver.protocol import EngineLoad

SOON = {"kvserver.load_interval_ms": 20}


@pytest.fixture
def make_logger():
    """As vLLM's front end makes them; they end with the test."""
    managers = []

    def make(config, indexes=(0,)):
        managers.append(
            StatLoggerManager(
                config, list(indexes), custom_stat_loggers=[KVServerStatLogger], enable_default_loggers=False
            )
        )
        return managers[-1]

    yield make
    managers.clear()
    gc.collect()
    wait_until(lambda: not tellers(), 5, "the threads ended")


def tellers():
    return [thread for thread in threading.enumerate() if thread.name == "kvserver-load"]


def iteration(prompt_tokens=0, generated=0, preempted=0):
    stats = IterationStats()
    stats.prompt_token_stats.total = prompt_tokens
    stats.num_generation_tokens = generated
    stats.num_preempted_reqs = preempted
    return stats


def load_of(daemon, until=lambda load: True):
    """Of the only instance, once it is such that."""

    def found():
        load = daemon.status()["instances"][0]["load"]
        return load if load is not None and until(load) else None

    return wait_until(found, 10, "the load is shown")


def test_the_daemon_shows_what_vllm_reports(make_daemon, make_engine, make_logger):
    daemon = make_daemon()
    engine = make_engine(daemon, extra=SOON)
    manager = make_logger(engine.config)
    first = SchedulerStats(
        num_running_reqs=3,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.25,
        prefix_cache_stats=PrefixCacheStats(queries=100, hits=40),
        connector_prefix_cache_stats=PrefixCacheStats(queries=60, hits=32),
    )
    manager.record(first, iteration(prompt_tokens=100, generated=3, preempted=1), engine_idx=0)
    manager.record(first, iteration(generated=4), engine_idx=0)
    manager.record(None, iteration(generated=1), engine_idx=0)
    load = load_of(daemon, lambda load: load["generation_tokens"] == 8)
    assert (load["running"], load["waiting"], load["deferred"], load["kv_cache_usage"]) == (3, 3, 1, 0.25)
    assert (load["prompt_tokens"], load["preemptions"], load["stale"]) == (100, 1, False)
    assert (load["prefix_queries"], load["prefix_hits"]) == (200, 80)
    assert (load["external_queries"], load["external_hits"]) == (120, 64)
    assert load["interval_seconds"] == 0.02


def test_a_working_schedulers_stats_arrive(make_daemon, make_engine, make_logger):
    daemon = make_daemon(chunk_tokens=64)
    engine = make_engine(daemon, extra=SOON)
    manager = make_logger(engine.config)
    for number in range(3):
        engine.add(f"r{number}", prompt(number, 200), 200)
    engine.run(until=lambda: bool(engine.stats) and engine.stats[-1].num_running_reqs == 3)
    manager.record(engine.stats[-1], None, engine_idx=0)
    load = load_of(daemon, lambda load: load["running"] == 3)
    assert load["kv_cache_usage"] == pytest.approx(engine.stats[-1].kv_cache_usage)
    assert load["kv_cache_usage"] > 0
    engine.run()
    manager.record(engine.stats[-1], None, engine_idx=0)
    load_of(daemon, lambda load: load["running"] == 0 and load["kv_cache_usage"] == 0)


def test_vllm_finds_the_plugin():
    assert KVServerStatLogger in load_stat_logger_plugin_factories()


@pytest.mark.parametrize("why", ["no connector", "another connector", "turned off", "bad settings"])
def test_stat_logger_without_anything_to_report_starts_no_thread(model_folder, make_logger, why):
    config, _ = configure(model_folder, "ipc:///nobody", extra={"kvserver.load_interval_ms": 0})
    if why == "no connector":
        config.kv_transfer_config = None
    elif why == "another connector":
        config.kv_transfer_config.kv_connector = "ExampleConnector"
        config.kv_transfer_config.kv_connector_module_path = None
        config.kv_transfer_config.kv_connector_extra_config = {}
    elif why == "bad settings":
        config.kv_transfer_config.kv_connector_extra_config["kvserver.load_interval_ms"] = "often"
    logger = KVServerStatLogger(config, 0)
    logger.record(SchedulerStats(), iteration())
    logger.log_engine_initialized()
    assert logger.stats is None
    assert not tellers()


def test_a_daemon_that_comes_later_is_found(make_daemon, make_engine, make_logger):
    daemon = make_daemon(start=False)
    engine = make_engine(daemon, extra=SOON)
    manager = make_logger(engine.config)
    manager.record(SchedulerStats(num_running_reqs=1), iteration(generated=5), engine_idx=0)
    daemon.start()
    wait_until(lambda: daemon.status()["instances"], 10, "the engine has registered")
    assert load_of(daemon)["generation_tokens"] == 5


def test_a_daemon_that_hangs_costs_the_engine_nothing_and_receives_the_last_report(
    make_daemon, make_engine, make_logger
):
    daemon = make_daemon()
    engine = make_engine(daemon, extra=SOON)
    manager = make_logger(engine.config)
    load_of(daemon)
    daemon.freeze()
    try:
        for number in range(1000):
            manager.record(SchedulerStats(num_running_reqs=number), iteration(generated=1), engine_idx=0)
    finally:
        daemon.thaw()
    assert load_of(daemon, lambda load: load["generation_tokens"] == 1000)["running"] == 999


def test_a_daemon_that_does_not_know_the_engine_is_notified_ever_more_rarely(
    make_daemon, model_folder, make_tap, make_logger
):
    tap = make_tap(make_daemon())
    config, _ = configure(model_folder, tap.endpoint, extra=SOON)
    make_logger(config)

    def pauses():
        return [load.interval_seconds for load in tap.of(EngineLoad)]

    wait_until(lambda: pauses()[-2:] == [8 * 0.02] * 2, 20, "it is tried again, after the longest pause")
    assert pauses()[0] == 0.02
    for before, after in pairwise(pauses()):  # the shortest again after a refusal that a busy machine delayed
        assert after in (min(2 * before, 8 * 0.02), 0.02)


def test_stats_of_another_shape_are_logged_once_and_sent_no_more(model_folder, make_logger, caplog):
    config, _ = configure(model_folder, "ipc:///nobody", extra=SOON)
    logger = KVServerStatLogger(config, 0)
    for _ in range(3):
        logger.record(object(), None)
    assert caplog.text.count("the stats of this engine are no longer sent to the daemon") == 1


def test_thread_of_the_stat_logger_ends_with_the_logger(model_folder):
    config, _ = configure(model_folder, "ipc:///nobody", extra=SOON)
    logger = KVServerStatLogger(config, 0)
    assert len(tellers()) == 1
    del logger
    gc.collect()
    wait_until(lambda: not tellers(), 5, "the thread ended")


def test_front_ends_of_one_engine_are_distinguished(make_daemon, make_engine, make_logger):
    daemon = make_daemon()
    engine = make_engine(daemon, extra=SOON)
    for rank in range(2):
        engine.config.parallel_config._api_process_rank = rank
        manager = make_logger(engine.config)
        manager.record(SchedulerStats(num_running_reqs=rank), iteration(generated=10), engine_idx=0)
    load = load_of(daemon, lambda load: load["generation_tokens"] == 20)
    assert load["running"] == 1


@pytest.mark.parametrize(
    ("size", "rank", "index", "name"),
    [
        (1, 0, 0, "e"),
        (4, 0, 0, "e_dp0"),
        (4, 0, 3, "e_dp3"),
        (4, 2, 3, "e_dp3"),  # a front end of ranks 2 and 3
        (4, 2, 0, "e_dp2"),  # offline: one process for each rank
    ],
)
def test_an_engine_has_the_id_that_its_own_processes_have(model_folder, size, rank, index, name):
    config, _ = configure(model_folder, "ipc:///nobody", engine_id="e")
    config.parallel_config.data_parallel_size = size
    config.parallel_config.data_parallel_rank = rank
    assert names_of(config, index).instance_id == name
