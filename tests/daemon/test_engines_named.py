"""Which engine an instance is, and what its adapter cannot report: in /status, metrics and commands."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from support.daemon import KVSERVER, Daemon, wait_until
from support.worker import Worker, make_keys

from kvserver.protocol import MOST_ENGINE, ExactRecords
from kvserver.protocol.client import RequestFailed

MakeDaemon, MakeWorker = Callable[..., Daemon], Callable[..., Worker]
SGLANG = {"engine": "sglang", "engine_version": "0.5.23"}


def instances(daemon: Daemon) -> dict[str, dict[str, Any]]:
    return {one["instance_id"]: one for one in daemon.status()["instances"]}


def shown(daemon: Daemon, *words: str) -> str:
    command = [KVSERVER, words[0], "--http-port", str(daemon.http_port), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def registered(daemon: Daemon, make_worker: MakeWorker, name: str, **fields: object) -> Worker:
    worker = make_worker(daemon, instance_id=name, connect_now=False)
    worker.attach()
    return worker.register(**fields)


def test_an_engine_is_named_with_its_version_in_status_metrics_and_commands(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = registered(daemon, make_worker, "one", **SGLANG, kv_role="kv_consumer")
    assert instances(daemon)["one"]["kv_role"] == "kv_consumer"
    worker.lookup(make_keys(2), "asked")
    assert {name: instances(daemon)["one"][name] for name in SGLANG} == SGLANG
    assert daemon.metric("kvserver_instance_info", instance_id="one", kv_role="kv_consumer", **SGLANG) == 1
    for words in (("status",), ("top", "--once"), ("explain", "asked")):
        wait_until(lambda words=words: "sglang 0.5.23" in shown(daemon, *words))


def test_an_adapter_that_states_no_engine_is_shown_without_one(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    registered(daemon, make_worker, "older")
    assert {name: instances(daemon)["older"][name] for name in SGLANG} == {"engine": "", "engine_version": ""}
    assert daemon.metric("kvserver_instance_info", instance_id="older", engine="", engine_version="") == 1
    row = next(line for line in shown(daemon, "status").splitlines() if line.startswith("older "))
    assert row.split()[1:4] == ["test/model", "-", "1/1"]


@pytest.mark.parametrize("text", ["x" * 512, "a\x1b[2Jb\nc\x00", "\u202e" * 300])
def test_name_of_an_engine_is_short_and_printable_whatever_it_states(
    make_daemon: MakeDaemon, make_worker: MakeWorker, text: str
) -> None:
    daemon = make_daemon()
    registered(daemon, make_worker, "odd", engine=text, engine_version=text)
    one = instances(daemon)["odd"]
    assert one["namespace"]
    for name in SGLANG:
        assert len(one[name]) <= MOST_ENGINE
        assert one[name].isprintable()


def test_engine_and_version_do_not_part_engines_that_agree_otherwise(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    """Names are for people: the fields that must agree are in `counted`."""
    daemon = make_daemon()
    registered(daemon, make_worker, "named", **SGLANG)
    registered(daemon, make_worker, "unnamed")
    assert len({one["namespace"] for one in instances(daemon).values()}) == 1


def test_an_engine_that_is_refused_is_named_too(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon, instance_id="refused", connect_now=False)
    worker.attach()
    with pytest.raises(Exception, match="bad_message"):
        worker.register(counted=(), **SGLANG)
    (one,) = daemon.status()["refused_engines"]
    assert {name: one[name] for name in SGLANG} == SGLANG


# ---- what an adapter cannot report ----------------------------------------------------------------

SILENT = {**SGLANG, "unreported": ("requests", "blocks", "stats", "sessions")}
OF_ENDS = [
    "prompt_tokens",
    "request_loads",
    "hit_ratio",
    "prefill_seconds_gained",
    "prefill_seconds_lost",
    "saved_seconds",
    "ended_requests",
]
LINE = "one: blocks of L0, prompt tokens by source, sessions of lookups, running and waiting requests: not reported by this engine"


def series(daemon: Daemon, name: str) -> list[str]:
    """The metrics that have a series of that instance."""
    return sorted({sample.name for sample in daemon.samples() if sample.labels.get("instance_id") == name})


def test_what_an_engine_does_not_report_is_null_and_never_zero(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon(metrics_sample_rate=1)
    registered(daemon, make_worker, "one", **SILENT).round_trip()
    other = registered(daemon, make_worker, "two", **SGLANG)
    one = instances(daemon)["one"]
    assert one["unreported"] == ["blocks", "requests", "sessions", "stats"]
    assert one["l0"] is None
    assert {name: one["requests"][name] for name in OF_ENDS} == dict.fromkeys(OF_ENDS)
    assert one["requests"]["loads"] == 1
    assert one["load"] is None
    wait_until(lambda: any(name.startswith("kvserver_l0_") for name in series(daemon, "two")), what="its L0 is counted")
    missing = set(series(daemon, "two")) - set(series(daemon, "one"))
    assert "kvserver_prompt_tokens_total" in missing
    assert "kvserver_prefill_seconds_gained_total" in missing
    assert "kvserver_saved_prefill_seconds_total" in missing
    assert any(name.startswith("kvserver_l0_") for name in missing)
    assert not any(name.startswith("kvserver_l0_") for name in series(daemon, "one"))
    assert "kvserver_lookup_hit_tokens_total" in series(daemon, "one")
    other.unregister()
    for words in (("status",), ("top", "--once")):
        shown_text = shown(daemon, *words)
        assert LINE in shown_text
        assert "two:" not in shown_text


def test_explain_states_that_an_engine_reports_no_ends(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    worker = registered(daemon, make_worker, "one", **SILENT)
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    worker.lookup(keys, "found")
    worker.lookup(make_keys(2), "missed")
    wait_until(lambda: "missed" in shown(daemon, "explain", "missed"))
    for request, outcome in (("found", "found"), ("missed", "miss")):
        text = shown(daemon, "explain", request)
        assert f"outcome    {outcome}\n" in text
        assert "tokens in the engine (l0) and computed: not reported by this engine" in text
        assert "has not reported its end" not in text


def test_an_engine_that_reports_after_all_is_believed(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    worker = registered(daemon, make_worker, "one", **SILENT)
    worker.report(ExactRecords(b"", b"", full=True))
    worker.end_request(prompt_tokens=100)
    worker.send(worker.stats_message(running=3))
    wait_until(lambda: instances(daemon)["one"]["unreported"] == ["sessions"])
    one = instances(daemon)["one"]
    assert one["requests"]["prompt_tokens"]["computed"] == 100
    assert one["l0"]["source"] == "exact"
    wait_until(lambda: any(name.startswith("kvserver_l0_") for name in series(daemon, "one")))


def test_words_that_a_daemon_does_not_know_are_left_out(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    registered(daemon, make_worker, "one", **SGLANG, unreported=("weather", "blocks"))
    assert instances(daemon)["one"]["unreported"] == ["blocks"]


def test_failed_loads_of_an_engine_without_ends_are_no_negative_gain(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = registered(daemon, make_worker, "one", **SILENT)
    with pytest.raises(RequestFailed):
        worker.load(make_keys(1), worker.blocks_for(1))
    assert daemon.metric("kvserver_failed_loads_total", instance_id="one") == 1
    assert daemon.metric("kvserver_prefill_seconds_lost_total", instance_id="one") is None
