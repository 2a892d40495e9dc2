"""Ids of generations were random, so a store that went back in time (a snapshot, a lagging replica, a restored bucket) was believed.

Then what a clear had removed was found again, although the clear had ended as done.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until
from support.faulty_store import FaultyStore
from support.l1_memory import NAMESPACE, PAGE, Ends, L1Memory, name, within
from support.shared_tiers import TierDaemon
from support.slow_proxy import SlowProxy
from support.valkey import ValkeyStore
from support.worker import Worker, make_keys

from kvserver.config import parse_tiers
from kvserver.l2 import TierOutcome
from kvserver.l2.remote import generations
from kvserver.l2.remote.ids import HighestIds, id_of, meaning_of, new_id
from kvserver.l2.remote.tier import RemoteTier

DONE, MISSING = TierOutcome.DONE, TierOutcome.MISSING
RANKS = (PAGE, 2 * PAGE)
NUMBER = slice(0, 8)


class Member(TierDaemon):
    """A daemon whose store is in this process. `folder`: its own."""

    def __init__(self, store: FaultyStore, folder: str = "", parameters: str = "") -> None:
        (self.url,) = parse_tiers([f"valkey://store/p?timeout=5s{parameters}"])
        self.l1 = L1Memory(256)
        self.tier = RemoteTier(self.url, "p", self.l1.region, PAGE, store.connect, lanes=3, folder=folder)
        self.ends = Ends(self.tier)
        self.until_open()

    def stored(self, number: int) -> None:
        assert self.put(name(number), self.l1.object(*RANKS)) is DONE

    def read(self, number: int) -> TierOutcome:
        return self.get(name(number), self.l1.object(*RANKS))


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def make_member(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Member]]:
    """Its ids are never cached."""
    monkeypatch.setattr(generations, "IDS_SECONDS", 0.0)
    members: list[Member] = []

    def make(folder: str = "", parameters: str = "") -> Member:
        members.append(Member(store, folder, parameters))
        return members[-1]

    yield make
    for member in members:
        member.tier.close(within(5))


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyStore]:
    server = ValkeyStore(tmp_path)
    yield server
    server.close()


def id_in(store: FaultyStore) -> bytes:
    """Of the scope that is cleared here."""
    return store.ids[next(where for where in store.ids if where.endswith(NAMESPACE.hex()))]


def test_cleared_kv_stays_so_for_all_daemons_once_one_of_them_has_seen_the_rollback(
    store: FaultyStore, make_member: Callable[..., Member]
) -> None:
    one = make_member()
    one.stored(1)
    assert one.clear() is DONE
    cleared = id_in(store)
    store.go_back()
    assert id_in(store) < cleared
    assert one.read(1) is MISSING
    assert id_in(store)[NUMBER] > cleared[NUMBER], "a daemon that never saw the lost id may have cleared meanwhile"
    assert make_member().read(1) is MISSING, "a daemon that never saw the lost id"
    one.stored(2)
    assert one.read(2) is DONE


def test_old_answers_bring_nothing_back(store: FaultyStore, make_member: Callable[..., Member]) -> None:
    one = make_member()
    one.stored(1)
    assert one.clear() is DONE
    store.fail("old", "old", "old")  # ids, the object, and the ids that are read once more
    assert one.read(1) is MISSING
    assert one.read(1) is MISSING


def test_a_clear_after_a_rollback_counts_for_a_daemon_that_saw_higher_ids(
    store: FaultyStore, make_member: Callable[..., Member]
) -> None:
    """The store went back to before two clears; the daemon that clears now has seen neither."""
    knowing = make_member()
    knowing.stored(1)
    early = dict(store.ids)
    for _ in range(2):
        assert knowing.clear() is DONE
    knowing.stored(2)
    store.ids = early
    assert make_member().clear() is DONE
    assert [knowing.read(number) for number in (1, 2)] == [MISSING, MISSING]


def test_a_clear_by_a_daemon_that_just_started_is_above_the_stores_id(
    store: FaultyStore, make_member: Callable[..., Member]
) -> None:
    one = make_member()
    for _ in range(3):
        assert one.clear() is DONE
    before = id_in(store)
    assert make_member().clear() is DONE
    assert id_in(store)[NUMBER] > before[NUMBER]


def test_ids_that_another_daemon_wrote_are_remembered(store: FaultyStore, make_member: Callable[..., Member]) -> None:
    one, other = make_member(), make_member()
    one.stored(1)
    assert other.clear() is DONE
    assert one.read(1) is MISSING
    store.go_back()
    assert one.read(1) is MISSING


def test_a_restart_and_a_rollback_bring_nothing_back_where_there_is_a_folder(
    store: FaultyStore, make_member: Callable[..., Member], tmp_path: Path
) -> None:
    one = make_member(str(tmp_path))
    one.stored(1)
    assert one.clear() is DONE
    one.tier.close(within(5))
    store.go_back()
    assert make_member(str(tmp_path)).read(1) is MISSING


def test_two_clears_at_once_end_with_one_id(store: FaultyStore, make_member: Callable[..., Member]) -> None:
    one, two = make_member(), make_member()
    one.stored(1)
    for _ in range(5):
        store.hang(True)
        tickets = [(each, each.tier.clear(NAMESPACE)) for each in (one, two)]
        store.hang(False)
        assert [each.ends.of(ticket).outcome for each, ticket in tickets] == [DONE, DONE]
        assert [each.read(1) for each in (one, two, one)] == [MISSING] * 3
        settled = id_in(store)
        one.stored(1)
        assert two.read(1) is DONE
        assert id_in(store) == settled


def test_of_two_ids_with_one_number_the_lower_one_is_replaced(
    store: FaultyStore, make_member: Callable[..., Member]
) -> None:
    one = make_member()
    one.stored(1)
    where = next(where for where in store.ids if where.endswith(NAMESPACE.hex()))
    ours = store.ids[where]
    store.ids[where] = ours[NUMBER] + bytes(16)
    assert one.read(1) is MISSING
    assert store.ids[where][NUMBER] > ours[NUMBER]


def test_kv_of_ids_of_an_earlier_version_is_kept_until_it_is_cleared(
    store: FaultyStore, make_member: Callable[..., Member]
) -> None:
    first = make_member()
    scopes = [b"", NAMESPACE]
    where = {scope: next(each for each in store.ids if each.endswith("all")) for scope in scopes[:1]}
    first.read(1)
    where[NAMESPACE] = next(each for each in store.ids if each.endswith(NAMESPACE.hex()))
    old = {where[scope]: random.Random(len(scope)).randbytes(16) for scope in scopes}
    store.ids = dict(old)
    one = make_member()
    one.stored(1)
    assert {each: store.ids[each] for each in old} == old
    assert make_member().read(1) is DONE
    assert meaning_of(id_of(old[where[b""]])) == old[where[b""]], "the digest is the one of earlier versions"
    assert one.clear() is DONE
    assert id_of(old[where[NAMESPACE]]) < id_in(store)
    store.go_back()
    assert [one.read(1), make_member().read(1)] == [MISSING, MISSING]


def test_the_highest_ids_are_bounded_and_what_was_dropped_is_a_floor(tmp_path: Path) -> None:
    highest = HighestIds(str(tmp_path), "ids")
    cleared = {bytes([1]) + number.to_bytes(2, "big"): new_id((7).to_bytes(8, "big")) for number in range(1000)}
    highest.raise_to(cleared)
    never_cleared = {number.to_bytes(2, "big"): new_id(b"") for number in range(200)}
    highest.raise_to(never_cleared)
    for known in (highest, HighestIds(str(tmp_path), "ids")):
        assert all(known.least(scope) == id for scope, id in cleared.items())
        assert all(known.least(scope) <= id for scope, id in never_cleared.items()), "the floor harms none of them"
        assert known.least(b"another") == (1).to_bytes(8, "big")
    highest.raise_to({b"%d" % number: new_id((8).to_bytes(8, "big")) for number in range(1024)})
    assert HighestIds(str(tmp_path), "ids").least(next(iter(cleared))) == (8).to_bytes(8, "big")


def test_a_damaged_or_unwritable_file_of_highest_ids_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    HighestIds(str(tmp_path), "ids").raise_to({b"": new_id(b"")})
    raw = (tmp_path / "ids").read_bytes()
    (tmp_path / "ids").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert HighestIds(str(tmp_path), "ids").least(b"") == bytes(8)
    assert "damaged" in caplog.text
    nowhere = HighestIds(str(tmp_path / "nowhere"), "ids")
    nowhere.raise_to({b"": (id := new_id(b""))})
    assert nowhere.least(b"") == id
    assert "cannot be written" in caplog.text


def test_a_daemon_that_restarts_beside_a_valkey_of_a_snapshot_does_not_find_what_was_cleared(
    valkey: ValkeyStore, make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    settings = {"l2": [valkey.url_of("p"), f"file://{tmp_path}/tier?size=16MiB"], "l1_size": "16MiB"}
    keys = make_keys(2)

    daemon = make_daemon(**settings).wait_for_tiers()
    with Worker(daemon.endpoint, instance_id="one") as worker:
        worker.store(keys, worker.blocks_for(2))
        wait_until(lambda: len(valkey.objects()) == 2)
    with valkey.client() as client:
        client.save()
    assert daemon.http("/cache/clear?shared=true", "POST")[0] == 200
    assert daemon.terminate() == 0
    assert (tmp_path / "tier/ids-valkey").stat().st_mode & 0o777 == 0o600
    valkey.kill()
    valkey.start()
    assert len(valkey.objects()) == 2, "they are back"
    daemon = make_daemon(**settings).wait_for_tiers()
    with Worker(daemon.endpoint, instance_id="one") as worker:
        assert worker.fill(keys, wait_ms=10_000) == 0


def test_a_clear_that_no_replica_has_is_done_with_a_warning(valkey: ValkeyStore, tmp_path: Path) -> None:
    (tmp_path / "replica").mkdir()
    replica, proxy = ValkeyStore(tmp_path / "replica"), SlowProxy(valkey.port)
    daemon = TierDaemon(valkey.url_of("p"))
    try:
        daemon.until_open()
        assert daemon.ends.of(daemon.tier.clear(b"")).what == "", "it has no replicas"
        with replica.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", proxy.port)
            wait_until(lambda: client.info("replication").get("master_link_status") == "up")
            end = daemon.ends.of(daemon.tier.clear(b""))
            assert (end.outcome, end.what) == (DONE, "")
            proxy.hold()
            end = daemon.ends.of(daemon.tier.clear(b""))
            assert end.outcome is DONE
            assert "no replica has acknowledged it" in end.what
    finally:
        daemon.tier.close(within(5))
        proxy.cut()
        proxy.close()
        replica.close()


def test_a_reader_that_saw_an_older_id_goes_on_once_another_daemon_has_written_a_higher_one(
    store: FaultyStore, make_member: Callable[..., Member]
) -> None:
    """It cannot write one itself, and answered that there is nothing until its restart."""
    writer = make_member()
    writer.stored(1)
    assert writer.clear() is DONE
    writer.stored(2)
    reader = make_member(parameters="&read_only=true")
    assert reader.read(2) is DONE
    store.go_back()
    assert reader.read(2) is MISSING, "it has seen the older id"
    writer.stored(3)
    assert reader.read(3) is DONE, "the other one has written a higher id"


def test_a_disk_that_hangs_keeps_no_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvserver.l2.remote.ids._MOST_WAIT_SECONDS", 0.2)
    goes = threading.Event()
    highest = HighestIds(str(tmp_path), "ids")
    monkeypatch.setattr(highest, "_write", lambda raw: goes.wait(20))
    began = time.monotonic()
    for _ in range(20):
        highest.raise_to({b"s": new_id(highest.least(b"s"))})
    assert time.monotonic() - began < 2.0
    goes.set()


def test_scopes_beyond_the_bound_are_not_written_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    highest = HighestIds(str(tmp_path), "ids")
    ids = {number.to_bytes(2, "big"): new_id(b"") for number in range(1100)}
    highest.raise_to(ids)
    before = (tmp_path / "ids").stat().st_mtime_ns
    for scope, id in ids.items():
        highest.raise_to({scope: id})
        assert highest.least(scope) <= id
    assert (tmp_path / "ids").stat().st_mtime_ns == before
