"""What a daemon logs: lines that a program can read, one per change of state."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import struct
from typing import Any

from support.daemon import Daemon, wait_until
from support.raw import REQUEST_ID, RawPeer
from support.worker import make_keys

from kvserver import __version__
from kvserver.config.logs import JsonLines


def lines(daemon: Daemon) -> list[dict[str, Any]]:
    """Every line of stderr, parsed."""
    return [json.loads(line) for line in daemon.log.splitlines()]


def messages(daemon: Daemon, level: str = "info") -> list[str]:
    return [line["message"] for line in lines(daemon) if line["level"] == level]


def busy(daemon: Daemon, worker: Any, rounds: int) -> None:
    """Requests of every kind, and pages."""
    for number in range(rounds):
        worker.round_trip()
        worker.lookup(make_keys(3), f"r{number}")
        daemon.http("/metrics")
        daemon.http("/status")


def test_every_line_is_json_whatever_happens(make_daemon, make_worker):
    daemon = make_daemon(log_format="json", log_level="debug")
    worker = make_worker(daemon)
    busy(daemon, worker, 2)
    with RawPeer(daemon.endpoint) as peer:
        peer.error(REQUEST_ID, b"no message")
    with socket.create_connection(("127.0.0.1", daemon.http_port)) as rude:
        rude.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    daemon.http("/nowhere")
    worker.hang_up()
    wait_until(lambda: not daemon.status()["instances"])
    assert daemon.terminate() == 0
    for line in lines(daemon):
        assert {"time", "level", "logger", "message", "version"} <= line.keys()
        assert line["logger"].startswith("kvserver")
        assert line["time"].endswith("Z")
        assert line["version"] == __version__
    assert lines(daemon)[-1]["message"] == "stopped"


def test_the_start_is_a_record_with_what_the_line_on_stdout_has(make_daemon):
    daemon = make_daemon(log_format="json")
    record = lines(daemon)[0]
    assert (record["boot_id"], record["endpoint"]) == (daemon.boot_id, daemon.endpoint)
    assert record["http"].endswith(f":{daemon.http_port}")
    assert (record["l1_bytes"], record["chunk_tokens"]) == (64 << 20, 64)


def test_records_about_a_rank_name_instance_model_and_rank_as_metrics_do(make_daemon, make_worker):
    daemon = make_daemon(log_format="json")
    worker = make_worker(daemon)
    worker.hang_up()
    wait_until(lambda: not daemon.status()["instances"])
    about = [line for line in lines(daemon) if worker.instance_id in line["message"]]
    assert [line["instance_id"] for line in about] == [worker.instance_id] * 3
    assert [line["model_name"] for line in about] == [worker.model_name] * 3
    assert [line.get("rank") for line in about if "worker " in line["message"]][:1] == [0]


def test_a_record_about_a_tier_names_it(make_daemon, tmp_path):
    daemon = make_daemon(log_format="json", l2=f"file://{tmp_path}/l2?size=16MiB")
    shutil.rmtree(tmp_path / "l2")
    record = wait_until(lambda: [line for line in lines(daemon) if "is unavailable" in line["message"]])[0]
    assert (record["level"], record["tier"]) == ("error", daemon.tier()["name"])


def test_a_change_of_state_is_one_line_and_a_request_none(make_daemon, make_worker):
    daemon = make_daemon(log_format="json")
    worker = make_worker(daemon)
    busy(daemon, worker, 1)
    before = lines(daemon)
    busy(daemon, worker, 20)
    assert lines(daemon) == before
    worker.unregister()
    worker.hang_up()
    wait_until(lambda: not daemon.status()["books"]["attachments"])
    assert daemon.terminate() == 0
    logged = messages(daemon)
    assert sum(worker.instance_id in message and "registered" in message for message in logged) == 1, logged
    assert sum(worker.instance_id in message and "disconnected" in message for message in logged) == 1, logged
    assert len(logged) == len(set(logged)), "a line was logged twice"


def test_an_error_inside_is_one_line_with_its_traceback():
    """Nothing in a daemon fails on request, so this formats a record of our own."""
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        record = logging.LogRecord("kvserver.x", logging.ERROR, "f", 1, "in %s", ("a\nb",), (type(error), error, None))
    text = JsonLines().format(record)
    assert "\n" not in text
    found = json.loads(text)
    assert (found["level"], found["message"]) == ("error", "in a\nb")
    assert found["exception"].endswith("ValueError: first\nsecond")
