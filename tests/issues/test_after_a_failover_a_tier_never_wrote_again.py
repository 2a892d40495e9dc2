"""After a failover a tier of Valkey was ready, read, and failed every put, for ever. A value above the server's bound likewise.

Reads and writes are judged apart: three failed puts make new connections and the state `read_only`, until a write succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.faulty_store import FaultyStore
from support.l1_memory import PAGE, Ends, L1Memory, name, within
from support.shared_tiers import TierDaemon
from support.slow_proxy import SlowProxy
from support.valkey import ValkeyStore

from kvserver.config import parse_tiers
from kvserver.l2 import TierOutcome
from kvserver.l2.remote.breaker import FAILURES_TO_OPEN
from kvserver.l2.remote.tier import RemoteTier
from kvserver.protocol import Durability
from kvserver.tiering import ConfiguredTier, Tiers

SIZE = 20_000


@pytest.fixture
def make_valkey(tmp_path: Path) -> Iterator[Callable[[str], ValkeyStore]]:
    made: list[ValkeyStore] = []

    def make(folder: str) -> ValkeyStore:
        (tmp_path / folder).mkdir()
        made.append(ValkeyStore(tmp_path / folder))
        return made[-1]

    yield make
    for store in made:
        store.close()


def fail_to_put(daemon: TierDaemon, first: int) -> None:
    for number in range(FAILURES_TO_OPEN):
        assert daemon.put(name(first + number), daemon.l1.object(SIZE)) is TierOutcome.UNAVAILABLE


def tick_until(daemon: TierDaemon, state: str) -> None:
    deadline = time.monotonic() + 20
    while daemon.tier.state != state:
        assert time.monotonic() < deadline, (daemon.tier.state, daemon.tier.failure)
        daemon.tier.tick(time.monotonic_ns())
        daemon.ends.drain()
        time.sleep(0.02)


def test_new_connections_reach_the_new_primary(make_valkey: Callable[[str], ValkeyStore]) -> None:
    old, new = make_valkey("old"), make_valkey("new")
    proxy = SlowProxy(old.port)
    daemon = TierDaemon(f"valkey://127.0.0.1:{proxy.port}/p")
    try:
        daemon.until_open()
        assert daemon.put(name(0), daemon.l1.object(SIZE)) is TierOutcome.DONE
        with new.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", old.port)
            deadline = time.monotonic() + 20
            while client.info("replication")["master_link_status"] != "up" or client.dbsize() < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            client.execute_command("REPLICAOF", "NO", "ONE")
        with old.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", new.port)
        proxy._server_port = new.port  # the name leads there from now on
        fail_to_put(daemon, 10)
        assert daemon.tier.state == "read_only"
        assert "read only replica" in daemon.tier.failure
        tick_until(daemon, "ready")
        assert daemon.put(name(1), daemon.l1.object(SIZE)) is TierOutcome.DONE
        assert any(where.endswith(name(1).key.hex()) for where in new.objects())
        assert daemon.get(name(0), daemon.l1.object(SIZE)) is TierOutcome.DONE
    finally:
        daemon.tier.close(within(5))
        proxy.close()


def test_a_replica_is_read_and_its_state_is_read_only(make_valkey: Callable[[str], ValkeyStore]) -> None:
    server = make_valkey("a")
    daemon = TierDaemon(server.url_of("p"))
    try:
        daemon.until_open()
        assert daemon.put(name(0), daemon.l1.object(SIZE)) is TierOutcome.DONE
        with server.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")  # a primary that does not answer: it keeps its data
        fail_to_put(daemon, 10)
        deadline = time.monotonic() + 4  # so that it connects anew, more than once
        while time.monotonic() < deadline:
            daemon.tier.tick(time.monotonic_ns())
            assert daemon.tier.state == "read_only", daemon.tier.failure
            assert daemon.get(name(0), daemon.l1.object(SIZE)) is TierOutcome.DONE
            time.sleep(0.1)
        with server.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        tick_until(daemon, "ready")
    finally:
        daemon.tier.close(within(5))


def test_a_size_that_the_server_refuses_is_learned(make_valkey: Callable[[str], ValkeyStore]) -> None:
    server = make_valkey("a")
    daemon = TierDaemon(server.url_of("p"), pages=4096)
    try:
        daemon.until_open()
        with server.client() as client:
            client.config_set("proto-max-bulk-len", 1 << 20)
        large = daemon.l1.object(2 << 20, whole=True)
        outcomes = {daemon.put(name(number), large) for number in range(FAILURES_TO_OPEN)}
        assert TierOutcome.DONE not in outcomes
        tick_until(daemon, "ready")
        for number in range(20, 30):  # a lane learns it as it connects again
            end = daemon.ends.of(daemon.tier.put(name(number), large, b"", within(10)))
            if end.outcome is TierOutcome.FULL:
                break
            tick_until(daemon, "ready")
        assert (end.outcome, end.what) == (TierOutcome.FULL, "the store takes values of 1048576 bytes at most")
        assert daemon.put(name(31), daemon.l1.object(SIZE)) is TierOutcome.DONE
    finally:
        daemon.tier.close(within(5))


class Rig:
    """A tier over a faulty store."""

    def __init__(self, parameters: str = "", store: FaultyStore | None = None) -> None:
        self.store, self.l1 = store or FaultyStore(), L1Memory()
        (self.url,) = parse_tiers([f"valkey://host/p{parameters}"])
        self.tier = RemoteTier(self.url, "p", self.l1.region, PAGE, self.store.connect, 2)
        self.ends = Ends(self.tier)

    def put(self, number: int) -> TierOutcome:
        return self.ends.of(self.tier.put(name(number), self.l1.object(PAGE), b"", within(10))).outcome

    def get(self, number: int) -> TierOutcome:
        return self.ends.of(self.tier.get(name(number), self.l1.object(PAGE), within(10))).outcome

    def close(self) -> None:
        self.store.heal()
        self.tier.close(within(5))


def test_reads_that_fail_close_no_writes_and_writes_that_fail_no_reads() -> None:
    rig = Rig()
    try:
        rig.ends.until("ready")
        assert rig.put(1) is TierOutcome.DONE
        rig.store.read_only = True
        for number in range(2 * FAILURES_TO_OPEN):
            assert rig.put(10 + number) is TierOutcome.UNAVAILABLE
            assert rig.get(1) is TierOutcome.DONE
        assert (rig.tier.state, rig.tier.status().breaks) == ("read_only", 0)
    finally:
        rig.close()


def test_a_tier_that_takes_no_writes_is_probed() -> None:
    """Else it is read for as long only as what is remembered of it, a minute."""
    rig = Rig()
    try:
        rig.ends.until("ready")
        tiers = Tiers([ConfiguredTier(rig.tier, rig.url)])
        rig.store.read_only = True
        for number in range(FAILURES_TO_OPEN):
            assert rig.put(number) is TierOutcome.UNAVAILABLE
        assert rig.tier.failure
        assert tiers.unknown_to(Durability.ANYWHERE) == [0]
    finally:
        rig.close()


def test_puts_of_what_the_store_has_prove_nothing() -> None:
    """Beside them three refused ones in a row were never met, and the tier was ready."""
    rig = Rig()
    try:
        rig.ends.until("ready")
        others = Rig(store=rig.store)
        others.ends.until("ready")
        for number in range(FAILURES_TO_OPEN):
            assert others.put(number) is TierOutcome.DONE
        others.tier.close(within(5))
        rig.store.read_only = True
        for number in range(FAILURES_TO_OPEN):
            assert rig.tier.state == "ready"
            assert rig.put(number) is TierOutcome.DONE, "another daemon has stored it"
            assert rig.put(100 + number) is TierOutcome.UNAVAILABLE
        assert rig.tier.state == "read_only"
    finally:
        rig.close()


def test_a_store_that_takes_no_writes_at_the_start_is_read() -> None:
    first = Rig()
    first.ends.until("ready")
    first.put(1)
    first.tier.close(within(5))
    first.store.read_only = True
    rig = Rig(store=first.store)
    try:
        rig.ends.until("read_only")
        assert rig.get(1) is TierOutcome.DONE
        rig.store.read_only = False
        while rig.tier.state != "ready":
            rig.tier.tick(time.monotonic_ns())
            rig.ends.drain()
            time.sleep(0.02)
        assert rig.put(2) is TierOutcome.DONE
    finally:
        rig.close()


def test_a_tier_that_is_configured_read_only_writes_nothing() -> None:
    """It made ids of what the store did not have, and deleted what was damaged."""
    first = Rig()
    first.ends.until("ready")
    for number in range(4):
        first.put(number)
    first.tier.close(within(5))
    store, before = first.store, dict(first.store.ids)
    where = min(store.values)
    store.values[where] = store.values[where][:-1] + bytes([store.values[where][-1] ^ 1])
    values = dict(store.values)
    rig = Rig("?read_only=true", store)
    try:
        rig.ends.until("read_only")
        assert rig.tier.failure == ""
        outcomes = [rig.get(number) for number in range(4)]
        assert sorted(outcome.value for outcome in outcomes) == ["corrupt", "done", "done", "done"]
        for number in range(4):
            probe = rig.tier.probe(b"m" * 32, 0, name(number).key, True, within(10))
            assert rig.ends.of(probe).outcome is TierOutcome.DONE, "the store has nothing of this namespace"
            assert rig.tier.holds(b"m" * 32, 0, name(number).key) == 0
        rig.tier.drop(name(1).namespace, 0, name(1).key)
        assert rig.get(0) in (TierOutcome.DONE, TierOutcome.CORRUPT)
        assert (store.ids, store.values) == (before, values)
        assert rig.tier.state == "read_only"
    finally:
        rig.close()
