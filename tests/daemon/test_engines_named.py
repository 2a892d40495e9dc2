"""Which engine an instance is, and what its adapter cannot report: in /status, metrics and commands."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from support.daemon import KVSERVER, Daemon, wait_until
from support.worker import Worker, make_keys

from kvserver.protocol import MOST_ENGINE

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
    worker = registered(daemon, make_worker, "one", **SGLANG)
    worker.lookup(make_keys(2), "asked")
    assert {name: instances(daemon)["one"][name] for name in SGLANG} == SGLANG
    assert daemon.metric("kvserver_instance_info", instance_id="one", **SGLANG) == 1
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
    """What must agree is in `counted`: these names are for people."""
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
