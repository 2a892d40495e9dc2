"""Whether an engine has its cache, and why not, is in vLLM's own metrics: with steps and without, for every reason."""

from __future__ import annotations

import ast
import copy
import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from front_end import FrontEnd, exposition, watches
from made_up_model import prompt
from modelless import Engine
from support.daemon import wait_until
from vllm.config import KVTransferConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

import kvserver.adapters.vllm
from kvserver.adapters.common import host_memory
from kvserver.adapters.common.cache_status import REASONS
from kvserver.adapters.common.specs import ids_of
from kvserver.adapters.vllm.prom import PLACES
from kvserver.adapters.vllm.scheduler import SchedulerHalf
from kvserver.cli.checks_engine import HELP
from kvserver.protocol import Error, ErrorCode, Hello, Lookup, RegisterWorker, Retrieve

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)
SOON = 10  # seconds: the daemon is asked once a second, and has two to answer


@pytest.fixture
def make_front_end() -> Iterator[Callable[..., FrontEnd]]:
    """As vLLM makes it when the engine has started; its thread ends with it."""
    made: list[FrontEnd] = []

    def make(engine: Engine, config=None) -> FrontEnd:
        made.append(FrontEnd(engine, config))
        return made[-1]

    yield make
    for front in made:
        front.close()
    gc.collect()
    wait_until(lambda: not watches(), 5, "the threads ended")


def started(engine: Engine) -> Engine:
    """No request has come: it makes the steps that it makes by itself."""
    engine.run()
    return engine


def wait_reason(front: FrontEnd, reason: str) -> None:
    wait_until(lambda: front.reason == reason and front.connected == (not reason), SOON, reason or "connected")


# ---- it has it ----------------------------------------------------------------------------------


def test_an_engine_without_any_request_reports_that_it_has_its_cache(make_daemon, make_engine, make_front_end):
    """By its first step, which it makes by itself; until then nothing is known."""
    daemon = make_daemon()
    engine = started(make_engine(daemon))
    assert [stats.num_running_reqs for stats in engine.stats] == [0], "the step that it makes by itself"
    front = make_front_end(engine)
    assert front.series("connected")[()] in (0.0, 1.0)
    front.record_steps()
    assert front.connected
    assert front.reasons == []
    assert not engine.busy, "it makes one such step and no more"


def test_gauges_exist_from_the_start_and_read_not_connected(make_engine, make_front_end):
    front = make_front_end(make_engine("ipc:///nobody/there", register=False))
    assert front.series("connected") == {(): 0.0}
    assert front.series("breaker_open") == {(): 0.0}
    assert front.series("quarantined_blocks") == {(): 0.0}
    assert len(front.reasons) == 1
    assert front.reason in ("starting", "no_daemon")


def test_the_name_of_an_engine_in_kvserver_is_in_its_metrics(make_daemon, make_engine, make_front_end):
    front = make_front_end(make_engine(make_daemon(), engine_id="llama-a"))
    assert front.series("engine_info") == {("llama-a",): 1.0}


def test_the_daemon_is_asked_where_no_step_reports(make_daemon, make_engine, make_front_end):
    engine = make_engine(make_daemon())
    wait_reason(make_front_end(engine), "")


def test_engine_inside_multi_connector_reports_whether_its_cache_is_on(make_daemon, make_engine, make_front_end):
    def nested(config, caches):
        inner = {
            "kv_connector": "KVServerConnector",
            "kv_connector_module_path": "kvserver.adapters.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": config.kv_transfer_config.kv_connector_extra_config,
        }
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [inner]}
        )

    daemon = make_daemon()
    front = make_front_end(started(make_engine(daemon, adjust=nested)))
    front.record_steps()
    assert front.connected
    daemon.kill()
    wait_reason(front, "no_daemon")


def test_an_engine_with_another_connector_has_none_of_these_metrics(make_daemon, make_engine):
    engine = make_engine(make_daemon())
    config = copy.copy(engine.config)
    config.kv_transfer_config = None
    logger = PrometheusStatLogger(config, [0])
    assert "vllm:num_requests_running" in exposition()
    assert "vllm:kvserver_" not in exposition()
    assert watches() == []
    del logger


# ---- it has none, and why -----------------------------------------------------------------------


def test_engine_without_a_daemon_reports_no_daemon_and_the_endpoint(make_engine, make_front_end, tmp_path):
    engine = started(make_engine(f"ipc://{tmp_path}/none.sock"))
    front = make_front_end(engine)
    front.record_steps()
    assert (front.connected, front.reason) == (False, "no_daemon")
    assert f"{tmp_path}/none.sock" in front.reasons[0][1]


def test_the_daemon_of_an_idle_engine_goes_and_comes_back(make_daemon, make_engine, make_front_end):
    daemon = make_daemon()
    front = make_front_end(started(make_engine(daemon)))
    front.record_steps()
    daemon.kill()
    wait_reason(front, "no_daemon")
    daemon.start()
    wait_reason(front, "")


def test_hung_daemon_of_an_idle_engine_is_reported_until_it_runs_again(make_daemon, make_engine, make_front_end):
    daemon = make_daemon()
    front = make_front_end(started(make_engine(daemon)))
    wait_reason(front, "")
    daemon.freeze()
    wait_reason(front, "no_answer")
    assert front.series("breaker_open")[()] == 0, "the engine has not waited for anything"
    daemon.thaw()
    wait_reason(front, "")


def test_a_breaker_that_opened_is_seen_until_the_daemon_answers(make_daemon, make_engine, make_front_end):
    daemon = make_daemon()
    engine = make_engine(daemon, extra={"kvserver.lookup_timeout_ms": 20, "kvserver.store_timeout_ms": 200})
    front = make_front_end(engine)
    wait_reason(front, "")
    daemon.freeze()
    for number in range(5):
        engine.generate(f"r{number}", prompt(10 + number, 100))
    front.record_steps()
    assert front.series("breaker_open") == {(): 1.0}
    wait_reason(front, "breaker_open")
    daemon.thaw()
    wait_reason(front, "")
    assert front.series("breaker_open") == {(): 0.0}


def test_a_second_engine_with_the_same_id_is_seen_to_be_refused_until_the_first_has_ended(
    make_daemon, make_engine, make_front_end
):
    daemon = make_daemon()
    first = make_engine(daemon, engine_id="one")
    front = make_front_end(make_engine(daemon, engine_id="one"))
    wait_reason(front, "refused_duplicate_instance")
    assert "give each engine its own" in front.reasons[0][1]
    first.close()
    wait_reason(front, "")


@pytest.mark.parametrize("steps", [True, False], ids=["it steps", "it is idle"])
def test_engine_with_one_refused_rank_is_reported_without_cache(
    make_daemon, make_engine, make_front_end, make_tap, steps
):
    tap = make_tap(make_daemon())
    tap.instead = lambda message: (
        Error(code="bad_memory", message="cannot be mapped")
        if isinstance(message, RegisterWorker) and message.rank == 1
        else None
    )
    engine = started(make_engine(tap.endpoint, world_size=2))
    front = make_front_end(engine)
    if steps:
        front.record_steps()
        assert (front.reason, front.reasons[0][1]) == ("refused_bad_memory", "rank 1: bad_memory: cannot be mapped")
    else:  # the daemon was not even asked
        wait_reason(front, "not_registered")
        assert "1 of 2 ranks" in front.reasons[0][1]
    assert not front.connected


def test_daemon_of_another_version_is_reported_as_version_mismatch(make_daemon, make_engine, make_front_end, make_tap):
    tap = make_tap(make_daemon())
    tap.instead = lambda message: (
        Error(code="version_mismatch", message="speaks 9 to 10") if isinstance(message, Hello) else None
    )
    front = make_front_end(started(make_engine(tap.endpoint)))
    front.record_steps()
    assert front.reason == "refused_version_mismatch"
    wait_reason(front, "refused_version_mismatch")


def test_engine_with_an_unsupported_configuration_reports_unsupported(make_daemon, make_engine, make_front_end):
    def refused(config, caches):
        config.parallel_config = copy.copy(config.parallel_config)
        object.__setattr__(config.parallel_config, "prefill_context_parallel_size", 2)

    front = make_front_end(started(make_engine(make_daemon(), adjust=refused)))
    front.record_steps()
    wait_reason(front, "unsupported")
    why = "prefill_context_parallel_size > 1: ranks hold different tokens of a block"
    assert front.reasons in ([("unsupported", f"scheduler: {why}")], [("unsupported", f"rank 0: {why}")])


def test_engine_whose_memory_cannot_be_shared_reports_cannot_share(
    make_daemon, make_engine, make_front_end, monkeypatch
):
    monkeypatch.setattr(host_memory.os, "statvfs", lambda path: SimpleNamespace(f_bavail=16, f_frsize=4096))
    front = make_front_end(started(make_engine(make_daemon())))
    front.record_steps()
    wait_reason(front, "cannot_share")
    assert "/dev/shm has 65536 bytes free" in front.reasons[0][1]
    assert len(front.reasons[0][1]) <= 200


def test_engine_with_an_unknown_setting_reports_setup_failed(make_daemon, make_engine, make_front_end):
    engine = started(make_engine(make_daemon(), extra={"kvserver.loadtimeout": 5}, may_fail=True))
    front = make_front_end(engine)
    front.record_steps()
    assert (front.connected, front.reason) == (False, "setup_failed")
    assert front.series("faults_total")["_set_up",] == 2, "one a half"


def test_fault_that_ended_the_use_of_the_cache_is_reported(make_daemon, make_engine, make_front_end, monkeypatch):
    engine = make_engine(make_daemon(), may_fail=True)
    monkeypatch.setattr("kvserver.adapters.vllm.variants.Variants.weights_changed", lambda *_: 1 / 0)
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    started(engine)
    front = make_front_end(engine)
    front.record_steps()
    wait_reason(front, "fault")
    assert front.series("faults_total")["reset_cache",] == 1


def test_an_engine_on_another_machine_is_not_taken_for_one_without_cache(
    make_daemon, make_engine, make_front_end, tmp_path
):
    """Of data-parallel ranks elsewhere this front end cannot ask the daemon."""
    engine = started(make_engine(make_daemon()))
    config = copy.deepcopy(engine.config)
    config.kv_transfer_config.kv_connector_extra_config["kvserver.endpoint"] = f"ipc://{tmp_path}/other.sock"
    config.parallel_config.data_parallel_size = 2
    front = make_front_end(engine, config)
    wait_reason(front, "no_daemon")
    front.record_steps()
    assert front.connected
    wait_until(lambda: len(watches()) == 1, 5)
    assert front.connected


def test_several_api_servers_report_the_reason_that_one_of_them_knows(tmp_path):
    ended = subprocess.run(
        [sys.executable, Path(__file__).with_name("api_servers.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    ours = [line for line in ended.stdout.splitlines() if line.startswith("vllm:kvserver_")]
    assert 'vllm:kvserver_connected{engine="0",model_name="m"} 0.0' in ours
    (why,) = (line for line in ours if line.endswith(" 1.0"))
    assert 'reason="unsupported"' in why


# ---- what is counted ----------------------------------------------------------------------------


def test_refusals_of_the_daemon_are_counted_by_error_code(make_daemon, make_engine, make_front_end, make_tap):
    tap = make_tap(make_daemon(chunk_tokens=CHUNK))
    make_engine(tap.endpoint).generate("cold", TOKENS)
    engine = make_engine(tap.endpoint)
    front = make_front_end(engine)
    assert front.series("refused_total")["not_found",] == 0
    assert {code for (code,) in front.series("refused_total")} == {code.value for code in ErrorCode} | {"other"}
    tap.instead = lambda message: (
        Error(code="not_found" if isinstance(message, Retrieve) else "of_the_future", message="gone")
        if isinstance(message, Retrieve) or (isinstance(message, Lookup) and message.request_id == "b")
        else None
    )
    engine.generate("a", TOKENS)
    engine.generate("b", prompt(8, 2 * CHUNK))
    front.record_steps()
    assert front.series("refused_total")["not_found",] == 1
    assert front.series("refused_total")["other",] == 1


def test_messages_that_could_not_be_sent_are_counted(make_daemon, make_engine, make_front_end, caplog):
    """A store that was planned before the worker noticed that the daemon had died."""
    daemon = make_daemon()
    engine = make_engine(daemon)
    front = make_front_end(engine)

    def kill(plan):
        if plan.stores and daemon.running():
            daemon.kill()
            wait_until(lambda: "worker 0: running without cache" in caplog.text, what="the worker noticed")

    engine.before_step = kill
    engine.generate("a", TOKENS)
    front.record_steps()
    assert front.series("unsent_total")[()] > 0


def test_quarantined_blocks_and_cancelled_stores_are_in_the_metrics(make_daemon, make_engine, make_front_end):
    daemon = make_daemon(pauses=True)
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon, num_blocks=40, extra={"kvserver.load_timeout_ms": 800})
    front = make_front_end(engine)
    with daemon.paused_copies():
        answer = engine.begin_load("warm", TOKENS)
        daemon.freeze()
    engine.lose_patience()
    engine.run(until=lambda: answer.finish_reason is not None)
    front.record_steps()
    assert front.series("quarantined_blocks")[()] == len(ids_of(engine.loads[0]))
    daemon.thaw()
    wait_until(lambda: engine.generate_free("tick") == 39, 10, "the blocks come back")
    front.record_steps()
    assert front.series("quarantined_blocks")[()] == 0
    with daemon.paused_copies():
        answers = [engine.add(f"r{number}", prompt(50 + number, 300), count=1) for number in range(6)]
        engine.run(60, until=lambda: all(answer.finish_reason is not None for answer in answers))
        engine.run(60, until=lambda: not engine.busy or engine.worker.worker.counters["cancelled_stores"])
        more = engine.add("more", prompt(60, 500), count=1)
        engine.run(60, until=lambda: more.finish_reason is not None)
    engine.run()
    front.record_steps()
    assert front.series("cancelled_stores_total")[()] > 0


def test_faults_are_counted_by_the_method_that_raised(make_daemon, make_engine, make_front_end, monkeypatch):
    engine = make_engine(make_daemon(), may_fail=True)
    front = make_front_end(engine)
    assert front.series("faults_total")["on_new_request",] == 0
    monkeypatch.setattr(SchedulerHalf, "new_request", lambda *_: 1 / 0)
    for number in range(2):
        engine.generate(f"r{number}", prompt(number, 20))
    front.record_steps()
    assert front.series("faults_total")["on_new_request",] == 2
    assert sum(front.series("faults_total").values()) == 2


def test_every_place_of_a_fault_has_a_series_before_its_first_fault():
    """An alert on a counter sees its first increase only if it was there before."""
    found = set()
    adapters = Path(kvserver.adapters.vllm.__file__).parents[1]
    for path in (path for folder in ("common", "vllm") for path in (adapters / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1] in (
                "_fault",
                "_guarded",
                "count",
                "guarded",
            ):
                if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                    found.add(node.args[0].value)
            elif isinstance(node, ast.FunctionDef) and any("fenced" in ast.unparse(d) for d in node.decorator_list):
                found.add(node.name)
    assert len(found) > 40
    made = {f"{what} a {kind}" for what in ("beginning of", "looking at", "aborting") for kind in ("load", "store")}
    assert found | made == set(PLACES)


def test_every_reason_has_a_fix_and_is_documented():
    assert set(REASONS) <= set(HELP)
    page = (Path(__file__).parents[2] / "adapters/README.md").read_text()
    assert [reason for reason in HELP if f"`{reason}`" not in page and not reason.startswith("refused_")] == []


# ---- it stays harmless --------------------------------------------------------------------------


def test_series_stay_bounded_whatever_reasons_and_places_are_reported(make_engine, make_front_end, caplog):
    front = make_front_end(make_engine("ipc:///nobody/there", register=False))
    for number in range(100):
        front.observe({"halves": {"rank 0": [f"reason {number}", f"text {number}"]}, "faults": {f"place {number}": 1}})
        front.observe({"halves": {"rank 0": ["unsupported", f"text {number}\n" + 300 * "x"]}})
        if number % 20 == 0:  # reading all series takes long
            assert front.reason == "unsupported"
    assert len(front.series("without_cache_info")) < 40
    assert {reason for _, reason in front.series("without_cache_info")} <= set(REASONS)
    assert len(front.series("faults_total")) == len(PLACES) + 1
    assert front.series("faults_total")["other",] == 100
    assert "not complete" not in caplog.text


def test_malformed_stats_are_logged_once_and_raise_nothing(make_engine, make_front_end, caplog):
    caplog.set_level(logging.ERROR, "vllm.kvserver")
    front = make_front_end(make_engine("ipc:///nobody/there", register=False))
    for figures in ({"halves": 7}, {"halves": {"rank 0": "?"}}, {"refused": [1]}, {"quarantined_blocks": "many"}):
        front.observe(figures)
    assert caplog.text.count("not complete") == 1
    caplog.clear()  # its traceback keeps vLLM's logger


def test_the_watch_ends_with_vllms_logger(make_daemon, make_engine):
    front = FrontEnd(make_engine(make_daemon()))
    wait_until(lambda: len(watches()) == 1, 5)
    del front
    gc.collect()
    wait_until(lambda: not watches(), 5, "the thread ended")
