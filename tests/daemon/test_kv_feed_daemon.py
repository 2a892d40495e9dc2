"""What a real daemon reports to engines and observers; that all of them end with what L1 holds is test_kv_stream.py's."""

from __future__ import annotations

import json
import subprocess

import pytest
from support.daemon import KVSERVER, Daemon, wait_until
from support.kv_chunks import Prompt
from support.kv_follower import Follower
from support.observers import install
from support.server import L1_BYTES, PAGE_BYTES, running_server
from support.worker import Worker

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices
from kvserver.events import L1Resynced
from kvserver.protocol import KVEventsTaken, TakeKVEvents


def prompt(first: int, chunks: int, hash_bytes: int = 32) -> Prompt:
    return Prompt(range(first, first + 64 * chunks), chunk_blocks=4, block=16, hash_bytes=hash_bytes)


def store(worker: Worker, prompt: Prompt, **changes: object) -> None:
    worker.store(prompt.keys, worker.blocks_for(len(prompt.keys)), contents=prompt.contents(), **changes)


def follow(worker: Worker, **described: object) -> Follower:
    """The worker's engine, described, and what it receives."""
    worker.send(worker.description(**described))
    return Follower(lambda message: worker.ask(message, KVEventsTaken), worker.instance_id, worker.incarnation)


def wait_for(follower: Follower, hashes: list[bytes]) -> None:
    def received() -> bool:
        follower.step()
        return follower.whole and set(follower.blocks) == set(hashes)

    wait_until(received, what=f"{len(hashes)} blocks are received")
    assert follower.before == set(), "what an earlier follow reported was reported again or withdrawn"


def kv_events(daemon: Daemon) -> dict:
    return daemon.status()["kv_events"]


def test_new_weights_leave_what_was_stored_before_out_of_reach(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    follower = follow(worker, variant="w1")
    old, tuned, new = prompt(0, 2), prompt(1000, 2), prompt(2000, 2)
    store(worker, old, variant="w1")
    store(worker, tuned, variant="w1/tuned")
    wait_for(follower, old.hashes + tuned.hashes)
    worker.send(worker.description(variant="w2"))
    wait_for(follower, [])
    store(worker, new, variant="w2")
    wait_for(follower, new.hashes)
    assert len(follower.follows) == 2


def test_what_is_stored_without_contents_or_with_wrong_ones_is_counted(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    follower = follow(worker)
    silent, wrong, right = prompt(0, 2), prompt(1000, 3), prompt(2000, 1, hash_bytes=16)
    worker.store(silent.keys, worker.blocks_for(2))
    worker.store(wrong.keys, worker.blocks_for(3), contents=wrong.contents(hashes=bytes(32 * 12)))
    store(worker, right)
    wait_for(follower, right.hashes)
    wait_until(lambda: kv_events(daemon)["unannounced"] == {"undescribed": 2, "memory": 0, "mismatched": 3})
    assert kv_events(daemon)["described_chunks"] == 1
    metrics = daemon.http("/metrics")[1]
    assert 'kvserver_kv_events_unannounced_chunks_total{reason="mismatched"} 3.0' in metrics
    assert "kvserver_kv_events_described_chunks 1.0" in metrics
    store(worker, silent)  # which skips the chunks, but describes what is in them
    wait_for(follower, right.hashes + silent.hashes)


def test_the_reply_to_an_engine_that_was_not_described_states_so(daemon, worker):
    ask = TakeKVEvents(instance_id=worker.instance_id, incarnation=worker.incarnation)
    error = worker.error_of(ask)
    assert error.code == "not_ready"
    assert "send DescribeScheduler first" in error.message
    stranger = TakeKVEvents(instance_id="who", incarnation="one")
    assert worker.error_of(stranger).code == "unknown_instance"


# ---- observers --------------------------------------------------------------------------------


def test_installed_observers_receive_events_and_one_that_raises_is_reported(make_daemon, make_worker, tmp_path):
    install(tmp_path, "keeps", "raises", "breaks")
    kept = tmp_path / "kept"
    daemon = make_daemon(env={"PYTHONPATH": str(tmp_path), "KEEPS_FILE": str(kept)})
    worker = make_worker(daemon)
    assert worker.hello.kv_events, "an observer wants to know what is in the chunks"
    store(worker, prompt(0, 2))
    wait_until(lambda: kept.exists() and "KVStored" in kept.read_text())

    def states() -> dict[str, str]:
        return {row["name"]: row["state"] for row in kv_events(daemon)["observers"]}

    wait_until(lambda: states()["raises"] == "cut off")
    assert states() | {"keeps": "running", "feed": "running", "raises": "cut off", "breaks": "failed"} == states()
    assert 'kvserver_kv_event_observer_up{observer="raises"} 0.0' in daemon.http("/metrics")[1]
    wait_for(follow(worker), prompt(0, 2).hashes)
    worker.round_trip()
    assert daemon.terminate() == 0


def test_without_observers_engines_need_not_describe_what_is_in_chunks(make_daemon, make_worker):
    assert not make_worker(make_daemon()).hello.kv_events
    assert make_worker(make_daemon(kv_events="on")).hello.kv_events


def test_the_file_of_lines_has_all_that_a_daemon_did(make_daemon, make_worker, tmp_path):
    path = tmp_path / "events"
    daemon = make_daemon(kv_events_file=path)
    worker = make_worker(daemon)
    assert worker.hello.kv_events
    worker.send(worker.description())
    store(worker, prompt(0, 2))
    daemon.http("/cache/clear", "POST")
    assert daemon.terminate() == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["reader_came", "stored", "removed", "reader_gone"]
    assert sorted(map(str, lines[1]["chunks"])) == sorted(map(str, lines[2]["chunks"]))
    assert [chunk["tokens"] for chunk in lines[1]["chunks"]] == [64, 64]
    assert lines[1]["instance_id"] == worker.instance_id


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--kv-event-observers", "missing"], "no observer 'missing' is installed"),
        (["--kv-events-file", "/nowhere/events"], "--kv-events-file /nowhere/events: "),
    ],
)
def test_a_daemon_whose_settings_cannot_be_met_does_not_start(tmp_path, words, reason):
    ended = subprocess.run(
        [KVSERVER, "serve", "--endpoint", f"ipc://{tmp_path}/kv.sock", "--l1-size", "1MiB", "--http-port", "0", *words],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_servers_loop_resyncs_when_its_bus_had_to_drop_chunks():
    region = HostRegion(L1_BYTES)
    with running_server(Devices(CpuDevice(region, PAGE_BYTES, 2))) as running:
        parts = running.parts
        with Worker(running.endpoint) as worker:
            store(worker, prompt(0, 2))
            follower = follow(worker)
            wait_for(follower, prompt(0, 2).hashes)

            def lose() -> None:
                parts.cache.clear_namespaces()  # and no event reports it
                parts.bus.needs_resync.add(L1Resynced)

            running.pages.ask(lose)
            wait_for(follower, [])
            assert parts.observability.hub.status().recounts == 1
