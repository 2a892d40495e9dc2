"""In a JSON log lines were bare that the daemon's logger did not write: of libraries, of a refused start, of the module at the daemon's end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.daemon import KVSERVER, Daemon, wait_until
from support.valkey import ValkeyStore

# A process with the daemon's logging, in which a library in C writes to stderr.
LIBRARY = """
import ctypes, os, sys
from kvserver.config import Settings, library_lines_logged, set_up_logging
set_up_logging(Settings(log_format="json"))
with library_lines_logged():
    os.write(2, b"first\\n\\nsec\\xffond\\n")
    print("of Python", file=sys.stderr)
    os.write(2, b"without an end")
    {end}
"""


def records(log: str) -> list[dict[str, Any]]:
    """Every line, parsed."""
    return [json.loads(line) for line in log.splitlines()]


def run(end: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIBRARY.replace("{end}", end), *words]
    environ = os.environ | environ
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, env=environ, cwd="/")


def test_a_line_that_a_library_writes_to_stderr_is_a_record() -> None:
    ended = run("pass")
    assert ended.returncode == 0
    logged = [(line["logger"], line["level"], line["message"]) for line in records(ended.stderr)]
    assert logged == [
        ("kvserver.stderr", "warning", text) for text in ("first", "sec\ufffdond", "of Python", "without an end")
    ]


@pytest.mark.parametrize("fault", ["os.abort()", "ctypes.string_at(8)"])
def test_the_last_line_before_a_fatal_signal_is_written(fault: str) -> None:
    ended = run(fault, PYTHONFAULTHANDLER="1")
    assert ended.returncode == (-signal.SIGABRT if "abort" in fault else -signal.SIGSEGV)
    assert "without an end" in ended.stderr
    assert "Fatal Python error" in ended.stderr


# A failed read of the client of L2, within the same.
FAILED_READ = """
    from kvserver.config import parse_tiers
    from kvserver.l2.remote.buffer import LaneBuffer
    from kvserver.l2.remote.make import store_of
    client = store_of(*parse_tiers([sys.argv[1]]))[1](LaneBuffer())
    try:
        client.get(["a list"], [memoryview(bytearray(16))])
    except Exception:
        pass
    client.close()
"""


def test_an_error_that_valkey_glide_prints_is_a_record(tmp_path: Path) -> None:
    server = ValkeyStore(tmp_path)
    try:
        with server.client() as other:
            other.execute_command("LPUSH", "a list", "a")
        logged = [line["message"] for line in records(run(FAILED_READ, server.url_of("prefix")).stderr)]
    finally:
        server.close()
    assert [text for text in logged if "WRONGTYPE" in text], logged


def test_a_stop_during_a_request_of_a_page_leaves_only_records(make_daemon: Any) -> None:
    daemon: Daemon = make_daemon(log_format="json")
    with socket.create_connection(("127.0.0.1", daemon.http_port)) as half_sent:
        half_sent.sendall(b"GET /status HTTP/1.1\r\n")
        wait_until(lambda: daemon.status()["http"]["connections"] == 2)
        assert daemon.terminate() == 0
    assert [line["message"] for line in records(daemon.log)][1:] == ["SIGTERM: draining", "stopped"]
    assert daemon.log.endswith("\n")


@pytest.mark.parametrize("given", ["flag", "environment", "file"])
def test_a_refused_start_is_a_record_of_the_chosen_form(given: str, tmp_path: Path) -> None:
    (tmp_path / "kv.toml").write_text('log-format = "json"\n')
    words = {"flag": ["--log-format", "json"], "environment": [], "file": ["--config", str(tmp_path / "kv.toml")]}[
        given
    ]
    environ = {"KVSERVER_LOG_FORMAT": "json"} if given == "environment" else {}
    for bad in (["--http-port", "many"], ["--l1-size", "900TiB"]):
        ended = commands.run("serve", *words, *bad, "--endpoint", f"ipc://{tmp_path}/s", env=environ)
        assert (ended.returncode, ended.stdout) == (2, "")
        (record,) = records(ended.stderr)
        assert record["level"] == "critical"
        assert bad[0] in record["message"]


@pytest.mark.parametrize("fault", ["os.kill(os.getpid(), 7)", "__import__('faulthandler')._stack_overflow()"])
def test_the_stacks_of_other_fatal_signals_are_written(fault: str) -> None:
    assert "Fatal Python error" in run(fault, PYTHONFAULTHANDLER="1").stderr


def test_a_daemon_without_a_descriptor_2_starts(tmp_path: Path) -> None:
    command = f"exec {KVSERVER} serve --endpoint ipc://{tmp_path}/s --http-port 0 --l1-size 16MiB 2>&-"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert " ready: " in process.stdout.readline()
        process.terminate()
        assert process.wait(20) == 0


def test_kv_events_may_go_to_stderr(make_daemon: Any) -> None:
    assert make_daemon(kv_events_file="/dev/stderr").http("/livez")[0] == 200


@pytest.mark.parametrize("words", [["--log-format", "json", "--l1-size"], ["--log-format=json", "--http-port"]])
def test_a_flag_without_its_value_is_a_record(words: list[str]) -> None:
    ended = commands.run("serve", *words)
    (record,) = records(ended.stderr)
    assert (ended.returncode, words[-1] in record["message"]) == (2, True)
