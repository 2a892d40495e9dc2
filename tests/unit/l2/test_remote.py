"""Tiers that daemons share, over a real server of each kind: what is stored is found and read by another daemon, or is a miss."""

from __future__ import annotations

import select
import time
from dataclasses import replace

import pytest
from support.l1_memory import NAMESPACE, PAGE, key, keys, name, within
from support.shared_tiers import MakeDaemon, SharedStore, TierDaemon

from kvserver.l2 import ObjectName, TierOutcome

RANKS = (3 * PAGE + 17, 5 * PAGE, 1)


def stored(daemon: TierDaemon, which: ObjectName) -> list[bytes]:
    """Put an object with a slot for each rank; its bytes."""
    memory = daemon.l1.object(*RANKS)
    assert daemon.put(which, memory) is TierOutcome.DONE
    return daemon.l1.read(memory)


# ---- round trips ----------------------------------------------------------------------------------


def test_what_one_daemon_puts_another_gets_for_all_ranks(daemon: TierDaemon, neighbour: TierDaemon) -> None:
    expected = stored(daemon, name(1))
    memory = neighbour.l1.object(*RANKS)
    end = neighbour.ends.of(neighbour.tier.get(name(1), memory, within(10)))
    assert (end.outcome, end.bytes) == (TierOutcome.DONE, sum(RANKS))
    assert neighbour.l1.read(memory) == expected


def test_an_object_of_several_mebibytes_travels_whole(daemon: TierDaemon, neighbour: TierDaemon) -> None:
    memory = daemon.l1.object(1 << 20, (1 << 20) + 5)
    assert daemon.put(name(1), memory) is TierOutcome.DONE
    read = neighbour.l1.object(1 << 20, (1 << 20) + 5)
    assert neighbour.get(name(1), read) is TierOutcome.DONE
    assert neighbour.l1.read(read) == daemon.l1.read(memory)


def test_what_was_never_put_is_missing(daemon: TierDaemon) -> None:
    assert daemon.get(name(1), daemon.l1.object(*RANKS)) is TierOutcome.MISSING


@pytest.mark.parametrize(
    "other",
    [name(1, group=1), name(2), name(1, namespace=b"m" * 32), name(1, namespace=NAMESPACE + b"e" * 32)],
    ids=["group", "key", "namespace", "epoch"],
)
def test_objects_of_other_names_are_missing(daemon: TierDaemon, other: ObjectName) -> None:
    stored(daemon, name(1))
    memory = daemon.l1.object(*RANKS)
    before = daemon.l1.read(memory)
    assert daemon.get(other, memory) is TierOutcome.MISSING
    assert daemon.l1.read(memory) == before


def test_another_coverage_is_a_miss_and_gives_no_byte(daemon: TierDaemon, neighbour: TierDaemon) -> None:
    stored(daemon, name(1))
    memory = neighbour.l1.object(*RANKS, coverage=b"o" * 16)
    before = neighbour.l1.read(memory)
    assert neighbour.get(name(1), memory) is TierOutcome.MISSING
    assert neighbour.l1.read(memory) == before
    assert neighbour.put(name(1), memory) is TierOutcome.DONE, "it is replaced"
    assert neighbour.get(name(1), replace(neighbour.l1.object(*RANKS), coverage=b"o" * 16)) is TierOutcome.DONE


@pytest.mark.parametrize("lengths", [(PAGE,), (8 * PAGE, 8 * PAGE, 8 * PAGE)], ids=["shorter", "longer"])
def test_other_lengths_are_no_hit(daemon: TierDaemon, neighbour: TierDaemon, lengths: tuple[int, ...]) -> None:
    stored(daemon, name(1))
    memory = neighbour.l1.object(*lengths)
    before = neighbour.l1.read(memory)
    assert neighbour.get(name(1), memory) in (TierOutcome.MISSING, TierOutcome.CORRUPT)
    assert neighbour.l1.read(memory) == before


def test_second_daemon_that_stores_the_same_object_sends_nothing(daemon: TierDaemon, neighbour: TierDaemon) -> None:
    expected = stored(daemon, name(1))
    memory = neighbour.l1.object(*RANKS)
    end = neighbour.ends.of(neighbour.tier.put(name(1), memory, b"", within(10)))
    assert (end.outcome, end.bytes) == (TierOutcome.DONE, 0)
    again = neighbour.ends.of(neighbour.tier.put(name(1), memory, b"", within(10)))
    assert (again.outcome, again.bytes) == (TierOutcome.DONE, 0)
    read = neighbour.l1.object(*RANKS)
    assert neighbour.get(name(1), read) is TierOutcome.DONE
    assert neighbour.l1.read(read) == expected


def test_puts_of_one_object_by_two_daemons_at_once_both_end_done(daemon: TierDaemon, neighbour: TierDaemon) -> None:
    ours, theirs = daemon.l1.object(*RANKS), neighbour.l1.object(*RANKS)
    tickets = [
        each.tier.put(name(1), memory, b"", within(10)) for each, memory in ((daemon, ours), (neighbour, theirs))
    ]
    ends = [each.ends.of(ticket) for each, ticket in zip((daemon, neighbour), tickets, strict=True)]
    assert {end.outcome for end in ends} == {TierOutcome.DONE}
    read = daemon.l1.object(*RANKS)
    assert daemon.get(name(1), read) is TierOutcome.DONE
    assert daemon.l1.read(read) in (daemon.l1.read(ours), neighbour.l1.read(theirs))


def test_many_puts_and_gets_at_once_all_end_and_arrive(daemon: TierDaemon, neighbour: TierDaemon) -> None:
    written = [daemon.l1.object(PAGE + number) for number in range(40)]
    puts = [daemon.tier.put(name(number), memory, b"", within(20)) for number, memory in enumerate(written)]
    assert {end.outcome for end in daemon.ends.all(puts)} == {TierOutcome.DONE}
    read = [neighbour.l1.object(PAGE + number) for number in range(40)]
    gets = [neighbour.tier.get(name(number), memory, within(20)) for number, memory in enumerate(read)]
    assert {end.outcome for end in neighbour.ends.all(gets)} == {TierOutcome.DONE}
    assert [neighbour.l1.read(memory) for memory in read] == [daemon.l1.read(memory) for memory in written]
    assert daemon.tier.status().written_objects == 40
    assert neighbour.tier.status().hits == 40


# ---- existence ------------------------------------------------------------------------------------


def test_own_puts_are_known_at_once_and_those_of_others_after_a_probe(
    daemon: TierDaemon, neighbour: TierDaemon
) -> None:
    stored(daemon, name(1))
    assert daemon.tier.holds(NAMESPACE, 0, keys(1, 2)) == 0b01
    assert neighbour.tier.holds(NAMESPACE, 0, keys(1, 2)) == 0
    assert neighbour.probe([1, 2]) == 0b01
    assert neighbour.tier.holds(NAMESPACE, 1, keys(1)) == 0, "another group"


@pytest.mark.parametrize("length", [0, 1, 2, 7, 20])
def test_a_probe_of_a_chain_finds_its_end(daemon: TierDaemon, neighbour: TierDaemon, length: int) -> None:
    for number in range(length):
        assert daemon.put(name(number), daemon.l1.object(10)) is TierOutcome.DONE
    assert neighbour.probe(list(range(20))) == (1 << length) - 1


def test_a_probe_without_a_chain_finds_each(daemon: TierDaemon, neighbour: TierDaemon) -> None:
    for number in (1, 3, 4):
        assert daemon.put(name(number), daemon.l1.object(10)) is TierOutcome.DONE
    assert neighbour.probe([0, 1, 2, 3, 4, 5], chain=False) == 0b011010


def test_object_that_a_get_missed_is_no_longer_promised(daemon: TierDaemon, neighbour: TierDaemon) -> None:
    stored(daemon, name(1))
    assert neighbour.probe([1]) == 1
    daemon.tier.drop(NAMESPACE, 0, key(1))
    assert daemon.tier.holds(NAMESPACE, 0, key(1)) == 0
    stored(daemon, name(2))  # behind the drop
    memory = neighbour.l1.object(*RANKS)
    while neighbour.get(name(1), memory) is TierOutcome.DONE:
        pass
    assert neighbour.tier.holds(NAMESPACE, 0, key(1)) == 0


# ---- clears ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [b"", NAMESPACE[:5], NAMESPACE], ids=["all", "part", "namespace"])
def test_what_was_cleared_is_never_served_again(daemon: TierDaemon, scope: bytes) -> None:
    stored(daemon, name(1))
    assert daemon.clear(scope) is TierOutcome.DONE
    assert daemon.tier.holds(NAMESPACE, 0, key(1)) == 0
    assert daemon.probe([1]) == 0
    assert daemon.get(name(1), daemon.l1.object(*RANKS)) is TierOutcome.MISSING


def test_a_clear_leaves_other_namespaces_alone(daemon: TierDaemon) -> None:
    other = name(1, namespace=NAMESPACE + b"e" * 32)
    stored(daemon, name(1))
    stored(daemon, other)
    assert daemon.clear(NAMESPACE + b"e" * 32) is TierOutcome.DONE
    assert daemon.get(name(1), daemon.l1.object(*RANKS)) is TierOutcome.DONE
    assert daemon.get(other, daemon.l1.object(*RANKS)) is TierOutcome.MISSING


def test_a_clear_survives_a_restart(
    daemon: TierDaemon, prefix: str, make_daemon_of: MakeDaemon, store: SharedStore
) -> None:
    stored(daemon, name(1))
    assert daemon.clear() is TierOutcome.DONE
    restarted = make_daemon_of(store.url_of(prefix))
    assert restarted.probe([1]) == 0
    assert restarted.get(name(1), restarted.l1.object(*RANKS)) is TierOutcome.MISSING


def generation(daemon: TierDaemon, namespace: bytes = NAMESPACE) -> int:
    """The namespace's generation, once the tier knows it."""
    deadline = time.monotonic() + 20
    while (found := daemon.tier.generation(namespace)) is None:
        assert time.monotonic() < deadline, "the generation is not learnt"
        daemon.tier.learn_generations([namespace])
        select.select([daemon.tier.completion_fd], [], [], 0.05)
        daemon.ends.drain()
    return found


def test_generations_are_equal_in_all_daemons_until_one_of_them_clears(
    daemon: TierDaemon, make_daemon_of: MakeDaemon, store: SharedStore, prefix: str
) -> None:
    other, variant = b"m" * 32, NAMESPACE + b"e" * 32
    assert daemon.tier.generation(NAMESPACE) is None
    before = [generation(daemon, each) for each in (NAMESPACE, variant, other)]
    later = make_daemon_of(store.url_of(prefix))
    assert [generation(later, each) for each in (NAMESPACE, variant, other)] == before
    assert later.clear(NAMESPACE) is TierOutcome.DONE
    reader = make_daemon_of(store.url_of(prefix, "read_only=true"))
    for which in (later, reader):
        found = [generation(which, each) for each in (NAMESPACE, variant, other)]
        assert [now == then for now, then in zip(found, before, strict=True)] == [False, False, True]


def test_namespace_without_an_id_has_generation_0_where_nothing_may_be_written(
    daemon: TierDaemon, make_daemon_of: MakeDaemon, store: SharedStore, prefix: str
) -> None:
    reader = make_daemon_of(store.url_of(prefix, "read_only=true"))
    assert generation(reader) == 0
    assert generation(daemon) != 0


def test_clear_cancels_puts_under_way(daemon: TierDaemon) -> None:
    memories = [daemon.l1.object(8 * PAGE) for _ in range(30)]
    puts = [daemon.tier.put(name(number), memory, b"", within(20)) for number, memory in enumerate(memories)]
    assert daemon.clear() is TierOutcome.DONE
    for end in daemon.ends.all(puts):
        assert end.outcome is TierOutcome.CANCELLED
    assert daemon.probe(list(range(30)), chain=False) == 0
    for number in range(30):
        assert daemon.get(name(number), memories[number]) is TierOutcome.MISSING


def test_a_put_and_a_get_that_have_ended_when_a_clear_begins_count_no_more(daemon: TierDaemon) -> None:
    stored(daemon, name(1))
    memory = daemon.l1.object(*RANKS)
    tickets = [
        daemon.tier.get(name(1), memory, within(20)),
        daemon.tier.put(name(2), daemon.l1.object(*RANKS), b"", within(20)),
    ]
    select.select([daemon.tier.completion_fd], [], [], 10)
    time.sleep(0.2)  # nearly always both have ended, and the loop has not been there
    assert daemon.clear() is TierOutcome.DONE
    assert {end.outcome for end in daemon.ends.all(tickets)} == {TierOutcome.CANCELLED}
    assert daemon.tier.holds(NAMESPACE, 0, keys(1, 2)) == 0


def test_what_is_put_after_a_clear_is_served(daemon: TierDaemon) -> None:
    stored(daemon, name(1))
    assert daemon.clear() is TierOutcome.DONE
    expected = stored(daemon, name(1))
    memory = daemon.l1.object(*RANKS)
    assert daemon.get(name(1), memory) is TierOutcome.DONE
    assert daemon.l1.read(memory) == expected


# ---- tickets --------------------------------------------------------------------------------------


def test_a_cancelled_ticket_ends_once(daemon: TierDaemon) -> None:
    memories = [daemon.l1.object(64 * PAGE) for _ in range(10)]
    tickets = [daemon.tier.put(name(number), memory, b"", within(20)) for number, memory in enumerate(memories)]
    for ticket in tickets:
        daemon.tier.cancel(ticket)
    assert {end.outcome for end in daemon.ends.all(tickets)} <= {TierOutcome.CANCELLED, TierOutcome.DONE}
    daemon.tier.cancel(tickets[0])
    daemon.tier.cancel(12345)
    stored(daemon, name(100))


def test_a_dropped_object_is_missing_for_all(daemon: TierDaemon, neighbour: TierDaemon) -> None:
    stored(daemon, name(1))
    daemon.tier.drop(NAMESPACE, 0, key(1))
    assert daemon.tier.holds(NAMESPACE, 0, key(1)) == 0
    while daemon.probe([1]):  # it was ahead of the drop, and is believed for a minute
        daemon.tier.drop(NAMESPACE, 0, key(1))
    assert neighbour.get(name(1), neighbour.l1.object(*RANKS)) is TierOutcome.MISSING


def test_a_read_only_tier_puts_nothing(
    daemon: TierDaemon, store: SharedStore, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    reader = make_daemon_of(store.url_of(prefix, "read_only=true"))
    assert reader.put(name(1), reader.l1.object(*RANKS)) is TierOutcome.UNAVAILABLE
    stored(daemon, name(1))
    assert reader.get(name(1), reader.l1.object(*RANKS)) is TierOutcome.DONE


def test_all_that_is_open_ends_with_the_tier(daemon: TierDaemon) -> None:
    memories = [daemon.l1.object(64 * PAGE) for _ in range(10)]
    tickets = [daemon.tier.put(name(number), memory, b"", within(20)) for number, memory in enumerate(memories)]
    daemon.tier.close(within(10))
    ends = {end.ticket for end in daemon.tier.drain()}
    assert ends == set(tickets)
    assert daemon.tier.state == "closed"
    ticket = daemon.tier.get(name(1), memories[0], within(10))
    assert [(end.ticket, end.outcome) for end in daemon.tier.drain()] == [(ticket, TierOutcome.UNAVAILABLE)]
