"""Fills: what L1 lacks and L2 has is read before the engine is answered, within its time and a bound of memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from support.daemon import wait_until
from support.memory import two_groups
from support.plain_tier import PlainTier
from support.server import L1_BYTES, PAGE_BYTES, Running, running_server
from support.worker import Worker, make_keys

from kvserver._native import CpuDevice, HostRegion
from kvserver.cache import Cache
from kvserver.copy import Devices
from kvserver.l2 import ObjectName, TierOutcome
from kvserver.protocol import AwaitFill, Clear, Cleared, Durability, LookupReply, ObjectGroup
from kvserver.protocol.status import RequestsStatus
from kvserver.server import Audit, ConfiguredTier, fills
from kvserver.server.fills import memory_bound


class Filling(NamedTuple):
    running: Running
    tier: PlainTier
    worker: Worker

    def store(self, keys: list[bytes], **changes: Any) -> list[bytes]:
        """Store the chunks, 15 at most; returns the bytes of their blocks."""
        blocks = self.worker.blocks_for(len(keys))
        content = self.worker.memory.blocks(blocks)
        self.worker.store(keys, blocks, **changes)
        return content

    def written(self, keys: list[bytes]) -> None:
        wait_until(lambda: {name.key for name in self.tier.objects} >= set(keys))
        wait_until(lambda: not self.running.server.call(lambda: self.running.parts.spill.puts).result(10))

    def forget_l1(self) -> None:
        """As a restart of the daemon would."""
        cache = self.running.parts.cache
        self.running.server.call(cache.clear_namespaces).result(10)

    def lookup(self, keys: list[bytes], request_id: str = "r") -> LookupReply:
        return self.worker.ask(self.worker.lookup_message(keys, request_id), LookupReply)

    def begin(self, keys: list[bytes], request_id: str = "r", wait_ms: int = 5000) -> int:
        return self.worker.send(AwaitFill(self.worker.lookup_message(keys, request_id), wait_ms))

    def reply(self, number: int, seconds: float = 10.0) -> LookupReply:
        reply = self.worker.reply_to(number, seconds)
        assert isinstance(reply, LookupReply), reply
        return reply

    def fill(self, keys: list[bytes], request_id: str = "r", wait_ms: int = 5000) -> int:
        return self.reply(self.begin(keys, request_id, wait_ms)).hit_chunks

    def loaded(self, keys: list[bytes], request_id: str = "r") -> list[bytes]:
        target = self.worker.blocks_for(len(keys), first=1)
        self.worker.memory.fill()
        self.worker.load(keys, target, request_id=request_id)
        return self.worker.memory.blocks(target)

    def audit(self) -> None:
        wait_until(lambda: not self.running.server.call(lambda: self.running.parts.fills.open).result(10))
        assert self.running.server.call(self.running.parts.upkeep.audit_now).result(10) is Audit.BALANCED

    def read_within(self, seconds: float, keys: list[bytes], request_id: str = "slow") -> None:
        """A fill whose reads take that long: from now on it is known how slow the tier is."""
        self.tier.stopped = True
        number = self.begin(keys, request_id)
        wait_until(lambda: len(self.tier.waiting) == len(keys))
        time.sleep(seconds)
        self.tier.release()
        assert self.reply(number).hit_chunks == len(keys)

    def gets(self) -> list[ObjectName]:
        return [name for kind, name in self.tier.began if kind == "get"]

    def bytes(self) -> int:
        return self.running.server.call(lambda: self.running.parts.fills.used_bytes).result(10)


@contextlib.contextmanager
def filling(l1_bytes: int = 8 * L1_BYTES, more: list[str] | None = None, **worker: Any) -> Iterator[Filling]:
    region = HostRegion(l1_bytes)
    tiers = [PlainTier(region, PAGE_BYTES, name) for name in ["plain", *(more or [])]]
    configured: list[ConfiguredTier] = [tier.configured() for tier in tiers]
    with running_server(Devices(CpuDevice(region, PAGE_BYTES, 1)), l1_bytes, tiers=configured) as running:
        engine = Worker(running.endpoint, **worker)
        try:
            yield Filling(running, tiers[0], engine)
        finally:
            engine.close()


def requests_of(f: Filling) -> RequestsStatus:
    (instance,) = f.running.server.call(f.running.parts.instances_status).result(10)
    return instance.requests


def test_what_left_l1_comes_back_byte_for_byte() -> None:
    with filling() as f:
        keys = make_keys(10)
        content = f.store(keys)
        f.written(keys)
        f.forget_l1()
        assert f.lookup(keys) == LookupReply(0, fill_chunks=10)
        assert f.fill(keys) == 10
        assert f.loaded(keys) == content
        assert f.lookup(keys) == LookupReply(10, 10)
        assert [name.key for name in f.gets()] == keys
        f.worker.end_request()
        f.audit()


def test_only_what_l1_lacks_is_read() -> None:
    with filling() as f:
        keys = make_keys(6)
        content = f.store(keys)
        f.written(keys)
        f.forget_l1()
        f.tier.objects, objects = {}, f.tier.objects
        f.worker.store(keys[:2], f.worker.blocks_for(2))
        f.tier.objects = objects
        assert f.lookup(keys) == LookupReply(2, 2, fill_chunks=6)
        assert f.fill(keys) == 6
        assert {name.key for name in f.gets()} == set(keys[2:])
        assert f.loaded(keys) == content


def test_a_hit_ends_at_a_hole() -> None:
    with filling() as f:
        keys = make_keys(6)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        hole = next(name for name in f.tier.objects if name.key == keys[3])
        del f.tier.objects[hole]
        assert f.lookup(keys).fill_chunks == 3
        assert f.fill(keys) == 3
        assert {name.key for name in f.gets()} == set(keys[:3])


@pytest.mark.parametrize("outcome", [TierOutcome.CORRUPT, TierOutcome.MISSING, TierOutcome.TIMEOUT])
def test_an_object_whose_read_fails_is_never_found(outcome: TierOutcome) -> None:
    with filling() as f:
        keys = make_keys(6)
        content = f.store(keys)
        f.written(keys)
        f.forget_l1()
        f.tier.fail = {keys[4]: outcome}
        assert f.fill(keys) == 4
        assert f.lookup(keys).hit_chunks == 4
        per_chunk = len(content) // 6
        assert f.loaded(keys[:4]) == content[: 4 * per_chunk]
        f.audit()


def test_the_next_tier_is_read_where_the_first_one_fails() -> None:
    with filling(more=["second"]) as f:
        keys = make_keys(6)
        content = f.store(keys)
        f.written(keys)
        second = f.running.parts.upkeep.tiers.all[1].tier
        assert isinstance(second, PlainTier)
        wait_until(lambda: len(second.objects) == 6)
        f.forget_l1()
        f.tier.fail = {keys[2]: TierOutcome.CORRUPT}
        assert f.fill(keys) == 6
        assert [name.key for kind, name in second.began if kind == "get"] == [keys[2]]
        assert f.loaded(keys) == content


def test_another_namespace_finds_nothing() -> None:
    with filling() as f:
        keys = make_keys(3)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        other = Worker(f.running.endpoint, layout="other")
        assert other.ask(other.lookup_message(keys), LookupReply) == LookupReply(0)
        assert f.lookup(keys).fill_chunks == 3
        other.close()


def test_two_ranks_are_filled_together() -> None:
    with filling(world_size=2) as f:
        names = {"instance_id": f.worker.instance_id, "incarnation": f.worker.incarnation}
        other = Worker(f.running.endpoint, rank=1, world_size=2, **names)
        keys = make_keys(4)
        f.store(keys)
        blocks = other.blocks_for(4)
        content = other.memory.blocks(blocks)
        other.store(keys, blocks)
        f.written(keys)
        f.forget_l1()
        assert f.fill(keys) == 4
        other.memory.fill()
        other.load(keys, blocks)
        assert other.memory.blocks(blocks) == content
        other.close()
        f.worker.end_request()


def test_an_answer_is_due_although_a_read_hangs_and_its_pages_stay_until_it_ends() -> None:
    with filling() as f:
        keys = make_keys(4)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        f.tier.hangs = True
        f.tier.stopped = True
        began = time.monotonic()
        assert f.fill(keys, wait_ms=300) == 0
        assert 0.25 <= time.monotonic() - began < 5
        used = f.running.server.call(lambda: f.running.parts.cache.pool.used_pages).result(10)
        assert used > 0, "the reads may still write"
        f.tier.hangs = False
        f.tier.release()
        f.audit()


def test_two_requests_with_one_prompt_wait_for_the_same_reads() -> None:
    with filling() as f:
        keys = make_keys(4)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        f.tier.stopped = True
        one = f.begin(keys, "one")
        wait_until(lambda: len(f.tier.waiting) == 4)
        two = f.begin(keys, "two")
        wait_until(lambda: f.running.server.call(lambda: f.running.parts.fills.open).result(10) >= 2)
        f.tier.release()
        assert (f.reply(one).hit_chunks, f.reply(two).hit_chunks) == (4, 4)
        assert len(f.gets()) == 4
        for name in ("one", "two"):
            f.worker.end_request(name)
        f.audit()


def test_the_end_of_a_request_leaves_another_with_its_prompt_the_whole_hit() -> None:
    with filling() as f:
        keys = make_keys(4)
        content = f.store(keys)
        f.written(keys)
        f.forget_l1()
        f.tier.stopped = True
        one = f.begin(keys, "one")
        wait_until(lambda: len(f.tier.waiting) == 4)
        two = f.begin(keys, "two")
        wait_until(lambda: f.running.server.call(lambda: f.running.parts.fills.open).result(10) >= 3)
        f.worker.end_request("one")
        assert f.reply(one).hit_chunks == 0
        f.tier.release()
        assert f.reply(two).hit_chunks == 4
        assert len(f.gets()) == 8
        assert f.loaded(keys, "two") == content
        f.worker.end_request("two")
        f.audit()


def test_a_clear_meanwhile_ends_the_fill_with_nothing() -> None:
    with filling() as f:
        keys = make_keys(4)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        f.tier.stopped = True
        number = f.begin(keys)
        wait_until(lambda: len(f.tier.waiting) == 4)
        f.worker.ask(Clear(), Cleared)
        assert f.reply(number).hit_chunks == 0
        f.tier.release()
        assert f.lookup(keys) == LookupReply(0)
        f.audit()


def test_the_end_of_its_request_or_engine_ends_a_fill() -> None:
    with filling() as f:
        keys = make_keys(4)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        f.tier.stopped = True
        number = f.begin(keys)
        wait_until(lambda: len(f.tier.waiting) == 4)
        f.worker.end_request()
        f.reply(number)
        wait_until(lambda: not f.tier.waiting)
        number = f.begin(keys, "second", wait_ms=10_000)
        wait_until(lambda: len(f.tier.waiting) == 4)
        began = time.monotonic()
        f.worker.hang_up()
        wait_until(lambda: not f.tier.waiting, 20)
        assert time.monotonic() - began < 8, "not only at its limit"
        f.tier.release()
        f.audit()


def test_fills_beyond_the_bound_wait_for_their_turn() -> None:
    with filling(l1_bytes=L1_BYTES) as f:
        bound = memory_bound(L1_BYTES)
        keys = [make_keys(10, seed=number) for number in range(4)]
        for each in keys:
            f.store(each)
            f.written(each)
        size = sum(len(raw) for _, raw in f.tier.objects.values()) // 4
        fitting = bound // size
        assert 1 <= fitting < 4, "the test needs fills of which some but not all fit"
        f.forget_l1()
        numbers = [f.begin(each, f"request-{place}") for place, each in enumerate(keys)]
        for place in range(fitting):
            assert f.reply(numbers[place]).hit_chunks == 10
        assert 0 < f.bytes() <= bound
        assert {name.key for name in f.gets()} == {key for each in keys[:fitting] for key in each}
        for place in range(4):
            assert place < fitting or f.reply(numbers[place]).hit_chunks == 10
            if place % 2:
                f.worker.end_request(f"request-{place}")
            else:
                f.loaded(keys[place], f"request-{place}")
        wait_until(lambda: f.bytes() == 0)
        f.audit()


def test_a_fill_that_never_fits_is_cut() -> None:
    with filling(l1_bytes=L1_BYTES) as f:
        keys: list[bytes] = []
        for _ in range(4):
            part = make_keys(10)
            f.store(part)
            f.written(part)
            keys += part
        f.forget_l1()
        wait_until(lambda: not f.running.server.call(lambda: f.running.parts.cache.pool.used_pages).result(10))
        assert f.lookup(keys).fill_chunks == 40
        found = f.fill(keys)
        assert 0 < found < 40
        assert f.bytes() <= memory_bound(L1_BYTES)


def test_an_engine_that_shares_with_no_other_reads_nothing() -> None:
    with filling(connect_now=False) as f:
        f.worker.attach()
        f.worker.register(private="for a reason")
        keys = make_keys(2)
        f.store(keys)
        assert f.fill(keys) == 2
        assert not f.tier.began


def test_what_came_from_l2_is_a_source_of_its_own() -> None:
    with filling() as f:
        keys = make_keys(4)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        assert f.fill(keys) == 4
        f.loaded(keys)
        tokens = 4 * 64
        f.worker.end_request(prompt_tokens=tokens + 10, loaded_tokens=tokens, loads=1)
        wait_until(lambda: requests_of(f).ended_requests)
        requests = requests_of(f)
        assert requests.prompt_tokens == {"l0": 0, "l1": 0, "l2": tokens, "computed": 10}
        assert (requests.fills, requests.filled_tokens) == (1, tokens)


def test_the_reply_counts_the_chunks_of_each_tier() -> None:
    """Those that a request's own fill read are of L2; what L1 has by then, of L1."""
    with filling() as f:
        keys = make_keys(6)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        assert f.reply(f.begin(keys[:2], "first")) == LookupReply(2, 2, l2_chunks=2)
        assert f.reply(f.begin(keys, "second")) == LookupReply(6, 6, l2_chunks=4)
        assert f.lookup(keys, "third") == LookupReply(6, 6)
        assert f.reply(f.begin(keys, "fourth")) == LookupReply(6, 6)


def test_an_engine_states_what_it_loaded_from_l2() -> None:
    """It knows better: of what was read for it, it had two chunks itself."""
    with filling() as f:
        keys = make_keys(4)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        assert f.fill(keys) == 4
        f.worker.end_request(prompt_tokens=266, local_tokens=128, loaded_tokens=128, l2_tokens=64, loads=1)
        wait_until(lambda: requests_of(f).ended_requests)
        assert requests_of(f).prompt_tokens == {"l0": 128, "l1": 64, "l2": 64, "computed": 10}


def test_an_engine_cannot_state_more_than_it_loaded() -> None:
    with filling() as f:
        f.store(make_keys(1))
        f.worker.end_request(prompt_tokens=100, loaded_tokens=64, l2_tokens=90, loads=1)
        wait_until(lambda: requests_of(f).ended_requests)
        assert requests_of(f).prompt_tokens == {"l0": 0, "l1": 0, "l2": 64, "computed": 36}


def test_what_another_daemon_wrote_to_a_shared_tier_is_found_at_the_first_lookup() -> None:
    with filling() as f:
        keys = make_keys(6)
        content = f.store(keys)
        f.written(keys)
        f.forget_l1()
        f.tier.shared, f.tier.known = True, set()
        assert f.lookup(keys).fill_chunks == 6, "what the tier has is not known"
        assert not f.gets()
        assert f.fill(keys) == 6
        assert f.loaded(keys) == content
        assert [kind for kind, _ in f.tier.began if kind == "probe"] == ["probe"]
        f.worker.end_request()
        f.audit()


def test_a_shared_tier_without_the_prompt_costs_one_probe() -> None:
    with filling() as f:
        f.tier.shared, f.tier.known = True, set()
        keys = make_keys(6)
        assert f.fill(keys) == 0
        assert [kind for kind, _ in f.tier.began] == ["probe"]
        assert requests_of(f).fills == 0
        f.audit()


def test_a_probe_that_hangs_ends_with_the_fills_time() -> None:
    with filling() as f:
        f.tier.shared, f.tier.known, f.tier.stopped, f.tier.hangs = True, set(), True, True
        keys = make_keys(6)
        began = time.monotonic()
        assert f.fill(keys, wait_ms=300) == 0
        assert 0.25 <= time.monotonic() - began < 5
        other = make_keys(2)
        f.store(other)
        assert f.lookup(other).hit_chunks == 2
        f.tier.hangs = False
        f.tier.release()
        f.audit()


def test_a_tier_that_failed_is_not_asked() -> None:
    with filling() as f:
        f.tier.shared, f.tier.known = True, set()
        f.tier.state, f.tier.failure = "unavailable", "it does not answer"
        keys = make_keys(2)
        assert f.lookup(keys).fill_chunks == 0
        assert f.fill(keys) == 0
        assert not f.tier.began


# ---- who may read what --------------------------------------------------------------------------


def test_what_only_one_start_of_an_engine_can_use_is_not_looked_for() -> None:
    with filling() as f:
        keys = make_keys(3)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        f.worker.durability = Durability.PROCESS
        f.tier.shared = True
        assert f.lookup(keys) == LookupReply(0)
        assert f.fill(keys) == 0
        f.worker.durability = Durability.MACHINE
        assert f.lookup(keys) == LookupReply(0), "machines share this tier"
        assert f.fill(keys) == 0
        assert {kind for kind, _ in f.tier.began} == {"put"}
        f.tier.shared = False
        assert f.fill(keys) == 3


def test_an_engine_that_must_stay_on_its_machine_reads_from_no_tier_of_many() -> None:
    with filling(connect_now=False) as f:
        f.worker.attach()
        f.worker.register(machine_only="samples of its files name them")
        keys = make_keys(3)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        f.tier.shared = True
        assert f.fill(keys) == 0
        assert {kind for kind, _ in f.tier.began} == {"put"}
        f.tier.shared = False
        assert f.fill(keys) == 3
        (status,) = f.running.server.call(f.running.parts.instances_status).result(10)
        assert status.machine_only == "samples of its files name them"


# ---- reading or computing -----------------------------------------------------------------------


def slow_and_forgotten(f: Filling, seconds: float = 0.3) -> list[bytes]:
    """Chunks in a tier whose reads are known to take that long."""
    keys = make_keys(6)
    f.store(keys)
    f.written(keys)
    f.forget_l1()
    f.read_within(seconds, keys)
    f.worker.end_request("slow")
    f.forget_l1()
    return keys


def test_what_is_computed_sooner_is_not_read() -> None:
    with filling() as f:
        keys = slow_and_forgotten(f)
        f.worker.end_request("before", prefill_tokens_per_second=1e6)
        wait_until(lambda: requests_of(f).ended_requests == 2)
        assert f.lookup(keys) == LookupReply(0)
        requests = requests_of(f)
        assert (requests.fills_not_begun, requests.missed_tokens["slow_l2"]) == (1, 6 * 64)
        assert f.fill(keys) == 0, "nor where the engine awaits it all the same"
        assert requests_of(f).fills_not_begun == 2
        assert len(f.gets()) == 6
        f.worker.end_request("later", prefill_tokens_per_second=10)
        wait_until(lambda: requests_of(f).ended_requests == 3)
        assert f.lookup(keys).fill_chunks == 6
        assert f.fill(keys) == 6
        f.audit()


def test_an_engine_of_unknown_speed_reads() -> None:
    with filling() as f:
        assert f.lookup(slow_and_forgotten(f)).fill_chunks == 6


def test_an_engine_that_has_just_started_is_as_fast_as_the_last_one_of_its_namespace() -> None:
    with filling() as f:
        keys = slow_and_forgotten(f)
        f.worker.end_request("before", prefill_tokens_per_second=1e6)
        wait_until(lambda: requests_of(f).ended_requests == 2)
        with Worker(f.running.endpoint) as restarted, Worker(f.running.endpoint, layout="other") as other:
            assert restarted.ask(restarted.lookup_message(keys), LookupReply) == LookupReply(0)
            blocks = other.blocks_for(6)
            other.store(keys, blocks)
            wait_until(lambda: len(f.tier.objects) == 12)
            f.forget_l1()
            assert other.ask(other.lookup_message(keys), LookupReply).fill_chunks == 6


def test_of_a_shared_tier_that_is_too_slow_nothing_is_asked() -> None:
    with filling() as f:
        keys = slow_and_forgotten(f)
        f.tier.shared, f.tier.known = True, set()
        f.worker.end_request("before", prefill_tokens_per_second=1e6)
        wait_until(lambda: requests_of(f).ended_requests == 2)
        assert f.lookup(keys) == LookupReply(0)
        f.worker.end_request("later", prefill_tokens_per_second=10)
        wait_until(lambda: requests_of(f).ended_requests == 3)
        assert f.lookup(keys).fill_chunks == 6


def test_fills_that_took_longer_than_expected_are_counted() -> None:
    with filling() as f:
        keys = slow_and_forgotten(f, seconds=0.0)
        before = requests_of(f).fills_slower
        f.read_within(1.5, keys, "again")  # the slowest of machines has read them in less, the first time
        assert requests_of(f).fills_slower == before + 1


# ---- all or less --------------------------------------------------------------------------------


def test_nothing_is_read_before_there_is_space_for_all_of_it() -> None:
    """L1 has space for a part: the hit is cut to it, and no read is wasted on the rest."""
    with filling(l1_bytes=L1_BYTES) as f:
        keys = make_keys(15)
        f.store(keys)
        f.written(keys)
        size = sum(len(raw) for _, raw in f.tier.objects.values()) // 15
        f.forget_l1()
        cache = f.running.parts.cache
        held = f.running.server.call(lambda: _occupy(cache, keep=5 * size)).result(10)
        found = f.fill(keys)
        assert 0 < found <= 5
        assert [name.key for name in f.gets()] == keys[:found]
        f.running.server.call(lambda: cache.pool.free_pages(held)).result(10)


def _occupy(cache: Cache, keep: int) -> bytes:
    """All pages but so many bytes, as pinned chunks would."""
    while cache.step():
        pass
    pages = cache.pool.allocate_pages(cache.pool.unused_pages - keep // PAGE_BYTES)
    assert pages is not None
    return pages


@pytest.mark.parametrize(
    ("l1", "bound"),
    [(64 << 20, 48 << 20), (256 << 20, 192 << 20), (1 << 30, 256 << 20), (2 << 30, 256 << 20), (64 << 30, 8 << 30)],
)
def test_the_bound_is_an_eighth_of_l1_and_three_quarters_of_a_small_one(l1: int, bound: int) -> None:
    assert memory_bound(l1) == bound


def test_what_was_read_is_there_when_the_rest_arrives() -> None:
    """Other stores may not evict it meanwhile."""
    with filling(l1_bytes=L1_BYTES) as f:
        keys = [*make_keys(15), *make_keys(5)]
        for part in (keys[:15], keys[15:]):
            f.store(part)
            f.written(part)
        f.forget_l1()
        f.tier.stopped, f.tier.kept_waiting = True, {keys[19]}
        number = f.begin(keys, wait_ms=10_000)
        wait_until(lambda: len(f.tier.waiting) == 20)
        f.tier.release()
        wait_until(lambda: len(f.tier.waiting) == 1)
        evicted = f.running.parts.cache
        while f.running.server.call(lambda: evicted.evicted_chunks).result(10) < 40:
            f.store(make_keys(15))
        f.tier.kept_waiting = set()
        f.tier.release()
        assert f.reply(number).hit_chunks == 20
        f.worker.end_request()
        f.audit()


# ---- windows ------------------------------------------------------------------------------------

FULL, WINDOW = ObjectGroup("full", (0,), 16), ObjectGroup("window", (1,), 16, tokens=31)


def store_hybrid(f: Filling, keys: list[bytes], boundaries: list[int]) -> None:
    """Of the window only what a hit needs that ends behind so many chunks."""
    for first in range(0, len(keys), 8):
        part = keys[first : first + 8]
        f.worker.store(part, range(1, 1 + len(part) * f.worker.object_blocks(0)))
    windows = [keys[boundary - 1] for boundary in boundaries]
    f.worker.store(windows, range(1, 1 + len(windows) * f.worker.object_blocks(1)), group=1)
    wait_until(lambda: len(f.tier.objects) == len(keys) + len(boundaries))
    wait_until(lambda: not f.running.server.call(lambda: f.running.parts.spill.puts).result(10))
    f.forget_l1()


def test_the_windows_of_the_greatest_boundary_are_read_first_and_no_others() -> None:
    with filling(geometry=two_groups(), groups=(FULL, WINDOW)) as f:
        keys = make_keys(12)
        store_hybrid(f, keys, [4, 10])
        assert f.lookup(keys).fill_chunks == 10
        assert f.fill(keys) == 10
        assert [(name.group, name.key) for name in f.gets()] == [(1, keys[9]), *((0, key) for key in keys[:10])]
        f.worker.end_request()
        f.audit()


@pytest.mark.parametrize("steps", [1, 1024])
def test_a_hit_with_windows_is_cut_to_a_boundary_that_fits_and_nothing_is_read_for_another(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Also where its slots are reserved in several turns of the loop."""
    monkeypatch.setattr(fills, "STEPS_PER_TURN", steps)
    with filling(l1_bytes=L1_BYTES, geometry=two_groups(), groups=(FULL, WINDOW)) as f:
        keys = make_keys(12)
        store_hybrid(f, keys, [4, 10])
        sizes = {name.group: -(-len(raw) // PAGE_BYTES) * PAGE_BYTES for name, (_, raw) in f.tier.objects.items()}
        cache = f.running.parts.cache
        held = f.running.server.call(lambda: _occupy(cache, keep=6 * sizes[0] + sizes[1])).result(10)
        assert f.fill(keys) == 4
        assert [(name.group, name.key) for name in f.gets()] == [(1, keys[3]), *((0, key) for key in keys[:4])]
        f.running.server.call(lambda: cache.pool.free_pages(held)).result(10)
        f.worker.end_request()
        f.audit()


# ---- many reads ---------------------------------------------------------------------------------


def test_more_objects_than_may_be_read_at_once_are_read_in_turn() -> None:
    with filling() as f:
        keys: list[bytes] = []
        for _ in range(6):
            part = make_keys(15)
            f.store(part)
            f.written(part)
            keys += part
        f.forget_l1()
        f.tier.stopped = True
        number = f.begin(keys)
        wait_until(lambda: len(f.tier.waiting) == 64)
        assert f.lookup(make_keys(1), "the loop goes on").hit_chunks == 0
        assert len(f.tier.waiting) == 64
        f.tier.release()
        assert f.reply(number).hit_chunks == 90
        f.worker.end_request()
        f.forget_l1()
        f.tier.stopped = True
        number = f.begin(keys, "ends early")
        wait_until(lambda: len(f.tier.waiting) == 64)
        f.worker.end_request("ends early")
        assert f.reply(number).hit_chunks == 0
        f.audit()
        used = f.running.server.call(lambda: f.running.parts.cache.pool.used_pages).result(10)
        assert used == 0, "what was reserved is free"


def test_reads_that_fail_show_no_rate() -> None:
    with filling() as f:
        keys = make_keys(3)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        f.tier.fail = dict.fromkeys(keys, TierOutcome.CORRUPT)
        assert f.fill(keys) == 0
        (tier,) = f.running.server.call(f.running.parts.spill.status).result(10)
        assert tier.read_bytes_per_second == 0
        assert f.fill(keys) == 3
        (tier,) = f.running.server.call(f.running.parts.spill.status).result(10)
        assert tier.read_bytes_per_second > 0


def test_what_is_still_to_be_read_counts_for_later_fills() -> None:
    with filling() as f:
        keys = make_keys(6)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        size = sum(len(raw) for _, raw in f.tier.objects.values()) // 6

        def queued() -> int:
            return f.running.server.call(lambda: f.running.parts.fills.queued_bytes).result(10)

        f.tier.stopped, f.tier.kept_waiting = True, {keys[5]}
        number = f.begin(keys)
        wait_until(lambda: len(f.tier.waiting) == 6)
        assert queued() == 6 * size
        f.tier.release()
        wait_until(lambda: len(f.tier.waiting) == 1)
        wait_until(lambda: queued() == size)
        f.worker.end_request()
        f.reply(number)
        assert queued() == 0
        f.audit()
