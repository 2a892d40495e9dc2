"""Spill: what is written behind from L1 to L2, in which order, and what is left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import requests
from support.daemon import wait_until
from support.memory import two_groups
from support.plain_tier import PlainTier
from support.server import L1_BYTES, PAGE_BYTES, Running, running_server
from support.worker import Worker, make_keys

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices
from kvserver.l2 import TierEnd, TierOutcome
from kvserver.l2.base import State
from kvserver.protocol import Clear, Cleared, Durability, ObjectGroup
from kvserver.protocol.status import TierStatus
from kvserver.server import Audit
from kvserver.tiering import spill


class Spilling(NamedTuple):
    running: Running
    tier: PlainTier
    worker: Worker

    def store(self, keys: list[bytes]) -> None:
        for first in range(0, len(keys), 15):  # the worker has blocks for so many
            part = keys[first : first + 15]
            self.worker.store(part, self.worker.blocks_for(len(part)))

    def status(self) -> TierStatus:
        (status,) = self.running.call(self.running.parts.storage.spill.status)
        return status

    def dropped(self) -> dict[str, int]:
        return {reason: count for reason, count in self.status().dropped.items() if count}

    def keys(self) -> list[bytes]:
        """Of the objects in the tier, in the order of their last puts."""
        puts = [name for kind, name in self.tier.began if kind == "put"]
        return [name.key for name in sorted(self.tier.objects, key=lambda name: len(puts) - puts[::-1].index(name))]

    def oldest_first(self) -> list[bytes]:
        return [name.key for name in self.tier.objects]

    def written(self, count: int) -> None:
        wait_until(lambda: len(self.tier.objects) >= count and not self.status().queue_objects)

    def audit(self) -> Audit:
        return self.running.audited()


Make = Callable[..., contextlib.AbstractContextManager[Spilling]]


@contextlib.contextmanager
def spilling(
    parameters: str = "", l1_bytes: int = 8 * L1_BYTES, state: State = "ready", most_small: int = 0, **worker: Any
) -> Iterator[Spilling]:
    """At most 16 puts at a time, or `most_small`."""
    region = HostRegion(l1_bytes)
    tier = PlainTier(region, PAGE_BYTES)
    tier.state = state
    devices = Devices(CpuDevice(region, PAGE_BYTES, 1))
    with (
        pytest.MonkeyPatch.context() as patch,
        running_server(devices, l1_bytes, tiers=[tier.configured(parameters)]) as running,
    ):
        patch.setattr(spill, "MOST_SMALL_PUTS", most_small)
        engine = Worker(running.endpoint, **worker)
        try:
            yield Spilling(running, tier, engine)
        finally:
            engine.close()


def test_stored_chunks_are_written_whole_and_parents_first() -> None:
    with spilling() as s:
        keys = make_keys(5)
        blocks = s.worker.blocks_for(5)
        content = s.worker.memory.blocks(blocks)
        s.worker.store(keys, blocks)
        s.written(5)
        assert s.keys() == keys
        assert [s.tier.parents[name] for name in s.tier.objects] == [b"", *keys[:4]]
        per_chunk = len(blocks) // 5
        for place, (_, raw) in enumerate(s.tier.objects.values()):
            expected = b"".join(content[place * per_chunk : (place + 1) * per_chunk])
            assert sorted(raw) == sorted(expected)
            assert len(raw) == len(expected)
        assert s.audit() is Audit.BALANCED


def test_chunk_of_two_ranks_is_written_as_one_object_once_both_stored_it() -> None:
    with spilling(world_size=2) as s:
        other = Worker(
            s.running.endpoint, rank=1, world_size=2, instance_id=s.worker.instance_id, incarnation=s.worker.incarnation
        )
        keys = make_keys(2)
        s.store(keys)
        assert not s.tier.began
        other.store(keys, other.blocks_for(2))
        s.written(2)
        one, two = (sum(map(len, each.memory.blocks(each.blocks_for(2)))) for each in (s.worker, other))
        assert sum(len(raw) for _, raw in s.tier.objects.values()) == one + two
        other.close()


def test_a_private_engine_writes_nothing() -> None:
    with spilling(connect_now=False) as s:
        s.worker.attach()
        s.worker.register(private="scales of this process")
        s.store(make_keys(3))
        with Worker(s.running.endpoint) as other:
            keys = make_keys(1)
            other.store(keys, other.blocks_for(1))
            s.written(1)
        assert s.keys() == keys, "the queue keeps its order"
        assert s.dropped() == {}


@pytest.mark.parametrize(
    ("durability", "shared", "written"),
    [
        (Durability.PROCESS, False, False),
        (Durability.PROCESS, True, False),
        (Durability.MACHINE, False, True),
        (Durability.MACHINE, True, False),
        (Durability.ANYWHERE, False, True),
        (Durability.ANYWHERE, True, True),
    ],
)
def test_only_those_tiers_get_an_object_whose_readers_can_find_it(
    durability: Durability, shared: bool, written: bool
) -> None:
    with spilling() as s:
        s.tier.shared = shared
        s.worker.durability = durability
        keys = make_keys(3)
        s.store(keys)
        assert s.worker.lookup(keys) == 3
        s.worker.load(keys, s.worker.blocks_for(3, first=30))
        s.worker.durability = Durability.ANYWHERE
        last = make_keys(1)
        s.store(last)
        s.written(4 if written else 1)
        assert s.keys() == (keys + last if written else last), "the queue keeps its order"
        assert s.dropped() == {}


def test_an_engine_that_must_stay_on_its_machine_writes_to_no_tier_of_many() -> None:
    with spilling(connect_now=False) as s:
        s.tier.shared = True
        s.worker.attach()
        s.worker.register(machine_only="samples of its files name them")
        s.store(make_keys(3))
        with Worker(s.running.endpoint) as other:
            keys = make_keys(1)
            other.store(keys, other.blocks_for(1))
            s.written(1)
        assert s.keys() == keys


@pytest.mark.parametrize("most_small", [0, spill.MOST_SMALL_PUTS])
def test_a_tier_that_is_stopped_holds_up_neither_stores_nor_evictions(most_small: int) -> None:
    with spilling(l1_bytes=L1_BYTES, most_small=most_small) as s:
        s.tier.stopped = True
        first = make_keys(2)
        s.store(first)
        wait_until(lambda: len(s.tier.waiting) == 2)
        for _ in range(40):  # several times L1
            s.store(make_keys(8))
        assert s.worker.lookup(first) == 2, "they are pinned while they are written"
        assert len(s.tier.waiting) <= 16
        s.tier.release()
        wait_until(lambda: not s.status().queue_objects)
        status = s.status()
        assert status.dropped["left_l1"] > 0
        assert len(s.tier.objects) + sum(status.dropped.values()) == 2 + 40 * 8
        assert s.audit() is Audit.BALANCED


@pytest.mark.parametrize(("shared", "at_once"), [(False, 24), (True, 16)])
def test_more_small_puts_run_at_a_time_in_a_tier_that_is_not_shared(shared: bool, at_once: int) -> None:
    with spilling(most_small=24) as s:
        s.tier.shared, s.tier.stopped = shared, True
        s.store(make_keys(30))
        wait_until(lambda: len(s.tier.waiting) == at_once)
        s.status()  # the server's turn that put them has ended
        assert len(s.tier.waiting) == at_once
        s.tier.release()
        s.written(30)
        assert len(s.tier.objects) == 30


def test_objects_behind_a_dropped_object_are_dropped() -> None:
    with spilling() as s:
        s.tier.stopped = True
        s.store(make_keys(15))
        keys = make_keys(4)
        s.store(keys)
        wait_until(lambda: len(s.tier.waiting) == 16)
        s.tier.fail[keys[0]] = TierOutcome.FULL
        s.tier.release()
        wait_until(lambda: not s.status().queue_objects)
        assert s.dropped() == {"full": 1, "parent": 3}
        assert len(s.tier.objects) == 15


def test_a_later_load_offers_again_what_was_dropped() -> None:
    with spilling() as s:
        keys = make_keys(3)
        s.tier.fail = dict.fromkeys(keys, TierOutcome.UNAVAILABLE)
        s.store(keys)
        wait_until(lambda: sum(s.dropped().values()) == 3)
        assert not s.tier.objects
        assert s.worker.lookup(keys) == 3
        s.worker.load(keys, s.worker.blocks_for(3, first=30))
        s.written(3)
        assert s.keys() == keys


def test_a_load_makes_objects_of_the_tier_young() -> None:
    with spilling() as s:
        old, new = make_keys(2), make_keys(2)
        for keys in (old, new):
            s.store(keys)
        s.written(4)
        s.worker.lookup(old)
        s.worker.load(old, s.worker.blocks_for(2, first=30))
        wait_until(lambda: s.oldest_first() == [*new, *reversed(old)])
        assert len(s.tier.began) == 4, "nothing is written twice"


def test_a_prompt_that_is_only_looked_up_stays_young_in_the_tier() -> None:
    """The engine has it itself, or L1 has it: nothing is loaded."""
    with spilling() as s:
        old, new = make_keys(4), make_keys(2)
        for keys in (old, new):
            s.store(keys)
        s.written(6)
        assert s.worker.lookup([*old[:3], *make_keys(1)]) == 3
        wait_until(lambda: s.oldest_first() == [old[3], *new, *reversed(old[:3])], what="parents are the youngest")
        assert s.worker.lookup(new, durability=Durability.PROCESS) == 2
        assert s.worker.lookup(old) == 4
        wait_until(lambda: s.oldest_first() == [*new, *reversed(old)])


def test_a_very_long_prompt_is_made_young_in_slices_from_its_end() -> None:
    with spilling() as s:
        ages, tiers = s.running.parts.storage.ages, s.running.parts.storage.tiers
        keys = make_keys(1000)
        touched: list[bytes] = []
        s.tier.touch = lambda namespace, group, part: touched.append(part)  # type: ignore[method-assign]
        instance = next(iter(s.running.parts.instances.by_id.values()))

        def one_turn() -> bool:
            return ages.step()

        def begin() -> None:
            ages.found(instance, b"n" * 32, b"".join(keys), 1000, Durability.ANYWHERE)
            ages.tick()
            assert one_turn()

        assert tiers.all
        s.running.call(begin)
        wait_until(lambda: sum(map(len, touched)) == 1000 * 32)
        assert b"".join(reversed(touched)) == b"".join(keys)
        assert max(map(len, touched)) <= 256 * 32


def test_only_what_was_loaded_is_written_with_admit_reused() -> None:
    with spilling("&admit=reused") as s:
        used, unused = make_keys(2), make_keys(2)
        s.store(used)
        s.store(unused)
        s.worker.lookup(used)
        s.worker.load(used, s.worker.blocks_for(2, first=30))
        s.written(2)
        assert s.keys() == used


def test_what_is_loaded_while_stores_are_off_is_not_written() -> None:
    with spilling("&admit=reused") as s:
        keys = make_keys(2)
        s.store(keys)
        s.running.call(lambda: s.running.parts.serving.switch("stores-off"))
        s.worker.lookup(keys)
        s.worker.load(keys, s.worker.blocks_for(2, first=30))
        s.running.call(lambda: s.running.parts.serving.switch("on"))
        s.worker.load(keys[:1], s.worker.blocks_for(1, first=30))
        s.written(1)
        assert s.keys() == keys[:1]


@pytest.mark.parametrize("state", ["opening", "read_only"])
def test_a_tier_that_is_configured_read_only_is_offered_nothing_and_drops_nothing(state: State) -> None:
    """Each store counted as dropped, as if the tier had failed."""
    with spilling("&read_only=true", state=state) as s:
        s.store(make_keys(3))
        status = s.status()
        assert (status.read_only, status.queue_objects, s.dropped()) == (True, 0, {})
        assert not s.tier.began


@pytest.mark.parametrize("state", ["opening", "unavailable"])
def test_what_is_stored_before_a_tier_can_be_written_to_for_the_first_time_waits_for_it(state: State) -> None:
    with spilling(state=state) as s:
        keys = make_keys(20)
        s.store(keys)
        wait_until(lambda: s.status().queue_objects == len(keys))
        s.tier.state = "ready"
        s.written(len(keys))
        assert s.keys() == keys
        assert s.dropped() == {}
        s.tier.state = "unavailable"
        s.store(make_keys(3))
        wait_until(lambda: s.dropped() == {"not_writable": 3})


@pytest.mark.parametrize("state", ["closed", "read_only"])
def test_chunks_that_wait_are_dropped_when_their_tier_opens_without_writing(state: State) -> None:
    with spilling(state="opening") as s:
        s.store(make_keys(20))
        s.tier.state = state
        wait_until(lambda: s.dropped() == {"not_writable": 20})
        assert not s.tier.began


def test_rules_of_a_tier_hold_while_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "MOST_QUEUED", 10)
    with spilling("&admit=reused", state="opening") as s:
        s.store(make_keys(3))
        assert s.status().queue_objects == 0
    with spilling(state="opening") as s:
        keys = make_keys(15)
        s.store(keys)
        wait_until(lambda: s.dropped() == {"queue_full": 5})
        s.worker.ask(Clear(), Cleared)
        s.tier.state = "ready"
        wait_until(lambda: not s.status().queue_objects)
        assert not s.tier.objects
        assert s.audit() is Audit.BALANCED


def test_a_write_limit_is_kept() -> None:
    with spilling() as probe:
        keys = make_keys(1)
        probe.store(keys)
        probe.written(1)
        size = sum(len(raw) for _, raw in probe.tier.objects.values())
    with spilling(f"&write_limit={2 * size}") as s:
        s.store(make_keys(10))
        wait_until(lambda: len(s.tier.objects) >= 2)
        assert len(s.tier.objects) <= 4, "a second's worth, and one that overdraws it"
        s.written(10)


def test_clear_empties_the_tier_and_nothing_queued_enters_it_afterwards() -> None:
    with spilling() as s:
        s.store(make_keys(2))
        s.written(2)
        s.tier.stopped = True
        s.store(make_keys(30))
        wait_until(lambda: len(s.tier.waiting) == 16)
        s.worker.ask(Clear(), Cleared)
        s.tier.release()
        wait_until(lambda: not s.status().queue_objects)
        assert not s.tier.objects
        assert s.tier.cleared == [b""]
        assert s.audit() is Audit.BALANCED


def test_chunks_that_are_loaded_while_they_are_cleared_are_not_written() -> None:
    """Its bytes stay in L1 until the load has ended."""
    with spilling() as s:
        s.tier.stopped = True
        keys = make_keys(20)
        s.store(keys)
        wait_until(lambda: len(s.tier.waiting) == 16)
        cache = s.running.parts.cache
        chunks = s.running.call(lambda: list(cache.index))
        s.running.call(lambda: cache.pin_chunks(chunks))
        s.worker.ask(Clear(), Cleared)
        s.tier.release()
        wait_until(lambda: not s.status().queue_objects)
        s.running.call(lambda: cache.unpin_chunks(chunks))
        assert not s.tier.objects
        assert s.dropped() == {"cancelled": 16, "left_l1": 4}
        assert s.audit() is Audit.BALANCED


def test_a_window_that_no_boundary_needs_any_more_is_not_written() -> None:
    full, window = ObjectGroup("full", (0,), 16), ObjectGroup("window", (1,), 16, tokens=31)
    with spilling(geometry=two_groups(), groups=(full, window)) as s:
        s.tier.stopped = True
        for _ in range(4):
            s.worker.store(make_keys(4), range(1, 17))
        wait_until(lambda: len(s.tier.waiting) == 16)
        keys = make_keys(2)
        s.worker.store(keys, range(1, 9))
        s.worker.store(keys[:1], range(1, 3), group=1)
        s.worker.store(keys[1:], range(1, 3), group=1, dropped=keys[0])
        s.tier.release()
        wait_until(lambda: not s.status().queue_objects)
        assert [name.key for name in s.tier.objects if name.group == 1] == keys[1:]
        assert s.dropped() == {"left_l1": 1}


def test_a_queue_that_is_full_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "MOST_QUEUED", 20)
    with spilling() as s:
        s.tier.stopped = True
        s.store(make_keys(30))
        wait_until(lambda: len(s.tier.waiting) == 16)
        assert s.dropped() == {"queue_full": 10}
        s.tier.release()
        s.written(20)
        assert len(s.tier.objects) == 20


def test_chunk_that_waits_is_not_queued_again() -> None:
    with spilling() as s:
        s.tier.stopped = True
        keys = make_keys(15)
        s.store(keys)
        wait_until(lambda: len(s.tier.waiting) == 15)
        assert s.worker.lookup(keys) == 15
        s.worker.load(keys[:5], s.worker.blocks_for(5, first=20))
        last = make_keys(1)
        s.store(last)
        s.tier.release()
        s.written(16)
        assert len(s.tier.began) == 16


def test_a_clear_that_a_tier_cannot_make_durable_is_an_error_that_names_the_tier() -> None:
    with spilling() as s:
        s.store(make_keys(2))
        s.tier.clear_ends = TierEnd(0, TierOutcome.UNAVAILABLE, what="the disk is full")
        error = s.worker.error_of(Clear())
        assert (error.code, error.message) == ("storage", "plain: unavailable the disk is full")
        page = requests.post(f"http://127.0.0.1:{s.running.pages.port}/cache/clear", timeout=10)
        assert page.status_code == 500
        assert "the disk is full" in page.text
        s.tier.clear_ends = TierEnd(0, TierOutcome.DONE)
        page = requests.post(f"http://127.0.0.1:{s.running.pages.port}/cache/clear", timeout=10)
        assert (page.status_code, page.json()["chunks"]) == (200, 0)


def test_drain_writes_the_queued_objects() -> None:
    with spilling() as s:
        s.tier.stopped = True
        s.store(make_keys(30))
        wait_until(lambda: len(s.tier.waiting) == 16)
        s.tier.release()
        s.running.call(lambda: s.running.parts.upkeep.drain(5))
        assert len(s.tier.objects) == 30
        assert s.tier.closed


@pytest.mark.parametrize("required", [True, False])
def test_a_required_tier_that_failed_makes_the_daemon_not_ready(required: bool) -> None:
    with spilling("&required=true" if required else "") as s:
        assert s.running.server.failure == ""
        s.tier.state, s.tier.failure = "closed", "the disk is broken"
        assert ("the disk is broken" in s.running.server.failure) is required
