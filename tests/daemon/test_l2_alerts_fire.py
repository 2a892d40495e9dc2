"""Each alert about L2 fires for a real daemon whose real storage fails: its expression over what the daemon's /metrics had, by promtool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until
from support.memory import awkward
from support.promtool import firing
from support.slow_proxy import SlowProxy
from support.valkey import ValkeyStore
from support.worker import Worker, make_keys

from kvserver.protocol import AwaitFill


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyStore]:
    store = ValkeyStore(tmp_path_factory.mktemp("valkey"))
    yield store
    store.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon(l1_size="16MiB")
    yield daemon
    daemon.close()


def started(daemon: Daemon, url: str) -> Daemon:
    daemon.flags["l2"] = url
    daemon.start()
    wait_until(lambda: daemon.metric("kvserver_l2_up") == 1)
    return daemon


def metrics(daemon: Daemon) -> str:
    return daemon.http("/metrics")[1]


def store(worker: Worker, chunks: int = 4) -> list[bytes]:
    keys = make_keys(chunks)
    worker.store(keys, worker.blocks_for(chunks))
    return keys


def stored_before(daemon: Daemon, chunks: int = 4) -> list[bytes]:
    """Keys of what only the tier has: the daemon is another process since."""
    with Worker(daemon.endpoint) as worker:
        keys = store(worker, chunks)
        wait_until(lambda: daemon.metric("kvserver_l2_written_objects_total") == chunks)
    daemon.terminate()
    started(daemon, str(daemon.flags["l2"]))
    return keys


def read(worker: Worker, keys: list[bytes], request: str = "r") -> None:
    worker.reply_to(worker.send(AwaitFill(worker.lookup_message(keys, request), 1000)), 20)


def test_a_killed_valkey_is_down_and_what_is_stored_is_dropped(
    daemon: Daemon, valkey: ValkeyStore, tmp_path: Path
) -> None:
    started(daemon, valkey.url_of("killed", "required=true", "timeout=200ms"))
    with Worker(daemon.endpoint) as worker:
        before = metrics(daemon)
        valkey.kill()
        try:
            wait_until(lambda: store(worker) and daemon.metric("kvserver_l2_up") == 0)
            store(worker)
            firing(tmp_path, {"KVServerNotReady", "KVServerL2Down", "KVServerL2Dropping"}, before, metrics(daemon))
        finally:
            valkey.start()


def test_a_valkey_that_became_a_replica_can_only_be_read(daemon: Daemon, valkey: ValkeyStore, tmp_path: Path) -> None:
    started(daemon, valkey.url_of("replica"))
    with Worker(daemon.endpoint) as worker, valkey.client() as client:
        before = metrics(daemon)
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            wait_until(lambda: store(worker) and daemon.metric("kvserver_l2_writable") == 0)
            firing(tmp_path, {"KVServerL2ReadOnly", "KVServerL2Dropping"}, before, metrics(daemon))
        finally:
            client.execute_command("REPLICAOF", "NO", "ONE")


def test_a_tier_that_is_configured_read_only_fires_nothing(daemon: Daemon, tmp_path: Path) -> None:
    url = f"file://{daemon.folder}/l2?size=64MiB"
    started(daemon, url)
    stored_before(daemon)
    daemon.terminate()
    started(daemon, url + "&read_only=true")
    with Worker(daemon.endpoint) as worker:
        before = metrics(daemon)
        store(worker)
        firing(tmp_path, set(), before, metrics(daemon))


@pytest.mark.long
def test_a_file_tier_on_which_nothing_fits_is_full(daemon: Daemon, tmp_path: Path) -> None:
    started(daemon, f"file://{daemon.folder}/l2?size=1MiB")
    with Worker(daemon.endpoint, geometry=awkward(scale=200)) as worker:
        before = metrics(daemon)
        store(worker, 1)
        wait_until(lambda: daemon.metric("kvserver_l2_dropped_objects_total", reason="full"))
        firing(tmp_path, {"KVServerL2Full"}, before, metrics(daemon))


@pytest.mark.long
def test_a_damaged_file_is_corrupt(daemon: Daemon, tmp_path: Path) -> None:
    started(daemon, f"file://{daemon.folder}/l2?size=64MiB")
    keys = stored_before(daemon)
    with open(daemon.folder / "l2/data", "r+b") as data:
        data.seek(4096)
        data.write(bytes(1 << 20))
    with Worker(daemon.endpoint) as worker:
        before = metrics(daemon)
        read(worker, keys)
        assert daemon.metric("kvserver_l2_reads_total", outcome="corrupt")
        firing(tmp_path, {"KVServerL2Corrupt"}, before, metrics(daemon))


@pytest.mark.long
def test_a_valkey_that_does_not_answer_in_time_fails_reads(daemon: Daemon, valkey: ValkeyStore, tmp_path: Path) -> None:
    daemon.flags["l1_size"] = "1MiB"
    proxy = SlowProxy(valkey.port)
    try:
        started(daemon, f"valkey://127.0.0.1:{proxy.port}/late")
        with Worker(daemon.endpoint) as worker:
            keys = store(worker)
            wait_until(lambda: daemon.metric("kvserver_l2_written_objects_total") == len(keys))
            for _ in range(20):
                store(worker)  # more than L1 has room for
            wait_until(lambda: daemon.metric("kvserver_l2_queue_bytes") == 0)
            before = metrics(daemon)
            proxy.hold()
            read(worker, keys)
            assert daemon.metric("kvserver_l2_reads_total", outcome="timeout") == len(keys)
            made_room = {"KVServerNeverLoaded"}  # for the fill
            firing(tmp_path, {"KVServerL2FailedReads"} | made_room, before, metrics(daemon))
    finally:
        proxy.close()


@pytest.mark.long
def test_a_valkey_that_is_slower_than_computing_is_slow(daemon: Daemon, valkey: ValkeyStore, tmp_path: Path) -> None:
    proxy = SlowProxy(valkey.port)
    try:
        started(daemon, f"valkey://127.0.0.1:{proxy.port}/slow")
        keys = stored_before(daemon, 8)
        with Worker(daemon.endpoint) as worker:
            proxy.delay_seconds = 0.05
            read(worker, keys[:4])
            worker.end_request("r", prefill_tokens_per_second=1e9)
            wait_until(lambda: daemon.metric("kvserver_engine_prefill_tokens_per_second"))
            before = metrics(daemon)
            read(worker, keys[4:], "slow")
            assert daemon.metric("kvserver_fills_not_begun_total") == 1
            firing(tmp_path, {"KVServerL2Slow"}, before, metrics(daemon))
    finally:
        proxy.close()
