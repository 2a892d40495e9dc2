"""What is Mooncake's own: its URLs, the processes of its client, deaths of owners of memory, and eviction."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.l1_memory import NAMESPACE, PAGE, keys, name, within
from support.mooncake import MooncakeStore
from support.shared_tiers import MakeDaemon, TierDaemon

from kvserver._native import HostRegion
from kvserver.config import parse_tiers
from kvserver.l2 import ObjectMemory, TierOutcome, make_tier
from kvserver.l2.remote import mooncake
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.generations import IDS_SECONDS
from kvserver.l2.remote.make import LANES, store_of
from kvserver.l2.remote.mooncake import MooncakeUrl
from kvserver.l2.remote.store import StoreClient
from kvserver.protocol import ConfigError

RANKS = (PAGE + 1, 2 * PAGE)
UNMOUNT_SECONDS = 40.0  # the master drops an owner that is silent for 10 s


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeStore]:
    server = MooncakeStore(tmp_path_factory.mktemp("mooncake"), memory="64MB", lease_ms=1000)
    yield server
    server.close()


def stored(daemon: TierDaemon, number: int) -> list[bytes]:
    memory = daemon.l1.object(*RANKS)
    assert daemon.put(name(number), memory) is TierOutcome.DONE
    return daemon.l1.read(memory)


def served(daemon: TierDaemon, number: int, memory: ObjectMemory) -> TierOutcome:
    """What a get comes to; on a busy machine a read may take longer than its lease."""
    deadline = time.monotonic() + 60
    while (outcome := daemon.get(name(number), memory)) is TierOutcome.UNAVAILABLE:
        assert time.monotonic() < deadline
        daemon.ends.until("ready")
    return outcome


def clients(parent: int) -> list[int]:
    """The processes of Mooncake's client that a process has."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, command = (folder / "stat").read_text(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        state, owner = stat.rpartition(")")[2].split()[:2]
        if int(owner) == parent and b"mooncake_child" in command and state != "Z":
            found.append(int(folder.name))
    return found


# ---- URLs, and the client's library ----------------------------------------------------------------


def test_a_url_names_a_master_a_prefix_and_how_bytes_travel() -> None:
    plain, full = (
        MooncakeUrl(*parse_tiers([url]))
        for url in (
            "mooncake://master",
            "mooncake://master:7000/a/b?protocol=rdma&devices=mlx5_0&metadata=etcd://e:2379&timeout=3s",
        )
    )
    assert plain.prefix == "kvserver"
    assert plain.settings == {
        "host": "master", "port": 50051, "protocol": "tcp", "devices": "", "metadata": "P2PHANDSHAKE",
    }  # fmt: skip
    assert (full.prefix, full.timeout_seconds) == ("a/b", 3.0)
    assert full.settings == {
        "host": "master", "port": 7000, "protocol": "rdma", "devices": "mlx5_0", "metadata": "etcd://e:2379",
    }  # fmt: skip


def test_users_are_refused_without_the_password() -> None:
    (url,) = parse_tiers(["mooncake://me:secret@host"])
    with pytest.raises(ConfigError, match="no users") as refusal:
        make_tier(url, HostRegion(PAGE), PAGE)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        ("", "pip install mooncake-transfer-engine-non-cuda"),
        ("raise ImportError('libibverbs.so.1: cannot open shared object file')", "libibverbs.so.1.*apt-get install"),
    ],
    ids=["the package", "a library of the system"],
)
def test_missing_client_or_library_is_refused_with_the_command_to_type(
    library: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library:
        (tmp_path / "mooncake").mkdir()
        (tmp_path / "mooncake" / "__init__.py").touch()
        (tmp_path / "mooncake" / "store.py").write_text(library)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(each for each in sys.path if "site-packages" not in each)])
    (url,) = parse_tiers(["mooncake://host"])
    with pytest.raises(ConfigError, match=expected):
        make_tier(url, HostRegion(PAGE), PAGE)


# ---- the processes of the client -------------------------------------------------------------------


def test_a_process_that_was_killed_is_replaced(server: MooncakeStore, prefix: str, make_daemon_of: MakeDaemon) -> None:
    daemon = make_daemon_of(server.url_of(prefix))
    expected = stored(daemon, 1)
    memory = daemon.l1.object(*RANKS)
    deadline = time.monotonic() + 30
    while len(clients(os.getpid())) < LANES["mooncake"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    before = clients(os.getpid())
    for process in before:
        os.kill(process, signal.SIGKILL)
    while (outcome := daemon.get(name(1), memory)) is not TierOutcome.DONE:
        assert outcome is TierOutcome.UNAVAILABLE
        assert time.monotonic() < deadline
    assert daemon.l1.read(memory) == expected
    assert not set(clients(os.getpid())) & set(before)


def test_a_process_that_hangs_ends_with_its_request(
    server: MooncakeStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(server.url_of(prefix, "timeout=1s"))
    expected = stored(daemon, 1)
    memory = daemon.l1.object(*RANKS)
    before = daemon.l1.read(memory)
    deadline = time.monotonic() + 60
    while len(clients(os.getpid())) < LANES["mooncake"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stopped = clients(os.getpid())
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    assert daemon.get(name(1), memory, 1.0) is TierOutcome.TIMEOUT
    assert daemon.l1.read(memory) == before
    while (outcome := daemon.get(name(1), memory)) is not TierOutcome.DONE:
        assert outcome in (TierOutcome.TIMEOUT, TierOutcome.UNAVAILABLE)
        assert time.monotonic() < deadline
    assert daemon.l1.read(memory) == expected
    for process in stopped:  # one whose lane had nothing to do meanwhile
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def test_a_buffer_that_grew_is_the_one_that_is_written_to(
    server: MooncakeStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(server.url_of(prefix), pages=8192)
    for number in range(1, 6):  # its descriptor may have the number of the one before
        written, read = (daemon.l1.object((number << 20) + number) for _ in range(2))
        assert daemon.put(name(number), written) is TierOutcome.DONE
        for _ in range(3):  # each lane
            assert daemon.get(name(number), read) is TierOutcome.DONE
        assert daemon.l1.read(read) == daemon.l1.read(written)


def test_objects_of_two_mebibytes_share_a_command(
    server: MooncakeStore, prefix: str, make_daemon_of: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait while every lane is with a command."""
    commands: list[int] = []  # objects of each
    go, connect = threading.Event(), mooncake.connect

    def connect_late(url: MooncakeUrl, buffer: LaneBuffer) -> StoreClient:
        client = connect(url, buffer)
        get = client.get

        def get_late(names: Sequence[str], buffers: Sequence[memoryview]) -> list[memoryview | None]:
            commands.append(len(names))
            assert go.wait(20)
            return get(names, buffers)

        monkeypatch.setattr(client, "get", get_late)
        return client

    monkeypatch.setattr(mooncake, "connect", connect_late)
    daemon = make_daemon_of(server.url_of(prefix, "timeout=20s"), pages=8192)
    written, read = ([daemon.l1.object(2 << 20) for _ in range(6)] for _ in range(2))
    for number, memory in enumerate(written):
        assert daemon.put(name(number), memory) is TierOutcome.DONE
    tickets = [daemon.tier.get(name(number), memory, within(20)) for number, memory in enumerate(read)]
    go.set()
    assert {daemon.ends.of(ticket).outcome for ticket in tickets} == {TierOutcome.DONE}
    assert len(commands) <= LANES["mooncake"] + 1
    assert sum(commands) == 6
    assert list(map(daemon.l1.read, read)) == list(map(daemon.l1.read, written))


def test_no_process_of_a_client_outlives_the_daemon(server: MooncakeStore, prefix: str) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from support.shared_tiers import TierDaemon\n"
        "daemon = TierDaemon(sys.argv[2]); daemon.until_open(); print('open', flush=True); sys.stdin.read()"
    )
    tests = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", code, tests, server.url_of(prefix)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"open\n"
        children = clients(parent.pid)
        assert children
        parent.kill()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}/cmdline").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_clients_that_create_one_id_at_once_all_have_the_same(server: MooncakeStore, prefix: str) -> None:
    """One finds the other's half-written: it waits."""
    _, connect = store_of(*parse_tiers([server.url_of(prefix)]))
    clients = [connect(LaneBuffer()) for _ in range(3)]
    try:
        with ThreadPoolExecutor(3) as threads:
            for number in range(100):
                where = f"{prefix}/generations/{number}"
                values = [bytes([at]) * 16 for at in range(3)]
                found = list(
                    threads.map(
                        lambda pair, at=where: pair[0].create_id(at, pair[1]), zip(clients, values, strict=True)
                    )
                )
                assert len({*found}) == 1
                assert found[0] in values
                assert clients[0].read_ids([where]) == found[:1]
    finally:
        for client in clients:
            client.close()


# ---- what the store loses --------------------------------------------------------------------------


def test_what_was_cleared_stays_so_when_the_store_loses_the_ids(
    server: MooncakeStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(server.url_of(prefix))
    stored(daemon, 1)
    assert daemon.clear() is TierOutcome.DONE
    for where in server.names():
        if where.startswith(prefix) and "/generations/" in where:
            server.remove(where)
    other = make_daemon_of(server.url_of(prefix))
    assert other.get(name(1), other.l1.object(*RANKS)) is TierOutcome.MISSING
    assert other.probe([1]) == 0
    time.sleep(IDS_SECONDS)  # until both have the new ids
    expected = stored(daemon, 2)
    memory = other.l1.object(*RANKS)
    assert other.get(name(2), memory) is TierOutcome.DONE
    assert other.l1.read(memory) == expected


def test_eviction_takes_objects_of_chains_and_never_ids(
    server: MooncakeStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(server.url_of(prefix), pages=8192)
    first = daemon.l1.object(*RANKS)
    assert daemon.put(name(0), first) is TierOutcome.DONE
    ids = [where for where in server.names() if where.startswith(prefix) and "/generations/" in where]
    memory = daemon.l1.object(4 << 20)
    number = 1
    while True:  # 64 MiB, and what was used in the last second is not evicted
        assert number < 200
        if daemon.put(name(number), memory) is TierOutcome.DONE:
            number += 1
        present = server.objects()
        if number > 30 and len([where for where in present if where.startswith(prefix)]) < number - 5:
            break
        time.sleep(0.05)
    read = daemon.l1.object(4 << 20)
    outcomes = {served(daemon, each, read) for each in range(1, number)}
    assert outcomes == {TierOutcome.DONE, TierOutcome.MISSING}
    assert {*ids} <= {*server.names()}, "ids are pinned"
    assert daemon.tier.state == "ready"
    found = daemon.probe(list(range(number)), chain=False)
    chain = make_daemon_of(server.url_of(prefix)).probe(list(range(number)))
    assert found.bit_length() > chain.bit_length(), "a chain ends at its gap"
    assert chain & found == chain


def test_a_store_without_memory_is_read_only_until_there_is_some(
    tmp_path_factory: pytest.TempPathFactory, make_daemon_of: MakeDaemon
) -> None:
    empty = MooncakeStore(tmp_path_factory.mktemp("mooncake"), owners=0)
    try:
        daemon = make_daemon_of(empty.url_of("p"), opens=False)
        daemon.ends.until("read_only")
        assert "mooncake_client" in daemon.tier.failure
        empty.add_owner()
        daemon.ends.until("ready", 60)
        stored(daemon, 1)
    finally:
        empty.close()


def test_a_master_that_started_anew_has_nothing_and_is_used_again(
    server: MooncakeStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(server.url_of(prefix, "timeout=1s"))
    stored(daemon, 1)
    memory = daemon.l1.object(*RANKS)
    server.kill_master()
    while daemon.tier.state == "ready":
        assert daemon.get(name(1), memory, 2.0) in (TierOutcome.UNAVAILABLE, TierOutcome.TIMEOUT)
    server.start_master()
    daemon.ends.until("ready", 60)  # the owner of memory finds the new one by itself
    deadline = time.monotonic() + 60
    written = daemon.l1.object(*RANKS)
    while not (daemon.put(name(2), written) is daemon.get(name(2), memory) is TierOutcome.DONE):
        assert time.monotonic() < deadline
        daemon.ends.until("ready", 60)
    assert daemon.l1.read(memory) == daemon.l1.read(written)
    assert daemon.get(name(1), memory) is TierOutcome.MISSING


def test_killed_owner_takes_only_its_own_objects_along(
    tmp_path_factory: pytest.TempPathFactory, make_daemon_of: MakeDaemon
) -> None:
    pair = MooncakeStore(tmp_path_factory.mktemp("mooncake"), owners=2, memory="64MB")
    try:
        daemon = make_daemon_of(pair.url_of("p", "timeout=1s"))
        written = {number: stored(daemon, number) for number in range(24)}
        pair.owners[0].kill()
        began = time.monotonic()
        memory = daemon.l1.object(*RANKS)
        outcomes: dict[int, TierOutcome] = {}
        for number in written:
            while (outcome := daemon.get(name(number), memory, 2.0)) not in (TierOutcome.DONE, TierOutcome.MISSING):
                assert outcome in (TierOutcome.UNAVAILABLE, TierOutcome.TIMEOUT)
                assert time.monotonic() - began < UNMOUNT_SECONDS
                daemon.ends.until("ready")
            outcomes[number] = outcome
            if outcome is TierOutcome.DONE:
                assert daemon.l1.read(memory) == written[number]
        assert set(outcomes.values()) == {TierOutcome.DONE, TierOutcome.MISSING}
        assert daemon.tier.holds(NAMESPACE, 0, keys(*written)) == sum(
            (outcomes[number] is TierOutcome.DONE) << number for number in written
        )
    finally:
        pair.close()
