"""What a daemon shows: `/status`, `/metrics` and the probes have what happened, also under load, and so has `kvserver status`."""

from __future__ import annotations

import contextlib
import json
import socket

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from support.commands import run
from support.daemon import Daemon, wait_until
from support.raw import RawPeer
from support.worker import make_keys

from kvserver import __version__
from kvserver.config.settings import MiB
from kvserver.protocol import PROTOCOL_VERSION, Status, StatusReply, encode
from kvserver.protocol.status import DaemonStatus

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
    "kvserver_serving": "gauge",
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
