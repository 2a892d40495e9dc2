"""Objects share a command of a store. One GET in sixteen was answered 500, and all sixteen ended as unavailable; a refused DELETE of
one damaged object lost those that were verified beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from support.faulty_store import FaultyStore
from support.ill_proxy import IllProxy
from support.l1_memory import NAMESPACE, PAGE, Ends, L1Memory, key, keys, name, within
from support.s3 import BUCKET, CREDENTIALS, S3Server
from support.shared_tiers import TierDaemon

from kvserver.config import parse_tiers
from kvserver.l2 import TierOutcome
from kvserver.l2.remote.tier import RemoteTier

COUNT = 16


class Rig:
    """A tier over a faulty store."""

    def __init__(self) -> None:
        self.store, self.l1 = FaultyStore(), L1Memory()
        (url,) = parse_tiers(["valkey://host/p"])
        self.tier = RemoteTier(url, "p", self.l1.region, PAGE, self.store.connect, 2)
        self.ends = Ends(self.tier)
        self.ends.until("ready")

    def together(self, kind: str) -> Counter[TierOutcome]:
        """The outcomes of COUNT requests of one command: they queue while the lanes hang."""
        memory = [self.l1.object(PAGE) for _ in range(COUNT)]
        self.store.hang(True)
        blocked = [self.tier.probe(NAMESPACE, 9, keys(number), False, within(10)) for number in range(2)]
        parts = [(name(number), memory[number]) for number in range(COUNT)]
        tickets = [
            self.tier.put(*part, b"", within(10)) if kind == "put" else self.tier.get(*part, within(10))
            for part in parts
        ]
        self.store.hang(False)
        self.ends.all(blocked)
        return Counter(end.outcome for end in self.ends.all(tickets))

    def close(self) -> None:
        self.store.heal()
        self.tier.close(within(5))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[IllProxy, TierDaemon]]:
    for variable, value in CREDENTIALS.items():
        monkeypatch.setenv(variable, value)
    server = S3Server()
    proxy = IllProxy(server.port)
    daemon = TierDaemon(f"s3://{BUCKET}/p?endpoint=http://127.0.0.1:{proxy.port}&region=us-east-1")
    daemon.until_open()
    yield proxy, daemon
    daemon.tier.close(within(5))
    proxy.close()
    server.close()


def outcomes(daemon: TierDaemon, kind: str) -> list[TierOutcome]:
    memory = [daemon.l1.object(PAGE) for _ in range(COUNT)]
    tickets = [
        daemon.tier.put(name(number), memory[number], b"", within(10))
        if kind == "put"
        else daemon.tier.get(name(number), memory[number], within(10))
        for number in range(COUNT)
    ]
    return [end.outcome for end in daemon.ends.all(tickets)]


@pytest.mark.parametrize(("method", "kind"), [("GET", "get"), ("PUT", "put")])
def test_one_request_of_a_command_that_s3_fails_fails_one_object(
    s3: tuple[IllProxy, TierDaemon], method: str, kind: str
) -> None:
    proxy, daemon = s3
    if kind == "get":
        assert set(outcomes(daemon, "put")) == {TierOutcome.DONE}
    proxy.ill.add((method, key(9).hex()))
    assert Counter(outcomes(daemon, kind)) == {TierOutcome.DONE: COUNT - 1, TierOutcome.UNAVAILABLE: 1}
    assert daemon.tier.state == "ready"


def test_one_value_that_a_store_does_not_read_fails_one_get(rig: Rig) -> None:
    assert rig.together("put") == {TierOutcome.DONE: COUNT}
    rig.store.ill.add(key(9).hex())
    assert rig.together("get") == {TierOutcome.DONE: COUNT - 1, TierOutcome.UNAVAILABLE: 1}


def test_one_value_that_a_store_does_not_write_fails_one_put(rig: Rig) -> None:
    rig.store.ill.add(key(9).hex())
    assert rig.together("put") == {TierOutcome.DONE: COUNT - 1, TierOutcome.UNAVAILABLE: 1}


def test_a_store_that_refuses_deletes_keeps_what_was_verified_beside_a_corrupt_object(rig: Rig) -> None:
    assert rig.together("put") == {TierOutcome.DONE: COUNT}
    rig.store.refuses_deletes = True
    (where,) = [where for where in rig.store.values if where.endswith(key(9).hex())]
    rig.store.values[where] = bytes([rig.store.values[where][0] ^ 1]) + rig.store.values[where][1:]
    assert rig.together("get") == {TierOutcome.DONE: COUNT - 1, TierOutcome.CORRUPT: 1}


def test_a_store_that_refuses_deletes_is_not_cut_off_by_drops(rig: Rig) -> None:
    assert rig.together("put") == {TierOutcome.DONE: COUNT}
    rig.store.refuses_deletes = True
    for number in range(4):
        rig.tier.drop(NAMESPACE, 0, keys(number))
        rig.ends.of(rig.tier.probe(NAMESPACE, 0, keys(100 + number), False, within(10)))
    assert rig.tier.state == "ready"
    assert rig.tier.holds(NAMESPACE, 0, keys(0, 1, 2, 3, 4)) == 0b10000


def test_an_object_that_cannot_be_read_is_not_promised_and_its_put_is_written(rig: Rig) -> None:
    assert rig.together("put") == {TierOutcome.DONE: COUNT}
    rig.store.ill.add(key(9).hex())
    rig.together("get")
    assert rig.tier.holds(NAMESPACE, 0, keys(8, 9, 10)) == 0b101
    rig.store.ill.clear()
    memory = rig.l1.object(PAGE)
    end = rig.ends.of(rig.tier.put(name(9), memory, b"", within(10)))
    assert (end.outcome, end.bytes > 0) == (TierOutcome.DONE, True)
    assert rig.ends.of(rig.tier.get(name(9), memory, within(10))).outcome is TierOutcome.DONE
    assert rig.tier.holds(NAMESPACE, 0, keys(8, 9, 10)) == 0b111
