"""Each alert of a daemon and its engines fires for a real daemon to which its reason happens: its expression over /metrics, by promtool.

Those about L2 are in test_l2_alerts_fire.py, those from an engine's own metrics in adapters/test_alerts_of_engines.py.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import faulty_daemon
from support.daemon import Daemon, wait_until
from support.engine_publisher import EnginePublisher, stored
from support.pins import KEYS, describe, pin, press
from support.promtool import firing
from support.worker import Worker, ids, make_keys

from kvserver.protocol import MARK, ExactRecords, HandOver
from kvserver.protocol.client import RequestFailed

pytestmark = pytest.mark.long


@pytest.fixture
def make_daemon() -> Iterator[Callable[..., Daemon]]:
    made: list[Daemon] = []

    def make(**flags: Any) -> Daemon:
        made.append(Daemon(metrics_sample_rate=1, **flags).start())
        return made[-1]

    yield make
    for daemon in made:
        daemon.close()


def at_fault(method: str, instead: str = "raise") -> dict[str, Any]:
    """Of a daemon: this method of its own code raises, or hangs."""
    return {"program": (sys.executable, str(Path(faulty_daemon.__file__)), f"kvserver.{method}", instead)}


def metrics(daemon: Daemon) -> str:
    wait_until(lambda: daemon.metric("kvserver_events_queue_depth") == 0)
    return daemon.http("/metrics")[1]


def store(worker: Worker, chunks: int) -> list[bytes]:
    keys = make_keys(chunks)
    worker.store(keys, worker.blocks_for(chunks))
    return keys


def test_a_daemon_that_is_killed_is_down(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon()
    before = metrics(daemon)
    daemon.kill()
    with pytest.raises(OSError, match="refused"):
        daemon.http("/metrics")
    firing(tmp_path, {"KVServerDown"}, before, "", up=False)


def test_a_daemon_that_is_killed_three_times_is_in_a_crash_loop(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon()
    scrapes = [metrics(daemon)]
    for _ in range(3):
        daemon.kill()
        daemon.start()
        scrapes.append(metrics(daemon))
    firing(tmp_path, {"KVServerCrashLoop"}, *scrapes, minutes=20)


def test_a_daemon_that_is_stopped_in_its_turns_lags(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon()

    def long_turns() -> float:
        all_turns, short = (
            daemon.metric(f"kvserver_loop_turn_seconds_{name}", **labels) or 0
            for name, labels in (("count", {}), ("bucket", {"le": "0.1"}))
        )
        return all_turns - short

    with Worker(daemon.endpoint) as worker:
        keys, before = make_keys(16), metrics(daemon)

        def stopped_while_it_works() -> bool:
            sent = [worker.send(worker.lookup_message(keys, f"{number}")) for number in range(200)]
            daemon.freeze()
            time.sleep(0.2)
            daemon.thaw()
            for number in sent:
                worker.reply_to(number)
            return long_turns() > 0

        wait_until(stopped_while_it_works)
        firing(tmp_path, {"KVServerLoopLag"}, before, metrics(daemon))


def test_a_client_that_leaves_before_its_reply_leaves_it_undelivered(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(pauses=True)
    with Worker(daemon.endpoint) as leaving, Worker(daemon.endpoint) as other:
        before = metrics(daemon)
        with daemon.paused_copies():
            leaving.begin_store(make_keys(1), leaving.blocks_for(1))
            daemon.wait_for_a_copy()
            leaving.client.close()
            other.lookup(make_keys(1))
        wait_until(lambda: daemon.metric("kvserver_undelivered_replies_total"))
        firing(tmp_path, {"KVServerUndeliveredReplies"}, before, metrics(daemon))


def test_loads_of_absent_chunks_are_errors(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon()
    with Worker(daemon.endpoint) as worker:
        before = metrics(daemon)
        worker.error_of(worker.load_message(make_keys(1), worker.blocks_for(1)))
        worker.end_request(prompt_tokens=64, loads=1, failed_loads=1)
        wait_until(lambda: daemon.metric("kvserver_request_loads_total", outcome="failed"))
        firing(tmp_path, {"KVServerRpcErrors", "KVServerFailedLoads"}, before, metrics(daemon))


def test_loads_slower_than_the_engine_gain_nothing(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(copy_delay_us=20_000)
    with Worker(daemon.endpoint) as worker:
        keys = store(worker, 1)
        worker.end_request("before", prefill_tokens_per_second=1e6)
        wait_until(lambda: daemon.metric("kvserver_engine_prefill_tokens_per_second"))
        before = metrics(daemon)
        worker.lookup(keys)
        worker.load(keys, worker.blocks_for(1), request_id="r")
        wait_until(lambda: daemon.metric("kvserver_prefill_seconds_lost_total"))
        firing(tmp_path, {"KVServerNegativeGain"}, before, metrics(daemon))


def test_a_second_engine_of_one_name_is_refused(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon()
    with Worker(daemon.endpoint) as worker:
        before = metrics(daemon)
        with pytest.raises(RequestFailed):
            Worker(daemon.endpoint, instance_id=worker.instance_id)
        firing(tmp_path, {"KVServerRegistrationsRefused"}, before, metrics(daemon))


def test_an_engine_without_a_goodbye_died(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon()
    with Worker(daemon.endpoint) as worker:
        before = metrics(daemon)
        worker.hang_up()
        wait_until(lambda: daemon.metric("kvserver_instances") == 0)
        firing(tmp_path, {"KVServerEngineDied"}, before, metrics(daemon))


def test_an_engine_that_shares_with_none_is_private(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon()
    with Worker(daemon.endpoint, connect_now=False) as worker:
        worker.attach()
        worker.register(private="its weights change in place")
        scrape = metrics(daemon)
        firing(tmp_path, {"KVServerInstancePrivate"}, scrape, scrape)


def test_an_sglang_that_was_reset_is_private(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """Its scheduler states the reason, in the description that it sends again after a reset."""
    daemon = make_daemon()
    with Worker(daemon.endpoint, connect_now=False) as worker:
        worker.attach()
        worker.register(engine="sglang", engine_version="0.5.23")
        before = metrics(daemon)
        firing(tmp_path, set(), before, before)
        worker.send(worker.description(private="epoch: private since prefix reset"))
        wait_until(lambda: daemon.metric("kvserver_instance_private", reason="epoch: private since prefix reset") == 1)
        scrape = metrics(daemon)
        firing(tmp_path, {"KVServerInstancePrivate"}, scrape, scrape)


def test_an_engine_whose_reports_are_lost_is_out_of_sync(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon()
    with Worker(daemon.endpoint) as worker:
        mark = MARK.pack(0, time.monotonic_ns())
        worker.report(ExactRecords(b"", b"", full=True))
        before = metrics(daemon)
        for sequence in (10, 20):
            worker.report(ExactRecords(ids([0, 0, 1]), mark), sequence=sequence)
        worker.lookup(make_keys(1))
        wait_until(lambda: daemon.metric("kvserver_l0_unsure") == 1)
        firing(tmp_path, {"KVServerReportGaps", "KVServerInstanceUnsure"}, before, metrics(daemon))


def test_an_l1_that_is_smaller_than_what_returns_evicts_it(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(l1_size="1MiB")
    with Worker(daemon.endpoint) as worker:
        keys = make_keys(120)

        def one_round() -> None:
            for number, key in enumerate(keys):
                worker.lookup([key], f"{number}")
                worker.end_request(f"{number}", prompt_tokens=64)
                worker.store([key], worker.blocks_for(1))

        one_round()
        before = metrics(daemon)
        one_round()
        small = {"KVServerL1Thrash", "KVServerL1TooSmall", "KVServerNeverLoaded"}
        firing(tmp_path, small, before, metrics(daemon), minutes=480)


def test_an_l1_that_is_leased_whole_has_no_space(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(l1_size="1MiB")
    with Worker(daemon.endpoint) as worker:
        while not daemon.metric("kvserver_l1_starved_chunks_total"):
            (key,) = store(worker, 1)
            worker.lookup([key], key.hex())
        before = metrics(daemon)
        store(worker, 1)
        firing(tmp_path, {"KVServerStoresStarved"}, before, metrics(daemon))


def test_hand_overs_by_an_engine_that_is_not_here_are_lost(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon()
    with Worker(daemon.endpoint) as worker:
        before = metrics(daemon)
        worker.lookup(make_keys(1), handed_over=HandOver("elsewhere", 64))
        firing(tmp_path, {"KVServerLostHandovers"}, before, metrics(daemon))


def test_a_collector_that_is_not_there_takes_no_exports(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(otlp_endpoint="http://127.0.0.1:1", env={"OTEL_METRIC_EXPORT_INTERVAL": "200"})
    before = metrics(daemon)
    failed = daemon.metric("kvserver_otlp_failed_total") or 0
    wait_until(lambda: (daemon.metric("kvserver_otlp_failed_total") or 0) > failed)
    firing(tmp_path, {"KVServerOtlpFailures"}, before, metrics(daemon))


def test_a_stream_whose_address_is_taken_is_not_bound(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        daemon = make_daemon(kv_events_endpoint=f"tcp://127.0.0.1:{other.getsockname()[1]}")
        with Worker(daemon.endpoint) as worker:
            worker.send(worker.description())
            wait_until(lambda: daemon.metric("kvserver_kv_events_bound") == 0)
            scrape = metrics(daemon)
            firing(tmp_path, {"KVServerEventsUnbound"}, scrape, scrape)


def test_an_engine_whose_events_are_lost_has_gaps(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon()
    with contextlib.closing(EnginePublisher(daemon.folder, replays=False)) as engine, Worker(daemon.endpoint) as worker:
        worker.send(worker.description(events_endpoint=engine.endpoint, events_topic=engine.topic))
        engine.wait_for_subscriber()
        for number in range(2):
            engine.publish(stored([bytes([number]) * 32]), sent=number == 0)
        before = metrics(daemon)
        engine.publish(stored([b"x" * 32]))
        wait_until(lambda: daemon.metric("kvserver_engine_events_gaps_total"))
        firing(tmp_path, {"KVServerEngineEventGaps"}, before, metrics(daemon))


def test_an_engine_whose_events_are_on_another_machine_is_not_read(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon()
    with Worker(daemon.endpoint) as worker:
        worker.send(worker.description(events_endpoint="tcp://192.0.2.1:5557"))
        wait_until(lambda: daemon.metric("kvserver_engine_events_following") == 0)
        scrape = metrics(daemon)
        firing(tmp_path, {"KVServerEngineEventsUnread"}, scrape, scrape)


def test_a_daemon_that_raises_on_a_message_has_an_internal_error(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(**at_fault("server.lookups.L1Lookups.answer"))
    with Worker(daemon.endpoint) as worker:
        before = metrics(daemon)
        worker.error_of(worker.lookup_message(make_keys(1)))
        firing(tmp_path, {"KVServerInternalError", "KVServerRpcErrors"}, before, metrics(daemon))


def test_a_daemon_whose_audit_fails_has_an_accounting_failure(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(**at_fault("server.upkeep.Upkeep.audit_if_idle"))
    before = metrics(daemon)
    failures = daemon.metric("kvserver_accounting_failures_total") or 0
    daemon.http("/audit", "POST")
    wait_until(lambda: (daemon.metric("kvserver_accounting_failures_total") or 0) > failures)
    firing(tmp_path, {"KVServerAccountingFailures"}, before, metrics(daemon))


def test_a_subscriber_that_raises_has_errors(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(**at_fault("telemetry.chunk_lifecycle.ChunkLifecycle.handle"))
    with Worker(daemon.endpoint) as worker:
        before = metrics(daemon)
        store(worker, 1)
        firing(tmp_path, {"KVServerSubscriberErrors"}, before, metrics(daemon))


def test_an_observer_that_raises_is_cut_off(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(**at_fault("routing.KVIndex.observe"))
    with Worker(daemon.endpoint) as worker:
        store(worker, 1)
        wait_until(lambda: daemon.metric("kvserver_kv_event_observer_up", observer="index") == 0)
        scrape = metrics(daemon)
        firing(tmp_path, {"KVServerObserverCutOff"}, scrape, scrape)


def test_events_that_are_not_handled_fill_their_queue_and_are_dropped(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(**at_fault("telemetry.chunk_lifecycle.ChunkLifecycle.handle", "hang"))
    with Worker(daemon.endpoint) as worker:
        before = daemon.http("/metrics")[1]
        keys = make_keys(1)
        while not daemon.metric("kvserver_events_dropped_total"):
            for number in [worker.send(worker.lookup_message(keys, "r")) for _ in range(2000)]:
                worker.reply_to(number)
        firing(tmp_path, {"KVServerEventsQueued", "KVServerEventsDropped"}, before, daemon.http("/metrics")[1])


def test_daemon_whose_serving_was_left_off_alerts(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon()
    before = metrics(daemon)
    assert daemon.http("/config/serving?value=off", "POST")[0] == 200
    firing(tmp_path, {"KVServerServingOff"}, before, metrics(daemon))


def test_pins_that_cost_others_hits_alert(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share=0.5)
    with Worker(daemon.endpoint) as worker:
        describe(worker)
        worker.store(KEYS, worker.blocks_for(len(KEYS)))
        pin(daemon)
        press(worker, daemon)
        before = metrics(daemon)
        keys = store(worker, 1)
        press(worker, daemon, daemon.status()["l1"]["chunks"] - len(KEYS) + 2)
        assert worker.lookup(keys) == 0
        firing(tmp_path, {"KVServerPinsCostHits", "KVServerNeverLoaded"}, before, metrics(daemon))
