"""What an operator meets: start, stop, settings, logs, audits and a loop that hangs."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from support.commands import run
from support.daemon import Daemon, fetch, wait_until
from support.ports import reserved_port
from support.server import running_server
from support.worker import make_keys

from kvserver import __version__
from kvserver._native import CpuDevice, HostRegion, State
from kvserver.config import available_memory
from kvserver.config.capacity import choose_l1_bytes
from kvserver.config.settings import GiB, MiB
from kvserver.copy import Devices
from kvserver.protocol import ConfigError, Status, StatusReply
from kvserver.web import pages as http


def refused(daemon: Daemon) -> str:
    """The line with which a daemon refuses to start."""
    ended = run(*daemon.command()[1:], env=daemon.env)
    assert (ended.returncode, ended.stdout) == (2, "")
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("kvserver: ")
    return lines[0]


ENDS_SECONDS = 20.0  # it takes a tenth of one; a loaded machine may take more


def test_the_ready_line_states_where_and_how_large(make_daemon):
    daemon = make_daemon(l1_size="16MiB")
    words = [f"kvserver {__version__} ready", daemon.endpoint, "http://127.0.0.1:", "16777216 bytes", "64 tokens"]
    assert all(word in daemon.ready_line for word in words), daemon.ready_line
    assert daemon.boot_id == daemon.status()["boot_id"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_daemon_and_removes_its_sockets(make_daemon, number):
    daemon = make_daemon()
    assert all(path.exists() for path in daemon.sockets)
    os.kill(daemon.pid, number)
    assert daemon.process.wait(ENDS_SECONDS) == 0
    assert not any(path.exists() for path in daemon.sockets)


def test_sigterm_ends_copies_in_flight_long_before_they_are_done_and_exits_zero(make_daemon, make_worker):
    daemon = make_daemon(copy_delay_us=200_000)
    worker = make_worker(daemon)
    keys = make_keys(1)
    worker.store(keys, worker.blocks_for(1))
    copies = [
        worker.begin_load(keys, worker.blocks_for(1, first=40)),
        *(worker.begin_store(make_keys(15), worker.blocks_for(15)) for _ in range(10)),  # 60 s with two threads
    ]
    daemon.wait_for_accounting(tickets=len(copies))
    assert daemon.terminate(ENDS_SECONDS) == 0
    assert "copies did not end" not in daemon.log
    assert not worker.attachment.alive()
    states = [copy.state for copy in copies]
    assert State.FAILED in states
    assert State.PENDING not in states
    assert State.RUNNING not in states
    assert not any(path.exists() for path in daemon.sockets)


def test_sockets_of_a_killed_daemon_do_not_stop_the_next_one(make_daemon, make_worker):
    daemon = make_daemon()
    make_worker(daemon).round_trip()
    daemon.kill()
    assert all(path.exists() for path in daemon.sockets)
    daemon.start()
    make_worker(daemon).round_trip()


def test_a_second_daemon_on_an_endpoint_is_refused_and_does_not_hurt_the_first(make_daemon, make_worker):
    first = make_daemon()
    second = make_daemon(start=False, endpoint=first.endpoint)
    assert refused(second) == f"kvserver: another kvserver already serves {first.endpoint}; stop it or give --endpoint"
    make_worker(first).round_trip()
    assert all(path.exists() for path in first.sockets)


def test_a_taken_http_port_is_refused_and_leaves_no_sockets(make_daemon):
    first = make_daemon()
    second = make_daemon(start=False, http_port=first.http_port)
    line = refused(second)
    assert f"--http-port {first.http_port}" in line
    assert "Address already in use" in line
    assert not any(path.exists() for path in second.sockets)


def test_the_sockets_are_for_their_user_only(make_daemon):
    for path in make_daemon().sockets:
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_daemon_serves_over_loopback_tcp(make_daemon, make_worker, tmp_path):
    reservation, port = reserved_port()
    with reservation:
        runtime = {"XDG_RUNTIME_DIR": str(tmp_path)}
        make_worker(make_daemon(endpoint=f"tcp://127.0.0.1:{port}", env=runtime)).round_trip()


def test_settings_come_from_file_then_environment_then_flags(make_daemon, tmp_path):
    file = tmp_path / "kv.toml"
    file.write_text('l1-size = "32MiB"\nchunk-tokens = 128\nlease-seconds = 5\n')
    env = {"KVSERVER_L1_SIZE": "48MiB", "KVSERVER_CHUNK_TOKENS": "512"}
    daemon = make_daemon(start=False, env=env, config=file)
    del daemon.flags["chunk_tokens"]
    daemon.flags["l1_size"] = "16MiB"
    daemon.start()
    assert "L1 16777216 bytes, chunks of 512 tokens" in daemon.ready_line


def machine(root, available: int, cgroup: str = "", limits: dict[str, tuple[str, int]] | None = None):
    """A fake root folder: memory of the machine and of cgroups, as the kernel would show them."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(f"0::/{cgroup}\n")
    for name, (limit, used) in (limits or {}).items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    return root


def test_an_l1_that_the_machine_cannot_hold_is_refused_with_the_numbers(tmp_path):
    root = machine(tmp_path, 8 * GiB)
    assert choose_l1_bytes("7GiB", root) == 7 * GiB
    with pytest.raises(ConfigError, match=rf"--l1-size 8GiB is {8 * GiB} bytes, but only {8 * GiB} .*MemAvailable"):
        choose_l1_bytes("8GiB", root)


def test_an_l1_that_the_cgroup_cannot_hold_is_refused_with_the_numbers(tmp_path):
    root = machine(tmp_path, 64 * GiB, "pod/kv", {"pod/kv": (str(4 * GiB), GiB)})
    assert available_memory(root)[0] == 3 * GiB
    assert choose_l1_bytes("2GiB", root) == 2 * GiB
    with pytest.raises(ConfigError, match=rf"is {3 * GiB} bytes, but only {3 * GiB} are left by memory.max .*pod/kv"):
        choose_l1_bytes("3GiB", root)


def test_the_tightest_of_the_cgroups_above_counts(tmp_path):
    limits = {"pod/kv": ("max", GiB), "pod": (str(4 * GiB), 2 * GiB), "": (str(32 * GiB), 8 * GiB)}
    root = machine(tmp_path, 64 * GiB, "pod/kv", limits)
    assert available_memory(root) == (2 * GiB, f"memory.max of the cgroup {root}/sys/fs/cgroup/pod")


def test_auto_takes_a_quarter_of_what_is_free(tmp_path):
    assert choose_l1_bytes("auto", machine(tmp_path, 8 * GiB)) == 2 * GiB
    assert choose_l1_bytes("512MiB", tmp_path) == 512 * MiB


def test_log_lines_can_be_json(make_daemon, make_worker):
    daemon = make_daemon(log_format="json", log_level="info")
    make_worker(daemon).round_trip()
    assert daemon.terminate() == 0
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    assert any("registered" in line["message"] for line in lines)
    assert lines[-1]["message"] == "stopped"
    assert {"time", "level", "logger", "message"} <= lines[0].keys()


def test_a_daemon_that_was_idle_has_audited_its_accounting_and_serves_on(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    worker.round_trip()
    worker.lookup(make_keys(1))
    audits = daemon.accounting()["audits"]
    # A request ends the quiet.
    wait_until(lambda: time.sleep(1.3) or daemon.accounting()["audits"] > audits, 30, "an audit")
    assert daemon.http("/readyz") == (200, "ready\n")
    worker.round_trip()


def test_an_audit_on_request_states_whether_the_accounting_balances(monkeypatch, caplog):
    with running_server(Devices(CpuDevice(HostRegion(MiB), 4096, 1))) as (parts, _, pages, _):
        assert get(pages, "/audit", "POST") == (200, '{"audit": "balanced"}')
        monkeypatch.setattr(parts.cache.index, "chunk_count", 1)
        assert get(pages, "/audit", "POST") == (500, '{"audit": "unbalanced"}')
        monkeypatch.undo()
        assert get(pages, "/audit", "POST") == (200, '{"audit": "balanced"}')
        assert json.loads(get(pages, "/status")[1])["books"]["unbalanced"] == 1
    assert "the daemon's accounting does not balance" in caplog.text


def test_an_audit_on_request_counts_nothing_while_copies_are_in_flight(make_daemon, make_worker):
    daemon = make_daemon(pauses=True)
    worker = make_worker(daemon)
    with daemon.paused_copies():
        store = worker.begin_store(make_keys(1), worker.blocks_for(1))
        worker.ask(Status(), StatusReply)  # the store has begun
        assert daemon.http("/audit", "POST") == (503, '{"audit": "not counted"}')
    store.reply()
    daemon.audit()


def test_readyz_fails_with_the_reason_while_the_loop_hangs_and_livez_does_not(monkeypatch):
    """A loop that hangs needs a function that hangs in it, so this one runs in our own process."""
    monkeypatch.setattr(http, "STUCK_SECONDS", 1.2)  # an idle loop turns once a second
    monkeypatch.setattr(http, "LOOP_DEADLINE_SECONDS", 0.2)
    with running_server(Devices(CpuDevice(HostRegion(MiB), 4096, 1))) as running:
        pages = running.pages
        assert get(pages, "/readyz") == (200, "ready\n")
        assert get(pages, "/status")[0] == 200
        with running.loop_stopped():
            _, reason = wait_until(lambda: (found := get(pages, "/readyz"))[0] == 503 and found)
            assert "the event loop has not turned for" in reason
            assert get(pages, "/livez") == (200, "alive\n")
            stale = json.loads(get(pages, "/status")[1])
            assert stale["ready"] is False
            assert stale["stale_seconds"] > 1
            assert "\nkvserver_ready 0.0\n" in get(pages, "/metrics")[1]
            assert get(pages, "/cache/clear", "POST") == (503, "the event loop does not answer\n")
        wait_until(lambda: get(pages, "/readyz")[0] == 200)
        assert json.loads(get(pages, "/status")[1])["ready"] is True


def get(pages: http.StatusPages, path: str, method: str = "GET") -> tuple[int, str]:
    return fetch(f"http://127.0.0.1:{pages.port}{path}", method)
