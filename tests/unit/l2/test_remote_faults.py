"""Tiers that daemons share when their store hangs, dies, lies or forgets: a miss or an error in time, never wrong bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import pytest
from support.l1_memory import NAMESPACE, PAGE, key, keys, name, within
from support.shared_tiers import MakeDaemon, SharedStore, TierDaemon
from support.slow_proxy import SlowProxy
from support.valkey import ValkeyStore

from kvserver.config import parse_tiers
from kvserver.l2 import TierOutcome
from kvserver.l2.remote import generations
from kvserver.l2.remote.breaker import FAILURES_TO_OPEN
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.generations import IDS_SECONDS
from kvserver.l2.remote.make import store_of

RANKS = (3 * PAGE + 17, 5 * PAGE)


@pytest.fixture
def hasty(store: SharedStore, prefix: str, make_daemon_of: MakeDaemon) -> TierDaemon:
    """A daemon whose requests have a second."""
    return make_daemon_of(store.url_of(prefix, "timeout=1s"))


@pytest.fixture
def slow(store: SharedStore) -> Iterator[SlowProxy]:
    proxy = SlowProxy(store.port)
    yield proxy
    proxy.close()


def through(proxy: SlowProxy, url: str, store: SharedStore) -> str:
    return url.replace(f"127.0.0.1:{store.port}", f"127.0.0.1:{proxy.port}")


def stored(daemon: TierDaemon, number: int) -> list[bytes]:
    memory = daemon.l1.object(*RANKS)
    assert daemon.put(name(number), memory) is TierOutcome.DONE
    return daemon.l1.read(memory)


def after_outage(act: Callable[[], TierOutcome], seconds: float = 30.0) -> TierOutcome:
    """The first outcome that is none of an outage: each lane finds out by itself that the store is back.

    A put is cancelled while the ids of generations are replaced, which a store that was killed has lost.
    """
    deadline = time.monotonic() + seconds
    while (outcome := act()) in (TierOutcome.TIMEOUT, TierOutcome.UNAVAILABLE, TierOutcome.CANCELLED):
        assert time.monotonic() < deadline, "the store is back, the tier is not"
    return outcome


def where(store: SharedStore, prefix: str, number: int) -> str:
    (found,) = [each for each in store.objects() if each.startswith(prefix) and each.endswith(key(number).hex())]
    return found


# ---- stores that hang -----------------------------------------------------------------------------


def test_with_a_store_that_hangs_every_ticket_ends_at_its_deadline(hasty: TierDaemon, store: SharedStore) -> None:
    expected = stored(hasty, 1)
    store.stop()
    try:
        began = time.monotonic()
        memory = hasty.l1.object(*RANKS)
        before = hasty.l1.read(memory)
        tickets = [
            hasty.tier.get(name(1), memory, within(1)),
            hasty.tier.put(name(2), hasty.l1.object(*RANKS), b"", within(1)),
            hasty.tier.probe(NAMESPACE, 0, keys(5, 6), True, within(1)),
        ]
        outcomes = {end.outcome for end in hasty.ends.all(tickets)}
        assert outcomes <= {TierOutcome.TIMEOUT, TierOutcome.UNAVAILABLE}
        assert TierOutcome.TIMEOUT in outcomes
        assert time.monotonic() - began < 5
    finally:
        store.go_on()
    hasty.ends.until("ready")
    assert hasty.l1.read(memory) == before, "an answer that is late reaches no memory of L1"
    assert after_outage(lambda: hasty.get(name(1), memory)) is TierOutcome.DONE
    assert hasty.l1.read(memory) == expected


def test_the_breaker_opens_for_a_store_that_hangs_and_closes_when_it_goes_on(
    hasty: TierDaemon, store: SharedStore
) -> None:
    stored(hasty, 1)
    store.stop()
    try:
        memory = hasty.l1.object(*RANKS)
        for _ in range(FAILURES_TO_OPEN):
            assert hasty.tier.state == "ready"
            assert hasty.get(name(1), memory, 1.0) is TierOutcome.TIMEOUT
        assert hasty.tier.state == "unavailable"
        assert hasty.tier.failure
        assert hasty.tier.status().breaker in ("open", "probing")
        assert hasty.tier.holds(NAMESPACE, 0, key(1)) == 0, "what cannot be read is not promised"
        began = time.monotonic()
        end = hasty.ends.of(hasty.tier.put(name(2), memory, b"", within(10)))
        assert end.outcome is TierOutcome.UNAVAILABLE
        assert "breaker" in end.what
        assert time.monotonic() - began < 5, "at once"
    finally:
        store.go_on()
    hasty.ends.until("ready")
    status = hasty.tier.status()
    assert (status.breaker, status.breaks, status.timeouts) == ("closed", 1, FAILURES_TO_OPEN)
    assert hasty.tier.holds(NAMESPACE, 0, key(1)) == 1
    assert after_outage(lambda: hasty.get(name(1), memory)) is TierOutcome.DONE


def test_misses_never_open_the_breaker(hasty: TierDaemon) -> None:
    memory = hasty.l1.object(*RANKS)
    for number in range(3 * FAILURES_TO_OPEN):
        assert hasty.get(name(number), memory) is TierOutcome.MISSING
    assert (hasty.tier.state, hasty.tier.status().breaks) == ("ready", 0)
    assert hasty.tier.status().misses == 3 * FAILURES_TO_OPEN


def test_close_returns_by_its_deadline_with_a_store_that_hangs(
    store: SharedStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(store.url_of(prefix, "timeout=60s"))
    stored(daemon, 1)
    store.stop()
    began = time.monotonic()
    try:
        memory = daemon.l1.object(*RANKS)
        tickets = [daemon.tier.get(name(1), memory, within(60)) for _ in range(3)]
        tickets += [daemon.tier.put(name(n), daemon.l1.object(*RANKS), b"", within(60)) for n in range(2, 20)]
        before = daemon.l1.read(memory)
        time.sleep(0.2)  # until the lanes wait for the store
        daemon.tier.close(within(0.5))
        assert time.monotonic() - began < 10, "no call waits for the store"
        ends = {end.ticket: end.outcome for end in daemon.tier.drain()}
        assert ends == dict.fromkeys(tickets, TierOutcome.UNAVAILABLE)
    finally:
        store.go_on()
    time.sleep(0.5)  # the answers arrive
    assert daemon.l1.read(memory) == before


@pytest.mark.parametrize("delay", [2.0, 10.0])
def test_a_slow_store_costs_no_more_than_the_deadline(
    store: SharedStore, slow: SlowProxy, prefix: str, make_daemon_of: MakeDaemon, delay: float
) -> None:
    daemon = make_daemon_of(through(slow, store.url_of(prefix, "timeout=30s"), store))
    stored(daemon, 1)
    memory = daemon.l1.object(*RANKS)
    before = daemon.l1.read(memory)
    slow.delay_seconds = delay
    began = time.monotonic()
    assert daemon.get(name(1), memory, 0.3) is TierOutcome.TIMEOUT
    assert time.monotonic() - began < 0.9 * min(delay, 5)
    if delay < 5:
        time.sleep(delay + 0.5)
        assert daemon.l1.read(memory) == before, "a late answer reaches no memory of L1"


# ---- stores that are down -------------------------------------------------------------------------


def test_a_store_that_was_killed_and_started_again_is_used_again(hasty: TierDaemon, store: SharedStore) -> None:
    stored(hasty, 1)
    memory = hasty.l1.object(*RANKS)
    store.kill()
    try:
        for _ in range(FAILURES_TO_OPEN):
            assert hasty.get(name(1), memory) in (TierOutcome.UNAVAILABLE, TierOutcome.TIMEOUT)
        assert hasty.tier.state == "unavailable"
    finally:
        store.start()
    hasty.ends.until("ready")
    assert after_outage(lambda: hasty.get(name(1), memory)) is TierOutcome.MISSING, "it kept nothing"
    other = hasty.l1.object(*RANKS)

    def put_and_get() -> TierOutcome:
        put = after_outage(lambda: hasty.put(name(2), other))
        return after_outage(lambda: hasty.get(name(2), memory)) if put is TierOutcome.DONE else put

    deadline = time.monotonic() + 4 * IDS_SECONDS
    while (outcome := put_and_get()) is TierOutcome.MISSING:  # it was put under the ids that the store has lost
        assert time.monotonic() < deadline
    assert outcome is TierOutcome.DONE
    assert hasty.l1.read(memory) == hasty.l1.read(other)


def test_a_tier_whose_store_is_not_there_at_the_start_opens_later(
    store: SharedStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    store.kill()
    try:
        daemon = make_daemon_of(store.url_of(prefix, "timeout=1s"), opens=False)
        assert daemon.put(name(1), daemon.l1.object(*RANKS)) is TierOutcome.UNAVAILABLE
        daemon.ends.until("unavailable")
        assert daemon.tier.failure
    finally:
        store.start()
    daemon.ends.until("ready")
    assert after_outage(lambda: daemon.put(name(1), daemon.l1.object(*RANKS))) is TierOutcome.DONE


# ---- stores that lie and forget -------------------------------------------------------------------


def test_objects_that_the_store_loses_are_misses(daemon: TierDaemon, store: SharedStore, prefix: str) -> None:
    for number in range(3):
        stored(daemon, number)
    store.remove(where(store, prefix, 1))
    assert daemon.tier.holds(NAMESPACE, 0, keys(0, 1, 2)) == 0b111, "memory does not know yet"
    memory = daemon.l1.object(*RANKS)
    assert daemon.get(name(1), memory) is TierOutcome.MISSING
    assert daemon.tier.holds(NAMESPACE, 0, keys(0, 1, 2)) == 0b101
    assert daemon.get(name(2), memory) is TierOutcome.DONE


@pytest.mark.parametrize("fault", ["another object", "short", "empty", "a bit of the header", "a bit of the end"])
def test_wrong_bytes_under_a_right_name_are_found(
    daemon: TierDaemon, store: SharedStore, prefix: str, fault: str
) -> None:
    expected = stored(daemon, 1)
    stored(daemon, 2)
    place = where(store, prefix, 1)
    raw = bytearray(store.read(place))
    if fault == "another object":
        raw = bytearray(store.read(where(store, prefix, 2)))
    elif fault == "short":
        raw = raw[:-1]
    elif fault == "empty":
        raw.clear()
    else:
        raw[100 if "header" in fault else -1] ^= 1
    store.write(place, bytes(raw))
    memory = daemon.l1.object(*RANKS)
    assert daemon.get(name(1), memory) is TierOutcome.CORRUPT
    assert daemon.tier.holds(NAMESPACE, 0, key(1)) == 0
    assert place not in store.objects(), "it is dropped"
    assert daemon.tier.status().corrupt == 1
    again = stored(daemon, 1)
    assert daemon.get(name(1), memory) is TierOutcome.DONE
    assert daemon.l1.read(memory) == again != expected


def test_each_object_of_a_command_has_its_own_outcome(
    daemon: TierDaemon, neighbour: TierDaemon, store: SharedStore, prefix: str
) -> None:
    """Small objects that are read at once, most of them by one command of the store."""
    written = [stored(daemon, number) for number in range(8)]
    store.remove(where(store, prefix, 1))
    for number, damage in (
        (2, lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])),
        (4, lambda raw: raw + b"longer" * PAGE),
        (6, lambda raw: raw[:-1]),
    ):
        place = where(store, prefix, number)
        store.write(place, damage(store.read(place)))
    memories = [neighbour.l1.object(*RANKS) for _ in range(9)]
    before = [neighbour.l1.read(memory) for memory in memories]
    tickets = [neighbour.tier.get(name(number), memory, within(20)) for number, memory in enumerate(memories)]
    outcomes = [end.outcome for end in neighbour.ends.all(tickets)]
    wrong = {1: TierOutcome.MISSING, 8: TierOutcome.MISSING, **dict.fromkeys((2, 4, 6), TierOutcome.CORRUPT)}
    assert outcomes == [wrong.get(number, TierOutcome.DONE) for number in range(9)]
    for number, memory in enumerate(memories):
        if outcomes[number] is TierOutcome.MISSING:
            assert neighbour.l1.read(memory) == before[number]
        elif outcomes[number] is TierOutcome.DONE:
            assert neighbour.l1.read(memory) == written[number]


def test_another_groups_bytes_under_a_right_name_are_found(daemon: TierDaemon, store: SharedStore, prefix: str) -> None:
    memory = daemon.l1.object(*RANKS)
    for group in (0, 1):
        assert daemon.put(name(1, group=group), daemon.l1.object(*RANKS)) is TierOutcome.DONE
    first, second = sorted(each for each in store.objects() if each.startswith(prefix))
    store.write(second, store.read(first))
    assert daemon.get(name(1, group=1), memory) is TierOutcome.CORRUPT


def test_an_earlier_generations_bytes_under_a_right_name_are_a_miss(
    daemon: TierDaemon, store: SharedStore, prefix: str
) -> None:
    stored(daemon, 1)
    cleared = store.read(where(store, prefix, 1))
    store.remove(where(store, prefix, 1))
    assert daemon.clear() is TierOutcome.DONE
    stored(daemon, 1)
    store.write(where(store, prefix, 1), cleared)
    memory = daemon.l1.object(*RANKS)
    before = daemon.l1.read(memory)
    assert daemon.get(name(1), memory) is TierOutcome.MISSING
    assert daemon.l1.read(memory) == before


def test_eight_corrupt_objects_in_a_row_close_the_tier(daemon: TierDaemon, store: SharedStore, prefix: str) -> None:
    for number in range(8):
        stored(daemon, number)
        store.write(where(store, prefix, number), b"x" * 10)
    memory = daemon.l1.object(*RANKS)
    for number in range(8):
        assert daemon.tier.state == "ready"
        assert daemon.get(name(number), memory) is TierOutcome.CORRUPT
    assert daemon.tier.state == "closed"
    assert "8 objects" in daemon.tier.failure
    assert daemon.get(name(1), memory) is TierOutcome.UNAVAILABLE
    assert daemon.tier.holds(NAMESPACE, 0, keys(*range(8))) == 0


# ---- clears that others see -----------------------------------------------------------------------


def until_missing(daemon: TierDaemon, number: int) -> float:
    """Seconds until a daemon no longer serves an object."""
    began = time.monotonic()
    memory = daemon.l1.object(*RANKS)
    while daemon.get(name(number), memory) is not TierOutcome.MISSING:
        assert time.monotonic() - began < 4 * IDS_SECONDS
        time.sleep(0.05)
    return time.monotonic() - began


def test_a_clear_by_one_daemon_is_seen_by_the_other_in_time(daemon: TierDaemon, neighbour: TierDaemon) -> None:
    stored(daemon, 1)
    stored(daemon, 2)
    assert neighbour.probe([1, 2]) == 0b11
    assert daemon.clear() is TierOutcome.DONE
    assert until_missing(neighbour, 1) < IDS_SECONDS + 5
    assert neighbour.tier.holds(NAMESPACE, 0, keys(1, 2)) == 0, "nothing of it is promised any more"
    assert neighbour.probe([1, 2]) == 0
    expected = stored(neighbour, 1)
    memory = daemon.l1.object(*RANKS)
    assert daemon.get(name(1), memory) is TierOutcome.DONE, "both are in the new generation"
    assert daemon.l1.read(memory) == expected


def test_what_another_daemon_was_putting_during_a_clear_is_not_served(
    daemon: TierDaemon, neighbour: TierDaemon
) -> None:
    stored(neighbour, 1)
    memory = neighbour.l1.object(*RANKS)
    tickets = [neighbour.tier.put(name(number), memory, b"", within(20)) for number in range(2, 40)]
    assert daemon.clear() is TierOutcome.DONE
    neighbour.ends.all(tickets)
    stored(neighbour, 100)  # in the old generation, which it may still believe in
    assert daemon.probe([*range(2, 40), 100], chain=False) == 0
    for number in (1, 2, 39):
        assert daemon.get(name(number), daemon.l1.object(*RANKS)) is TierOutcome.MISSING


def test_what_another_daemon_cleared_while_it_was_under_way_counts_no_more(
    daemon: TierDaemon,
    store: SharedStore,
    slow: SlowProxy,
    prefix: str,
    make_daemon_of: MakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generations, "IDS_SECONDS", 3.0)
    neighbour = make_daemon_of(through(slow, store.url_of(prefix, "timeout=30s"), store))
    stored(daemon, 1)
    memory = neighbour.l1.object(20 * PAGE)
    puts = [neighbour.tier.put(name(number), memory, b"", within(60)) for number in range(10, 50)]
    neighbour.ends.all(puts)  # by now all lanes are connected
    assert neighbour.probe([1, 3], chain=False) == 0b01
    slow.hold()
    tickets = [
        neighbour.tier.get(name(1), neighbour.l1.object(*RANKS), within(60)),
        neighbour.tier.put(name(3), neighbour.l1.object(*RANKS), b"", within(60)),
    ]
    time.sleep(0.3)  # until both wait for the store
    assert daemon.clear() is TierOutcome.DONE
    time.sleep(3.0)  # until the neighbour's ids have expired
    slow.release()
    read, written = (end.outcome for end in neighbour.ends.all(tickets))
    assert read is TierOutcome.MISSING
    if written is not TierOutcome.CANCELLED:  # its lane began late, in the new generation
        assert daemon.get(name(3), daemon.l1.object(*RANKS)) is TierOutcome.DONE


def test_the_first_id_of_a_scope_is_the_one_that_all_use(store: SharedStore, prefix: str) -> None:
    (url,) = parse_tiers([store.url_of(prefix)])
    _, connect = store_of(url)
    first, second = connect(LaneBuffer()), connect(LaneBuffer())
    try:
        assert first.create_id(f"{prefix}/id", b"ours") == b"ours"
        assert second.create_id(f"{prefix}/id", b"theirs") == b"ours"
        assert second.read_ids([f"{prefix}/id", f"{prefix}/other"]) == [b"ours", None]
    finally:
        first.close()
        second.close()


def test_a_clear_whose_write_fails_keeps_the_scope_closed(
    store: SharedStore, slow: SlowProxy, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    daemon = make_daemon_of(through(slow, store.url_of(prefix, "timeout=1s"), store))
    stored(daemon, 1)
    slow.cut()
    assert daemon.clear() in (TierOutcome.UNAVAILABLE, TierOutcome.TIMEOUT)
    slow.restore()
    memory = daemon.l1.object(*RANKS)
    while (outcome := daemon.get(name(1), memory)) in (TierOutcome.UNAVAILABLE, TierOutcome.TIMEOUT):
        time.sleep(0.05)
    assert outcome is TierOutcome.MISSING


def test_a_clear_that_cannot_be_written_keeps_the_scope_closed_until_it_is(
    hasty: TierDaemon, store: SharedStore
) -> None:
    stored(hasty, 1)
    memory = hasty.l1.object(*RANKS)
    store.stop()
    try:
        for _ in range(FAILURES_TO_OPEN):
            hasty.get(name(2), memory, 1.0)
        assert hasty.clear() in (TierOutcome.UNAVAILABLE, TierOutcome.TIMEOUT)
    finally:
        store.go_on()
    hasty.ends.until("ready")
    assert hasty.tier.holds(NAMESPACE, 0, key(1)) == 0
    assert after_outage(lambda: hasty.get(name(1), memory)) is TierOutcome.MISSING


def test_a_tier_that_corrupt_objects_closed_can_be_cleared(
    daemon: TierDaemon, store: SharedStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    for number in range(9):
        stored(daemon, number)
    for number in range(8):
        store.write(where(store, prefix, number), b"x" * 10)
        daemon.get(name(number), daemon.l1.object(*RANKS))
    assert daemon.tier.state == "closed"
    assert daemon.clear() is TierOutcome.DONE
    restarted = make_daemon_of(store.url_of(prefix))
    assert restarted.get(name(8), restarted.l1.object(*RANKS)) is TierOutcome.MISSING


# ---- secrets --------------------------------------------------------------------------------------


def test_no_error_shows_a_secret(
    hasty: TierDaemon, store: SharedStore, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    store.kill()
    try:
        whats = []
        for _ in range(FAILURES_TO_OPEN + 1):
            ticket = hasty.tier.get(name(1), hasty.l1.object(*RANKS), within(1))
            whats.append(hasty.ends.of(ticket).what)
        status = hasty.tier.status()
        shown = " ".join([*whats, repr(status), hasty.tier.failure, caplog.text, *capfd.readouterr()])
    finally:
        store.start()
    assert all(whats)
    assert "secret" not in shown
    assert not isinstance(store, ValkeyStore) or "test-valkey-secret" in store.url_of("x")
