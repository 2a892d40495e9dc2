"""`kvserver doctor` as an operator runs it, with and without a daemon."""

from __future__ import annotations

import socket
import sys

from support.doctor import doctor, flags, rows

from kvserver import __version__
from kvserver.protocol import PROTOCOL_VERSION


def test_a_running_daemon_is_found_with_its_version_and_protocol(make_daemon):
    daemon = make_daemon()
    _, found = rows(*flags(daemon))
    assert found["daemon"]["level"] == "ok"
    assert f"kvserver {__version__} answers at {daemon.endpoint}" in found["daemon"]["text"]
    assert f"protocol {PROTOCOL_VERSION}" in found["daemon"]["text"]
    assert found["HTTP port"]["text"].endswith(f"served by a running kvserver, boot {daemon.boot_id}")
    assert found["endpoint"]["level"] == found["native module"]["level"] == "ok"


def test_a_daemon_that_was_killed_is_reported(make_daemon):
    daemon = make_daemon()
    daemon.kill()
    _, found = rows(*flags(daemon))
    assert found["daemon"]["level"] == "warning"
    assert "kvserver serve" in found["daemon"]["fix"]


def test_the_exit_code_is_one_only_if_there_is_a_problem(make_daemon):
    daemon = make_daemon()
    small = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    well = doctor(*flags(daemon), env=small)
    assert (well.returncode, well.stderr) == (0, ""), well.stdout
    assert ": 0 problems, " in well.stdout.splitlines()[-1]
    with socket.create_server(("127.0.0.1", 0)) as other:
        ill = doctor(*flags(daemon)[:2], "--http-port", str(other.getsockname()[1]), env=small)
    assert ill.returncode == 1
    assert [line.split()[0] for line in ill.stdout.splitlines()].count("problem") == 1
    assert "--http-port 0" in ill.stdout


def test_every_line_has_its_level_and_what_is_not_ok_states_what_fixes_it(make_daemon):
    daemon = make_daemon()
    shown = doctor(*flags(daemon)).stdout.splitlines()[:-1]
    assert len(shown) == 22
    for line in shown:
        level = line.split()[0]
        assert level in ("ok", "warning", "problem"), line
        assert (" -> " in line) == (level != "ok"), line


def test_a_setting_that_cannot_be_is_one_problem_among_the_others():
    code, found = rows("--chunk-tokens", "many")
    assert (code, found["settings"]["level"]) == (1, "problem")
    assert "--chunk-tokens 'many'" in found["settings"]["text"]
    assert len(found) == 22


def test_settings_state_where_they_came_from():
    _, found = rows("--http-port", "0", env={"KVSERVER_COPY_THREADS": "3"})
    assert found["settings"]["text"] == (
        "--copy-threads from environment KVSERVER_COPY_THREADS, --http-port from flag --http-port"
    )


def test_an_environment_without_vllm_is_reported():
    code, found = rows("--python", sys.executable)
    assert (code, found["vLLM"]["level"]) == (1, "problem")
    assert "no vLLM" in found["vLLM"]["text"]
