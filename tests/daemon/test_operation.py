"""What an operator meets: start, stop, settings, status pages, metrics, the command line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.daemon import KVSERVER, Daemon, fetch, wait_until
from support.ports import reserved_port
from support.raw import RawPeer
from support.server import running_server
from support.worker import make_keys

from kvserver import __version__
from kvserver._native import CpuDevice, HostRegion, State
from kvserver.config import available_memory
from kvserver.config.capacity import choose_l1_bytes
from kvserver.config.settings import GiB, MiB
from kvserver.copy import Devices
from kvserver.protocol import PROTOCOL_VERSION, ConfigError, Status, StatusReply, encode
from kvserver.protocol.status import DaemonStatus
from kvserver.web import pages as http


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`kvserver ...` to its end."""
    return subprocess.run(
        [KVSERVER, *arguments], capture_output=True, text=True, timeout=20, env={**os.environ, **(env or {})}
    )


def refused(daemon: Daemon) -> str:
    """The line with which a daemon refuses to start."""
    ended = run(*daemon.command()[1:], env=daemon.env)
    assert (ended.returncode, ended.stdout) == (2, "")
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("kvserver: ")
    return lines[0]


# ---- start and stop ---------------------------------------------------------------------------

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


# ---- settings ---------------------------------------------------------------------------------


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


# ---- status -----------------------------------------------------------------------------------

STATUS_KEYS = {
    "version", "boot_id", "uptime_seconds", "ready", "protocol_version", "l1", "l2", "instances", "totals",
}  # fmt: skip
INSTANCE_KEYS = {
    "instance_id", "model_name", "namespace", "world_size", "l0_source", "workers", "block_tokens", "chunk_tokens",
    "requests",
}  # fmt: skip
TOTALS_KEYS = {"lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes", "failed_loads", "errors"}


def test_status_has_the_keys_of_the_public_surface(daemon, worker):
    worker.round_trip()
    status = daemon.status()
    assert status.keys() >= STATUS_KEYS
    assert status["l1"].keys() >= {"size_bytes", "used_bytes", "pinned_bytes", "chunks", "evictions", "policy"}
    assert status["totals"].keys() >= TOTALS_KEYS
    (instance,) = status["instances"]
    assert instance.keys() >= INSTANCE_KEYS
    assert instance["workers"][0].keys() >= {"rank", "device", "planes", "block_bytes", "last_seen_seconds"}
    assert instance["requests"].keys() >= {"lookups", "hits"}
    assert (status["version"], status["protocol_version"], status["ready"]) == (__version__, PROTOCOL_VERSION, True)


def test_status_counts_what_happened(make_daemon, make_worker):
    daemon = make_daemon(l1_size="16MiB")
    worker = make_worker(daemon, model_name="org/name")
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    worker.lookup(keys)
    worker.lookup(make_keys(2))
    worker.load(keys[:2], worker.blocks_for(2, first=20))
    worker.error_of(worker.load_message(make_keys(1), worker.blocks_for(1)))
    status = daemon.status()
    (instance,) = status["instances"]
    assert (instance["instance_id"], instance["model_name"]) == (worker.instance_id, "org/name")
    assert (instance["block_tokens"], instance["chunk_tokens"], instance["world_size"]) == (16, 64, 1)
    assert instance["namespace"] == worker.registered.namespace
    assert instance["workers"][0]["block_bytes"] == worker.geometry.block_bytes
    assert instance["workers"][0]["planes"] == 4
    counts = {"lookups": 2, "hits": 1, "stores": 1, "loads": 1, "stored_chunks": 3, "loaded_chunks": 2}
    assert instance["requests"].items() >= counts.items()
    assert (
        status["totals"].items()
        >= {
            "lookup_tokens": 5 * 64,
            "hit_tokens": 3 * 64,
            "stored_bytes": 3 * worker.chunk_bytes,
            "loaded_bytes": 2 * worker.chunk_bytes,
            "failed_loads": 1,
            "errors": 1,
        }.items()
    )
    assert status["l1"]["chunks"] == 3
    assert 0 <= status["l1"]["used_bytes"] - 3 * worker.chunk_bytes < 3 * status["l1"]["page_bytes"]
    assert (status["l1"]["size_bytes"], status["l1"]["pinned_bytes"]) == (16 * MiB, 0)
    worker.unregister()
    assert daemon.status()["totals"].items() >= {"stored_bytes": 3 * worker.chunk_bytes, "failed_loads": 1}.items()


def test_status_over_the_socket_is_the_same_as_over_http(daemon, worker):
    worker.round_trip()
    status = daemon.status()
    over_socket = msgspec.msgpack.decode(worker.ask(Status(), StatusReply).status, type=DaemonStatus)
    over_http = msgspec.convert(status, DaemonStatus)
    assert (over_socket.l1, over_socket.l2) == (over_http.l1, over_http.l2)
    assert over_socket.instances[0].requests == over_http.instances[0].requests


FAMILIES = {
    "kvserver_lookup_requests": "counter",
    "kvserver_lookup_tokens": "counter",
    "kvserver_lookup_hit_tokens": "counter",
    "kvserver_load_bytes": "counter",
    "kvserver_load_seconds": "counter",
    "kvserver_store_bytes": "counter",
    "kvserver_store_seconds": "counter",
    "kvserver_l1_used_bytes": "gauge",
    "kvserver_l1_size_bytes": "gauge",
    "kvserver_l1_chunks": "gauge",
    "kvserver_l1_evicted_chunks": "counter",
    "kvserver_rpc_seconds": "histogram",
    "kvserver_rpc_errors": "counter",
    "kvserver_ready": "gauge",
    "kvserver_loop_lag_seconds": "gauge",
    "kvserver_build_info": "gauge",
}


def families(daemon: Daemon) -> dict[str, object]:
    code, body = daemon.http("/metrics")
    assert code == 200
    return {family.name: family for family in text_string_to_metric_families(body)}


def test_every_metric_family_exists_from_the_start(make_daemon):
    found = families(make_daemon())
    assert {name: found[name].type for name in FAMILIES if name in found} == FAMILIES
    assert all(name.startswith(("kvserver_", "process_")) for name in found)


def samples(family, name: str) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in family.samples if sample.name == name}


def test_metrics_count_what_happened(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon, model_name='org/"odd" name')
    worker.round_trip()
    worker.error_of(worker.load_message(make_keys(1), worker.blocks_for(1)))
    found = families(daemon)
    who = (worker.instance_id, 'org/"odd" name')
    assert samples(found["kvserver_store_bytes"], "kvserver_store_bytes_total") == {who: worker.chunk_bytes}
    assert samples(found["kvserver_load_bytes"], "kvserver_load_bytes_total") == {who: worker.chunk_bytes}
    assert samples(found["kvserver_lookup_hit_tokens"], "kvserver_lookup_hit_tokens_total") == {who: 64}
    assert samples(found["kvserver_rpc_errors"], "kvserver_rpc_errors_total")["not_found", "Retrieve"] == 1
    rpcs = samples(found["kvserver_rpc_seconds"], "kvserver_rpc_seconds_count")
    assert rpcs == {("Hello",): 1, ("RegisterWorker",): 1, ("Store",): 1, ("Lookup",): 1, ("Retrieve",): 2}


def test_every_turn_of_the_loop_is_counted(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    before = daemon.metric("kvserver_loop_turn_seconds_count")
    for _ in range(20):
        worker.lookup(make_keys(1))
    wait_until(lambda: daemon.metric("kvserver_loop_turn_seconds_count") >= before + 20)
    assert 0 < daemon.metric("kvserver_loop_turn_seconds_sum") < daemon.status()["uptime_seconds"]


def test_the_pages_of_probes_and_people_answer(daemon):
    assert daemon.http("/livez") == (200, "alive\n")
    assert daemon.http("/readyz") == (200, "ready\n")
    assert "kvserver" in daemon.http("/")[1]
    assert daemon.http("/status?pretty")[0] == 200
    assert daemon.http("/nothing")[0] == 404
    assert daemon.http("/status", "POST")[0] == 404
    assert daemon.http("/cache/clear")[0] == 404


def test_the_pages_answer_fast_while_the_loop_is_busy(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys = make_keys(15)
    worker.store(keys, worker.blocks_for(15))
    lookup = worker.lookup_message(keys * 50)
    with RawPeer(daemon.endpoint, high_water_mark=0) as flood:
        for _ in range(3000):
            flood.send(bytes(8), encode(lookup))
        assert daemon.http("/status", timeout=2)[0] == 200
        assert daemon.http("/readyz", timeout=2)[0] == 200


def test_http_garbage_does_not_hurt(daemon, worker):
    for garbage in (
        b"\x00\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"G" * 100_000,
        b"POST /cache/clear HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with (
            socket.create_connection(("127.0.0.1", daemon.http_port), timeout=5) as connection,
            contextlib.suppress(OSError),
        ):
            connection.sendall(garbage)
            connection.recv(4096)
    assert daemon.http("/livez")[0] == 200
    worker.round_trip()


# ---- the command line -------------------------------------------------------------------------


def test_the_status_command_shows_at_one_look_what_the_cache_does(daemon, worker):
    worker.round_trip()
    shown = run("status", "--http-port", str(daemon.http_port))
    assert (shown.returncode, shown.stderr) == (0, "")
    words = [__version__, daemon.boot_id, "ready", "1 chunks", worker.instance_id, "test/model", "1/1"]
    assert [word for word in words if word not in shown.stdout] == []


def test_the_status_command_prints_json(daemon):
    shown = run("status", "--json", "--http-port", str(daemon.http_port))
    assert shown.returncode == 0
    assert json.loads(shown.stdout).keys() >= STATUS_KEYS


def test_the_status_command_without_a_daemon_states_so(make_daemon):
    daemon = make_daemon()
    daemon.kill()
    shown = run("status", "--http-port", str(daemon.http_port))
    assert shown.returncode == 1
    assert "no daemon answers at" in shown.stderr
    assert "--http-port" in shown.stderr


def test_log_lines_can_be_json(make_daemon, make_worker):
    daemon = make_daemon(log_format="json", log_level="info")
    make_worker(daemon).round_trip()
    assert daemon.terminate() == 0
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    assert any("registered" in line["message"] for line in lines)
    assert lines[-1]["message"] == "stopped"
    assert {"time", "level", "logger", "message"} <= lines[0].keys()


# ---- the loop itself ----------------------------------------------------------------------------


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
    daemon = make_daemon(copy_delay_us=100_000)
    worker = make_worker(daemon)
    store = worker.begin_store(make_keys(1), worker.blocks_for(1))
    daemon.wait_for_accounting(tickets=1)
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
