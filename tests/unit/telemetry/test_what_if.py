"""What other sizes of L1 would have found, against real caches of each size that serve the same requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from kvserver._native import HitRules, WhatIf
from kvserver.cache import POLICIES, Cache, Groups, LookupOutcome
from kvserver.cache.pages import PagePool
from kvserver.config import Settings
from kvserver.events import (
    Bus,
    ChunksEvicted,
    ChunksStored,
    Event,
    InstanceDisconnected,
    L1Cleared,
    LookupEnded,
    NamespaceFormed,
    RequestEnded,
)
from kvserver.observability import Observability
from kvserver.protocol import KEY_BYTES, ObjectGroup
from kvserver.telemetry import WhatIfCurve
from kvserver.telemetry.what_if import SIZES

PAGE, CHUNK_TOKENS = 4096, 256
Prompt = tuple[bytes, bytes]  # namespace, keys
FULL = (ObjectGroup("full", (0,), CHUNK_TOKENS),)
HYBRID = (*FULL, ObjectGroup("window", (1,), CHUNK_TOKENS, tokens=600), ObjectGroup("state", (2,), CHUNK_TOKENS))


class L1:
    """A real cache that serves prompts one after the other: looks up, stores what is missing, ends the lease.

    Objects of a model (the first byte of its namespaces) have `object_pages` by group, times 1 + that number.
    """

    def __init__(self, pages: int, groups: tuple[ObjectGroup, ...], object_pages: tuple[int, ...], policy: str) -> None:
        self.cache = Cache(PagePool(pages * PAGE, PAGE), POLICIES[policy]())
        self.groups = Groups(groups, 1, CHUNK_TOKENS)
        self.object_pages = object_pages
        self.hit_chunks = 0

    def serve(self, prompt: Prompt) -> tuple[LookupOutcome, list[tuple[int, bytes]]]:
        """What was found, and by group the keys that became READY."""
        namespace, keys = prompt
        outcome = self.cache.lookup(namespace, keys, ("i", "r"), 1e9)
        self.hit_chunks += outcome.hit_chunks
        stored = []
        for group, pages in enumerate(self.object_pages):
            plan = self.cache.plan_store(
                namespace,
                self.groups,
                keys,
                pages * (1 + namespace[0]) * PAGE,
                group=group,
                slots=range(group, group + 1),
            )
            self.cache.finish_store(plan, copied=True)
            stored.append((group, b"".join([chunk.key for chunk in plan.ready])))
        self.cache.end_lease(("i", "r"))
        while self.cache.step():
            pass
        return outcome, stored


class World:
    """An L1, its curve, and a real cache of each size beside it."""

    def __init__(
        self,
        pages: int,
        groups: tuple[ObjectGroup, ...] = FULL,
        object_pages: tuple[int, ...] = (1,),
        policy: str = "lru",
    ) -> None:
        self.l1 = L1(pages, groups, object_pages, policy)
        self.others = [L1(int(size * pages), groups, object_pages, policy) for size in SIZES]
        self.others.append(L1(1 << 22, groups, object_pages, policy))
        self.curve = WhatIfCurve(pages, PAGE, policy, boundary_interval=CHUNK_TOKENS)  # at each all is stored
        self.looked_up = 0
        spec = type("Spec", (), {"object_groups": groups, "chunk_tokens": CHUNK_TOKENS, "engine_names": ("", "")})
        self.curve.handle(NamespaceFormed(0, "i", "m", b"", (spec,)))  # type: ignore[arg-type]

    def serve(self, prompt: Prompt) -> None:
        for other in self.others:
            other.serve(prompt)
        outcome, stored = self.l1.serve(prompt)
        namespace, keys = prompt
        self.looked_up += outcome.chunks
        self.curve.handle(LookupEnded(0, "i", "m", "r", 0, keys, outcome, CHUNK_TOKENS, namespace))
        for group, ready in stored:
            pages = self.l1.object_pages[group] * (1 + namespace[0])
            self.curve.handle(ChunksStored(0, "i", "m", namespace, ready, self.l1.groups.objects[group], pages))
        self.curve.handle(RequestEnded(0, "i", "m", "r"))

    @property
    def estimated(self) -> list[float]:
        """Hit rates by size, in points."""
        status = self.curve.status()
        assert status.looked_up_tokens == self.looked_up * CHUNK_TOKENS
        return [100 * one.would_hit_tokens / status.looked_up_tokens for one in status.sizes]

    @property
    def true(self) -> list[float]:
        return [100 * other.hit_chunks / self.looked_up for other in self.others]

    @property
    def errors(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.estimated, self.true, strict=True)]


def keys_of(name: int, first: int, last: int) -> bytes:
    return b"".join([random.Random(f"{name}/{number}").randbytes(KEY_BYTES) for number in range(first, last)])


def prompts(seed: int, documents: int, most: int, shared: int, rounds: int, models: int = 1) -> Iterator[Prompt]:
    """Beginnings of documents, some more popular than others, behind a prompt that all of a model share."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, most) for _ in range(documents)]
    for _ in range(rounds):
        document = int(documents * draw.random() ** 2)
        model = document % models
        keys = keys_of(-1 - model, 0, shared) + keys_of(document, 0, draw.randint(1, lengths[document]))
        yield bytes([model]) * 32, keys


@pytest.mark.parametrize(
    ("shared", "object_pages", "models", "policy"),
    [(0, 1, 1, "lru"), (8, 3, 1, "lru"), (0, 1, 3, "lru"), (8, 1, 1, "slru"), (8, 1, 3, "slru")],
)
def test_every_size_of_the_curve_is_close_to_a_real_cache_of_that_size(
    shared: int, object_pages: int, models: int, policy: str
) -> None:
    world = World(300 * object_pages, object_pages=(object_pages,), policy=policy)
    for prompt in prompts(1, 400, 12, shared, 1500, models):
        world.serve(prompt)
    print(world.true, world.estimated)
    assert max(world.true) - min(world.true) > 15, "sizes differ"
    assert sorted(world.errors)[int(0.9 * 6)] <= 2, (world.estimated, world.true)


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_size_one_of_the_curve_agrees_with_the_hits_of_l1(policy: str) -> None:
    world = World(300, policy=policy)
    for prompt in prompts(2, 300, 12, 4, 1000):
        world.serve(prompt)
    assert world.estimated[SIZES.index(1)] == pytest.approx(100 * world.l1.hit_chunks / world.looked_up, abs=1)


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_a_hit_of_a_hybrid_model_follows_the_rules_of_its_groups(policy: str) -> None:
    world = World(1500, HYBRID, (2, 1, 3), policy)
    for prompt in prompts(3, 300, 12, 2, 600):
        world.serve(prompt)
    assert max(world.true) - min(world.true) > 10
    assert sorted(world.errors)[int(0.9 * 6)] <= 2, (world.estimated, world.true)


def test_a_boundary_needs_the_state_at_its_end() -> None:
    curve = WhatIfCurve(100, PAGE)
    groups = Groups(HYBRID, 1, CHUNK_TOKENS).objects
    spec = type("Spec", (), {"object_groups": HYBRID, "chunk_tokens": CHUNK_TOKENS, "engine_names": ("", "")})
    curve.handle(NamespaceFormed(0, "i", "m", b"", (spec,)))  # type: ignore[arg-type]
    keys = keys_of(1, 0, 6)
    for group in groups[:2]:
        curve.handle(ChunksStored(0, "i", "m", b"n", keys, group, 1))
    curve.handle(ChunksStored(0, "i", "m", b"n", keys[3 * KEY_BYTES : 4 * KEY_BYTES], groups[2], 1))
    lookup = LookupEnded(0, "i", "m", "r", 0, keys, LookupOutcome(6, 0), CHUNK_TOKENS, b"n")
    curve.handle(lookup)
    assert curve.status().sizes[-1].would_hit_tokens == 4 * CHUNK_TOKENS
    curve.handle(ChunksEvicted(0, b"n", keys[3 * KEY_BYTES : 4 * KEY_BYTES], groups[2]))
    curve.handle(lookup)
    assert curve.status().sizes[-1].would_hit_tokens == 4 * CHUNK_TOKENS, "nothing more"


def curve_of(*lookups: bytes, cleared: tuple[bytes, ...] = ()) -> WhatIfCurve:
    """Each prompt is looked up, stored, and `cleared` before the last one."""
    curve = WhatIfCurve(10_000, PAGE)
    for number, keys in enumerate(lookups):
        if number == len(lookups) - 1:
            for prefix in cleared:
                curve.handle(L1Cleared(0, prefix))
        chunks = len(keys) // KEY_BYTES
        time = number * 2_000_000_000
        curve.handle(LookupEnded(time, "i", "m", f"r{number}", 0, keys, LookupOutcome(chunks, 0), CHUNK_TOKENS, b"n"))
        curve.handle(ChunksStored(time, "i", "m", b"n", keys, pages=1))
    curve.tick()
    return curve


@pytest.mark.parametrize("cleared", [(b"",), (b"n",)])
def test_cleared_chunks_are_no_hits(cleared: tuple[bytes, ...]) -> None:
    keys = keys_of(1, 0, 5)
    assert curve_of(keys, keys).status().sizes[-1].would_hit_tokens == 5 * CHUNK_TOKENS
    assert curve_of(keys, keys, cleared=cleared).status().sizes[-1].would_hit_tokens == 0
    assert curve_of(keys, keys, cleared=(b"other",)).status().sizes[-1].would_hit_tokens == 5 * CHUNK_TOKENS


def test_a_status_has_every_size_before_the_first_lookup() -> None:
    sizes = WhatIfCurve(8, PAGE).status().sizes
    assert [one.size for one in sizes] == ["0.25", "0.5", "1", "2", "4", "8", "unlimited"]
    assert [one.size_bytes for one in sizes] == [2 * PAGE, 4 * PAGE, 8 * PAGE, 16 * PAGE, 32 * PAGE, 64 * PAGE, None]


def lookup_of(keys: bytes, found: int = 0, name: str = "r") -> LookupEnded:
    return LookupEnded(0, "i", "m", name, 0, keys, LookupOutcome(len(keys) // KEY_BYTES, found), CHUNK_TOKENS, b"n")


def test_lookups_that_the_queue_has_no_space_for_are_counted_as_dropped_and_not_in_the_curve() -> None:
    curve = WhatIfCurve(100, PAGE)
    bus = Bus([curve], limit=10)
    keys = keys_of(1, 0, 3)
    assert [bus.publish(lookup_of(keys, name=str(number)), len(keys)) for number in range(12)] == [True] * 10 + [
        False
    ] * 2
    bus.start()
    assert bus.flush()
    assert bus.status().dropped_types["LookupEnded"] == 2
    assert curve.status().looked_up_tokens == 10 * 3 * CHUNK_TOKENS
    bus.close()


def test_events_are_counted_in_the_bus_thread_and_the_caller_only_queues_them() -> None:
    threads = []

    class Watched(WhatIfCurve):
        def handle(self, event: Event) -> None:
            threads.append(threading.current_thread())
            super().handle(event)

    curve = Watched(100, PAGE)
    bus = Bus([curve])
    bus.publish(lookup_of(keys_of(1, 0, 3)))
    assert (threads, curve.status().looked_up_tokens) == ([], 0)
    bus.start()
    assert bus.flush()
    bus.close()
    assert curve.status().looked_up_tokens == 3 * CHUNK_TOKENS
    assert threading.current_thread() not in threads != []


def test_chunk_found_by_l1_is_a_hit_from_then_on_though_its_store_was_dropped() -> None:
    curve, keys = WhatIfCurve(100, PAGE), keys_of(1, 0, 3)
    curve.handle(ChunksStored(0, "i", "m", b"n", keys_of(2, 0, 1), pages=1))  # the size of the namespace's objects
    curve.handle(lookup_of(keys, found=3))
    before = curve.status().sizes[SIZES.index(1)].would_hit_tokens
    curve.handle(lookup_of(keys, found=3))
    assert curve.status().sizes[SIZES.index(1)].would_hit_tokens - before == 3 * CHUNK_TOKENS


def hits_after_a_flood(policy: str, used_again: bool) -> float:
    """Chunks that a prompt finds again in L1 after one and a half times L1 was stored behind it."""
    curve, keys = WhatIfCurve(100, PAGE, policy), keys_of(1, 0, 10)
    curve.handle(ChunksStored(0, "i", "m", b"n", keys, pages=1))
    if used_again:
        curve.handle(lookup_of(keys, 10, "first"))
        curve.handle(RequestEnded(0, "i", "m", "first"))
    for number in range(15):
        curve.handle(ChunksStored(0, "i", "m", b"n", keys_of(2, 10 * number, 10 * number + 10), pages=1))
    before = curve.status().sizes[SIZES.index(1)].would_hit_tokens
    curve.handle(lookup_of(keys, 0, "again"))
    return (curve.status().sizes[SIZES.index(1)].would_hit_tokens - before) / CHUNK_TOKENS


def test_the_curve_of_slru_keeps_what_was_used_again() -> None:
    assert hits_after_a_flood("slru", used_again=True) == 10
    assert hits_after_a_flood("slru", used_again=False) == 0
    assert hits_after_a_flood("lru", used_again=True) == 0
    assert WhatIfCurve(8, PAGE, "slru").status().policy == "slru"


def test_an_engine_that_disconnects_ends_its_lookups() -> None:
    curve, keys = WhatIfCurve(100, PAGE, "slru"), keys_of(1, 0, 10)
    curve.handle(ChunksStored(0, "i", "m", b"n", keys, pages=1))
    curve.handle(lookup_of(keys, 10))
    curve.handle(InstanceDisconnected(0, "i", "m", died=True))
    for number in range(19):
        curve.handle(ChunksStored(0, "i", "m", b"n", keys_of(2, 5 * number, 5 * number + 5), pages=1))
    curve.handle(lookup_of(keys, 10, "later"))
    assert curve.status().sizes[SIZES.index(1)].would_hit_tokens == 20 * CHUNK_TOKENS


@pytest.mark.parametrize("protects", [False, True])
def test_prompt_that_repeats_its_keys_counts_each_key_once(protects: bool) -> None:
    """Whatever a client sends: the table listed a chunk twice, and the daemon ended by a signal."""
    table, rules = WhatIf(1, [25, 50, 100, 200, 400, 800], protects), HitRules(1, 256, [])
    keys = b"".join(number.to_bytes(KEY_BYTES, "little") for number in range(15)) * 50
    for _ in range(100):
        hits = table.lookup(7, keys, rules, 256)
        table.add(7, keys, rules, 1, 1)
        table.use(7, keys, rules, hits, 750, 1)
        assert len(table) == 15


# ---- hybrid models: what a size lacks ---------------------------------------------------------


class Hybrid:
    """The curve of an L1 of 100 pages, and what it learns of a model with a state (`state_pages`) beside full attention (a page)."""

    GROUPS = (*FULL, ObjectGroup("state", (1,), CHUNK_TOKENS))

    def __init__(self, curve: WhatIfCurve | None = None, state_pages: int = 1) -> None:
        self.curve = curve or WhatIfCurve(100, PAGE)
        self.state_pages = state_pages
        self.full, self.state = Groups(self.GROUPS, 1, CHUNK_TOKENS).objects
        spec = type("Spec", (), {"object_groups": self.GROUPS, "chunk_tokens": CHUNK_TOKENS, "engine_names": ("", "")})
        self.curve.handle(NamespaceFormed(0, "i", "m", b"", (spec,)))  # type: ignore[arg-type]

    def store(self, keys: bytes, state_at: int | None = None) -> None:
        self.curve.handle(ChunksStored(0, "i", "m", b"n", keys, self.full, 1))
        if state_at is not None:
            key = keys[state_at * KEY_BYTES :][:KEY_BYTES]
            self.curve.handle(ChunksStored(0, "i", "m", b"n", key, self.state, self.state_pages))

    def drop_state(self, key: bytes) -> None:
        self.curve.handle(ChunksEvicted(0, b"n", key, self.state))

    def flood(self, first: int, last: int) -> None:
        """As many pages of other prompts."""
        self.store(keys_of(2, first, last))

    def found(self, keys: bytes, in_l1: int = 0, instance: str = "i") -> list[int]:
        """Chunks by size. The request of an engine that is not known ("full") needs full attention only."""
        before = [one.would_hit_tokens for one in self.curve.status().sizes]
        outcome = LookupOutcome(len(keys) // KEY_BYTES, in_l1)
        self.curve.handle(LookupEnded(0, instance, "m", "r", 0, keys, outcome, CHUNK_TOKENS, b"n"))
        self.curve.handle(RequestEnded(0, instance, "m", "r"))
        after = [one.would_hit_tokens for one in self.curve.status().sizes]
        return [(new - old) // CHUNK_TOKENS for new, old in zip(after, before, strict=True)]


def test_a_prompt_that_is_stored_again_lacks_its_former_state_in_the_sizes_that_evicted_it() -> None:
    hybrid, keys = Hybrid(), keys_of(1, 0, 4)
    hybrid.store(keys[: 2 * KEY_BYTES], state_at=1)
    hybrid.flood(0, 120)  # sizes of 25, 50 and 100 pages
    hybrid.store(keys, state_at=3)
    assert hybrid.found(keys) == [4] * 7, "its new state"
    assert hybrid.found(keys[: 3 * KEY_BYTES]) == [0, 0, 0, 2, 2, 2, 2]


def test_a_state_that_a_size_lacks_uses_no_pages_of_it() -> None:
    hybrid, keys = Hybrid(state_pages=20), keys_of(1, 0, 4)
    hybrid.store(keys[: 2 * KEY_BYTES], state_at=1)
    hybrid.flood(0, 120)
    hybrid.store(keys, state_at=3)  # 24 pages of L1
    hybrid.flood(200, 276)
    assert hybrid.found(keys)[SIZES.index(1)] == 4
    hybrid.flood(300, 377)
    assert hybrid.found(keys)[SIZES.index(1)] < 4


def test_a_state_that_a_size_lacks_frees_no_pages_of_it_when_it_is_dropped() -> None:
    hybrid, keys = Hybrid(state_pages=20), keys_of(1, 0, 2)
    hybrid.store(keys, state_at=1)
    hybrid.flood(0, 120)
    hybrid.store(keys)
    hybrid.drop_state(keys[KEY_BYTES:])
    hybrid.flood(200, 210)  # L1 has these 10, the 2 above, and 88 of the first flood, whose first chunk is the youngest
    assert hybrid.found(keys_of(2, 87, 88), instance="full")[SIZES.index(1)] == 1
    assert hybrid.found(keys_of(2, 88, 89), instance="full")[SIZES.index(1)] == 0


def test_the_state_at_a_prompts_end_is_stored_again_by_a_size_though_l1_has_it() -> None:
    hybrid, keys = Hybrid(), keys_of(1, 0, 4)
    hybrid.store(keys, state_at=3)
    hybrid.flood(0, 50)
    assert hybrid.found(keys, in_l1=4) == [0, 0, 4, 4, 4, 4, 4]
    assert hybrid.found(keys, in_l1=4) == [4] * 7


def test_the_state_where_a_sizes_full_attention_ended_is_stored_by_it_though_l1_has_it() -> None:
    hybrid, keys = Hybrid(), keys_of(1, 0, 5)
    hybrid.store(keys[: 4 * KEY_BYTES], state_at=3)
    hybrid.flood(0, 50)
    assert hybrid.found(keys, in_l1=4) == [0, 0, 4, 4, 4, 4, 4]
    assert hybrid.found(keys, in_l1=4) == [0, 0, 4, 4, 4, 4, 4], "their full attention's end was elsewhere"
    assert hybrid.found(keys, in_l1=4) == [4] * 7


@pytest.mark.parametrize(("interval", "found"), [(0, 0), (2, 2), (3, 0)])
def test_states_at_the_interval_are_stored_again_by_a_size_though_l1_has_them(interval: int, found: int) -> None:
    settings = Settings(boundary_interval=interval * CHUNK_TOKENS, eviction_policy="lru")
    hybrid, keys = Hybrid(Observability(settings, "boot", 100, PAGE).what_if), keys_of(1, 0, 5)
    hybrid.store(keys[: 2 * KEY_BYTES], state_at=1)
    hybrid.flood(0, 50)
    assert hybrid.found(keys, in_l1=2) == [0, 0, 2, 2, 2, 2, 2]
    assert hybrid.found(keys, in_l1=2) == [found, found, 2, 2, 2, 2, 2]


def test_a_size_with_a_protected_segment_keeps_the_state_of_what_a_long_prompt_found() -> None:
    hybrid, keys = Hybrid(WhatIfCurve(100, PAGE, "slru")), keys_of(1, 0, 34)
    prefix = keys[: 5 * KEY_BYTES]
    hybrid.store(prefix, state_at=3)
    assert hybrid.found(prefix, in_l1=4) == [4] * 7
    hybrid.curve.handle(lookup_of(keys, 4))
    hybrid.store(keys[4 * KEY_BYTES :])  # 30 chunks: more than the smallest size has pages
    hybrid.curve.handle(RequestEnded(0, "i", "m", "r"))
    assert hybrid.found(prefix, in_l1=4) == [4] * 7
