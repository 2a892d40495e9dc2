"""What is Valkey's own: its URLs, expiry, passwords, limits and what happens to the ids of generations."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.l1_memory import NAMESPACE, PAGE, key, keys, name, within
from support.shared_tiers import MakeDaemon, TierDaemon
from support.tls import Authority, TlsProxy
from support.valkey import ValkeyStore, join

from kvserver._native import HostRegion
from kvserver.config import parse_tiers
from kvserver.l2 import COVERAGE_BYTES, ObjectMemory, TierOutcome, make_tier
from kvserver.l2.remote.generations import IDS_SECONDS
from kvserver.l2.remote.valkey import ValkeyUrl
from kvserver.protocol import ConfigError

RANKS = (PAGE + 1, 2 * PAGE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyStore]:
    server = ValkeyStore(tmp_path_factory.mktemp("valkey"), maxmemory="32mb", maxmemory_policy="noeviction")
    yield server
    server.close()


def place(url: str) -> ValkeyUrl:
    (parsed,) = parse_tiers([url])
    return ValkeyUrl(parsed)


def stored(daemon: TierDaemon, number: int) -> list[bytes]:
    memory = daemon.l1.object(*RANKS)
    assert daemon.put(name(number), memory) is TierOutcome.DONE
    return daemon.l1.read(memory)


# ---- URLs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "database", "prefix"),
    [("", 0, "kvserver"), ("/", 0, "kvserver"), ("/3", 3, "kvserver"), ("/a/b", 0, "a/b"), ("/3/a", 3, "a")],
)
def test_a_path_is_a_database_a_prefix_or_both(path: str, database: int, prefix: str) -> None:
    found = place(f"valkey://host{path}")
    assert (found.host, found.port, found.database, found.prefix, found.tls) == ("host", 6379, database, prefix, False)


@pytest.mark.parametrize("scheme", ["valkeys", "rediss"])
def test_url_schemes_of_tls_turn_tls_on(scheme: str) -> None:
    found = place(f"{scheme}://user:pass@host:7000/0")
    assert (found.tls, found.port, found.username, found.password) == (True, 7000, "user", "pass")


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("12h", 43200), ("7d", 604800)])
def test_an_expiry_is_a_time(text: str, seconds: int) -> None:
    assert place(f"valkey://host?expiry={text}").expiry_seconds == seconds


@pytest.mark.parametrize("text", ["0", "x", "-1d", "1w", "99999d"])
def test_a_bad_expiry_is_refused_without_the_password(text: str) -> None:
    with pytest.raises(ConfigError, match=f"expiry={text}") as refusal:
        place(f"valkey://me:secret@host?expiry={text}")
    assert "secret" not in str(refusal.value)


def test_a_missing_client_is_refused_with_the_command_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "glide_sync", None)
    (url,) = parse_tiers(["valkey://me:secret@host"])
    with pytest.raises(ConfigError, match="pip install valkey-glide-sync") as refusal:
        make_tier(url, HostRegion(PAGE), PAGE)
    assert "secret" not in str(refusal.value)


# ---- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> list[Authority]:
    folder = tmp_path_factory.mktemp("tls")
    return [Authority(folder, name) for name in ("ours", "theirs")]


@pytest.fixture
def behind_tls(server: ValkeyStore, authorities: list[Authority]) -> Iterator[TlsProxy]:
    proxy = TlsProxy(server.port, authorities[0])
    yield proxy
    proxy.close()


def test_a_server_with_a_certificate_of_the_named_authority_is_used(
    behind_tls: TlsProxy, authorities: list[Authority], prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(f"valkeys://127.0.0.1:{behind_tls.port}/{prefix}?ca={authorities[0].path}")
    expected = stored(daemon, 1)
    memory = daemon.l1.object(*RANKS)
    assert daemon.get(name(1), memory) is TierOutcome.DONE
    assert daemon.l1.read(memory) == expected


@pytest.mark.parametrize("named", ["another authority", "those of the system"])
def test_a_certificate_of_another_authority_makes_the_tier_unavailable_and_is_named(
    behind_tls: TlsProxy, authorities: list[Authority], prefix: str, make_daemon_of: MakeDaemon, named: str
) -> None:
    ca = f"?ca={authorities[1].path}" if named == "another authority" else ""
    daemon = make_daemon_of(f"valkeys://127.0.0.1:{behind_tls.port}/{prefix}{ca}", opens=False)
    daemon.ends.until("unavailable")
    assert "certificate" in daemon.tier.failure
    assert daemon.put(name(1), daemon.l1.object(*RANKS)) is TierOutcome.UNAVAILABLE


def test_a_server_without_tls_makes_a_tier_with_it_unavailable(
    server: ValkeyStore, authorities: list[Authority], prefix: str, make_daemon_of: MakeDaemon
) -> None:
    url = f"valkeys://127.0.0.1:{server.port}/{prefix}?timeout=1s&ca={authorities[0].path}"
    daemon = make_daemon_of(url, opens=False)
    daemon.ends.until("unavailable")


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), ("no PEM", "no certificate")])
def test_a_file_without_authorities_is_refused(tmp_path: Path, content: str | None, why: str) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    with pytest.raises(ConfigError, match=why):
        place(f"valkeys://host?ca={tmp_path}/ca.pem")


@pytest.fixture
def for_known_clients(server: ValkeyStore, authorities: list[Authority]) -> Iterator[TlsProxy]:
    proxy = TlsProxy(server.port, *authorities)
    yield proxy
    proxy.close()


def test_a_client_certificate_is_shown_to_a_server_that_requires_one(
    for_known_clients: TlsProxy, authorities: list[Authority], prefix: str, make_daemon_of: MakeDaemon
) -> None:
    certificate, file = authorities[1].certificate("client")
    parameters = f"?ca={authorities[0].path}&cert={certificate}&key={file}"
    daemon = make_daemon_of(f"valkeys://127.0.0.1:{for_known_clients.port}/{prefix}{parameters}")
    expected = stored(daemon, 1)
    memory = daemon.l1.object(*RANKS)
    assert daemon.get(name(1), memory) is TierOutcome.DONE
    assert daemon.l1.read(memory) == expected


def test_a_missing_client_certificate_makes_the_tier_unavailable_and_is_named(
    for_known_clients: TlsProxy, authorities: list[Authority], prefix: str, make_daemon_of: MakeDaemon
) -> None:
    url = f"valkeys://127.0.0.1:{for_known_clients.port}/{prefix}?timeout=1s&ca={authorities[0].path}"
    daemon = make_daemon_of(url, opens=False)
    daemon.ends.until("unavailable")
    assert daemon.tier.failure == "TLS with the server fails: TLSV13_ALERT_CERTIFICATE_REQUIRED"


def test_halves_of_a_client_certificate_are_refused(tmp_path: Path, authorities: list[Authority]) -> None:
    certificate, file = authorities[1].certificate("client")
    for parameters in (f"cert={certificate}", f"key={file}"):
        with pytest.raises(ConfigError, match="cert and key belong together"):
            place(f"valkeys://host?{parameters}")
    with pytest.raises(ConfigError, match="has no private key in PEM"):
        place(f"valkeys://host?cert={certificate}&key={certificate}")
    with pytest.raises(ConfigError, match="has no certificate in PEM"):
        place(f"valkeys://host?cert={file}&key={file}")


# ---- clusters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ValkeyStore]]:
    nodes = [ValkeyStore(tmp_path_factory.mktemp("node"), cluster_enabled="yes") for _ in range(3)]
    try:
        join(nodes)
        yield nodes
    finally:
        for node in nodes:
            node.close()


def test_a_node_of_a_cluster_is_refused_with_what_to_write(
    cluster: list[ValkeyStore], prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(cluster[0].url_of(prefix), opens=False)
    daemon.ends.until("unavailable")
    assert "cluster=true" in daemon.tier.failure


def test_the_nodes_of_a_cluster_share_the_objects(
    cluster: list[ValkeyStore], prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon, neighbour = (make_daemon_of(node.url_of(prefix, "cluster=true", "expiry=1h")) for node in cluster[:2])
    written = [daemon.l1.object(PAGE + number) for number in range(40)]
    puts = [daemon.tier.put(name(number), memory, b"", within(20)) for number, memory in enumerate(written)]
    assert {end.outcome for end in daemon.ends.all(puts)} == {TierOutcome.DONE}
    assert all(any(where.startswith(prefix) for where in node.objects()) for node in cluster)
    assert neighbour.probe(list(range(41))) == (1 << 40) - 1
    read = [neighbour.l1.object(PAGE + number) for number in range(40)]
    gets = [neighbour.tier.get(name(number), memory, within(20)) for number, memory in enumerate(read)]
    assert {end.outcome for end in neighbour.ends.all(gets)} == {TierOutcome.DONE}
    assert [neighbour.l1.read(memory) for memory in read] == [daemon.l1.read(memory) for memory in written]
    daemon.tier.touch(NAMESPACE, 0, keys(*range(40)))
    daemon.tier.tick(time.monotonic_ns())
    daemon.tier.drop(NAMESPACE, 0, keys(*range(40)))
    while daemon.probe([0]):  # it was ahead of the drop, and is believed for a minute
        daemon.tier.drop(NAMESPACE, 0, keys(*range(40)))
    stored(daemon, 50)
    assert daemon.clear() is TierOutcome.DONE
    assert daemon.get(name(50), daemon.l1.object(*RANKS)) is TierOutcome.MISSING
    assert daemon.tier.state == "ready"


@pytest.mark.parametrize("url", ["valkey://host/3?cluster=true", "valkey://host?cluster=yes"])
def test_a_cluster_with_a_database_and_other_words_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="cluster"):
        place(url)


# ---- expiry ---------------------------------------------------------------------------------------


def test_objects_expire_and_ids_of_generations_do_not(
    server: ValkeyStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(server.url_of(prefix, "expiry=1h"))
    stored(daemon, 1)
    with server.client() as client:
        lifetimes = {entry.decode(): client.ttl(entry) for entry in client.scan_iter(f"{prefix}/*")}
    lifetimes.pop(f"{prefix}/1/generations/ping", None)  # no id: a value that shows whether the store takes writes
    assert {ttl for where, ttl in lifetimes.items() if "/generations/" in where} == {-1}
    (ttl,) = [ttl for where, ttl in lifetimes.items() if "/generations/" not in where]
    assert 3500 < ttl <= 3600


def test_objects_that_are_used_stay_for_longer(server: ValkeyStore, prefix: str, make_daemon_of: MakeDaemon) -> None:
    daemon = make_daemon_of(server.url_of(prefix, "expiry=1h"))
    stored(daemon, 1)
    (where,) = [each for each in server.objects() if each.startswith(prefix)]
    with server.client() as client:
        client.expire(where, 100)
        daemon.tier.touch(NAMESPACE, 0, keys(1, 2))
        daemon.tier.tick(time.monotonic_ns())
        deadline = time.monotonic() + 10
        while client.ttl(where) <= 100:
            assert time.monotonic() < deadline
            time.sleep(0.02)


# ---- bundles --------------------------------------------------------------------------------------


def commands(server: ValkeyStore) -> dict[str, int]:
    """How often the server ran each command."""
    with server.client() as client:
        stats = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): found["calls"] for name, found in stats.items()}


def test_small_objects_share_round_trips(server: ValkeyStore, prefix: str, make_daemon_of: MakeDaemon) -> None:
    daemon = make_daemon_of(server.url_of(prefix))
    daemon.probe(list(range(40)), chain=False)  # so that no put asks
    written = [daemon.l1.object(PAGE + number) for number in range(40)]
    puts = [daemon.tier.put(name(number), memory, b"", within(20)) for number, memory in enumerate(written)]
    assert {end.outcome for end in daemon.ends.all(puts)} == {TierOutcome.DONE}
    before = commands(server)
    read = [daemon.l1.object(PAGE + number) for number in range(40)]
    gets = [daemon.tier.get(name(number), memory, within(20)) for number, memory in enumerate(read)]
    assert {end.outcome for end in daemon.ends.all(gets)} == {TierOutcome.DONE}
    assert [daemon.l1.read(memory) for memory in read] == [daemon.l1.read(memory) for memory in written]
    after = commands(server)
    trips = sum(after.get(which, 0) - before.get(which, 0) for which in ("get", "mget"))
    assert trips < 20, "40 objects"
    assert after["mget"] > before.get("mget", 0)


def test_a_full_server_refuses_each_object_of_a_command(
    tmp_path_factory: pytest.TempPathFactory, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    small = ValkeyStore(tmp_path_factory.mktemp("valkey"), maxmemory="12mb", maxmemory_policy="noeviction")
    try:
        daemon = make_daemon_of(small.url_of(prefix), pages=8192)
        written = [daemon.l1.object(250_000) for _ in range(64)]
        puts = [daemon.tier.put(name(number), memory, b"", within(20)) for number, memory in enumerate(written)]
        outcomes = [end.outcome for end in daemon.ends.all(puts)]
        assert set(outcomes) == {TierOutcome.DONE, TierOutcome.FULL}
        assert daemon.tier.state == "ready"
        for number, outcome in enumerate(outcomes):
            memory = daemon.l1.object(250_000) if number < 16 else written[number]
            if number < 16 and outcome is TierOutcome.DONE:
                assert daemon.get(name(number), memory) is TierOutcome.DONE
                assert daemon.l1.read(memory) == daemon.l1.read(written[number])
    finally:
        small.close()


# ---- what the server refuses, forgets and requires --------------------------------------------------


def test_full_server_ends_puts_as_full_and_the_tier_stays_ready(
    server: ValkeyStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(server.url_of(prefix), pages=4096)
    written = daemon.l1.object(4 << 20)
    outcomes = [daemon.put(name(number), written) for number in range(11)]
    assert outcomes.count(TierOutcome.DONE) >= 2
    assert outcomes[-3:] == [TierOutcome.FULL] * 3
    assert daemon.tier.state == "ready"
    assert daemon.tier.status().full == outcomes.count(TierOutcome.FULL)
    memory = daemon.l1.object(4 << 20)
    assert daemon.get(name(0), memory) is TierOutcome.DONE
    assert daemon.l1.read(memory) == daemon.l1.read(written)
    with server.client() as client:
        client.flushall()


def test_an_object_above_the_servers_limit_is_full(
    server: ValkeyStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    size = 512 << 20
    region = HostRegion(size)
    (url,) = parse_tiers([server.url_of(prefix)])
    tier = make_tier(url, region, PAGE)
    try:
        deadline = time.monotonic() + 10
        while tier.state != "ready":
            assert time.monotonic() < deadline
            tier.drain()
        slot = (0).to_bytes(4, sys.byteorder) + (size // PAGE).to_bytes(4, sys.byteorder)
        ticket = tier.put(name(1), ObjectMemory(b"c" * COVERAGE_BYTES, (slot,), (size,)), b"", within(10))
        ends = list[object]()
        while not ends:
            assert time.monotonic() < deadline
            ends += [(end.ticket, end.outcome) for end in tier.drain()]
        assert ends == [(ticket, TierOutcome.FULL)]
    finally:
        tier.close(within(5))


def test_after_flushall_all_is_missing_and_new_objects_are_served(
    server: ValkeyStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon, neighbour = (make_daemon_of(server.url_of(prefix)) for _ in range(2))
    stored(daemon, 1)
    with server.client() as client:
        client.flushall()
    memory = neighbour.l1.object(*RANKS)
    assert neighbour.get(name(1), memory) is TierOutcome.MISSING
    time.sleep(IDS_SECONDS)  # until all have the new ids
    expected = stored(daemon, 2)
    assert neighbour.get(name(2), memory) is TierOutcome.DONE
    assert neighbour.l1.read(memory) == expected


def test_what_was_cleared_stays_so_when_the_server_loses_the_ids(
    server: ValkeyStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(server.url_of(prefix))
    stored(daemon, 1)
    assert daemon.clear() is TierOutcome.DONE
    with server.client() as client:
        (where,) = client.scan_iter(f"{prefix}/*/generations/{NAMESPACE.hex()}")
        client.delete(where)
    other = make_daemon_of(server.url_of(prefix))
    assert other.get(name(1), other.l1.object(*RANKS)) is TierOutcome.MISSING
    assert other.probe([1]) == 0


def test_a_wrong_password_makes_the_tier_unavailable_and_is_not_shown(
    tmp_path_factory: pytest.TempPathFactory, make_daemon_of: MakeDaemon, capfd: pytest.CaptureFixture[str]
) -> None:
    guarded = ValkeyStore(tmp_path_factory.mktemp("valkey"), requirepass="right-secret")
    try:
        daemon = make_daemon_of(f"valkey://:wrong-secret@127.0.0.1:{guarded.port}", opens=False)
        daemon.ends.until("unavailable")
        shown = [daemon.tier.failure, repr(daemon.tier.status()), daemon.tier.url, *capfd.readouterr()]
        assert daemon.tier.failure
        assert "secret" not in " ".join(shown)
        right = make_daemon_of(f"valkey://:right-secret@127.0.0.1:{guarded.port}")
        stored(right, 1)
        assert right.tier.holds(NAMESPACE, 0, key(1)) == 1
    finally:
        guarded.close()
