"""The cache under each policy, with shares and without: whatever happens, an eviction keeps the rules of `cache` and `shares`.

And what each policy keeps.
"""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import Dice, examples, walks
from support.turns import repeat

from kvserver.cache import POLICIES, Cache, Chunk, Groups, ModelUse, PagePool, StorePlan, one_group
from kvserver.cache.eviction.slru import PROTECTED_SHARE

PAGE = 4096
ONE_RANK, TWO_RANKS, OTHER = b"1" * 32, b"2" * 32, b"3" * 32
FOREVER = 1e9
every_policy = pytest.mark.parametrize("policy", POLICIES)


def make_cache(policy: str, pages: int, **shares: str) -> Cache:
    fractions = {model: Decimal(share) for model, share in shares.items()}
    return Cache(PagePool(pages * PAGE, PAGE), POLICIES[policy](), fractions)


def keys(names: list[int]) -> bytes:
    return b"".join(name.to_bytes(32, "big") for name in names)


def store(cache: Cache, *names: int) -> list[int]:
    """Returns what was evicted for it."""
    plan = cache.plan_store(ONE_RANK, one_group(1), keys(list(names)), PAGE)
    cache.finish_store(plan, copied=True)
    return [int.from_bytes(key, "big") for _, key in plan.evicted]


def use(cache: Cache, *names: int) -> int:
    """As a request does that finds the first so many of these chunks."""
    hits = cache.lookup(ONE_RANK, keys(list(names)), ("e", "use"), FOREVER).hit_chunks
    cache.end_lease(("e", "use"))
    return hits


def resident(cache: Cache) -> set[int]:
    return {int.from_bytes(chunk.key, "big") for chunk in cache.index}


class Requests:
    """A walk of requests of three models and three tenants over a cache of 24 pages. What they use, and whose it is, is counted apart."""

    TENANTS = ("", "t", "u", "without a share")
    MODELS = (("a", ONE_RANK, one_group(1)), ("b", TWO_RANKS, one_group(2)), ("c", OTHER, one_group(1)))

    def __init__(self, policy: str, **shares: str) -> None:
        self.cache = make_cache(policy, 24, **shares)
        self.leases: dict[tuple[str, str], list[Chunk]] = {}
        self.loads: list[list[Chunk]] = []
        self.plans: list[StorePlan] = []
        self.owners: dict[tuple[bytes, bytes], str] = {}  # of the chunks in L1, by namespace and key; a name of a share
        self.evicted: list[list[bytes]] = []  # by store

    def step(self, rng: Dice) -> None:
        first = rng.randrange(30)
        names, owner = list(range(first, first + rng.randint(1, 6))), ("e", f"r{rng.randrange(3)}")
        namespace = rng.choice([ONE_RANK, OTHER])
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                model, namespace, groups = rng.choice(self.MODELS)
                self.store(names, model, namespace, groups, rng.randrange(2), rng.choice(self.TENANTS))
            case 4 | 5:
                hits = self.cache.lookup(namespace, keys(names), owner, FOREVER).hit_chunks
                self.leases[owner] = self.chunks(namespace, names[:hits])
            case 6:
                self.cache.end_lease(owner)
                self.leases.pop(owner, None)
            case 7 if hits := use(self.cache, *names):
                self.loads.append(self.cache.plan_load(ONE_RANK, keys(names[:hits])))
            case 8 if self.loads:
                self.cache.finish_load(self.loads.pop(rng.randrange(len(self.loads))), copied=True)
            case 9 | 10 if self.plans:
                self.cache.finish_store(self.plans.pop(rng.randrange(len(self.plans))), copied=rng.random() < 0.8)
            case 11 if rng.random() < 0.1:
                self.cache.clear_namespaces(rng.choice([b"", ONE_RANK]))
            case _:
                self.cache.step(rng.randint(1, 3))

    def chunks(self, namespace: bytes, names: list[int]) -> list[Chunk]:
        return [chunk for chunk in self.cache.index.find_chunks(namespace, keys(names)) if chunk is not None]

    def idle(self, but: StorePlan | None = None) -> list[Chunk]:
        """In L1, and used by no request; and no part of this store."""
        busy = {id(chunk) for chunks in (*self.leases.values(), *self.loads) for chunk in chunks}
        busy.update(id(chunk) for plan in self.plans for chunk in plan.chunks)
        busy.update(id(chunk) for chunk in ((*but.prefix, *but.found) if but is not None else []))
        return [chunk for chunk in self.cache.index if id(chunk) not in busy]

    def owner(self, model: str, tenant: str) -> str:
        return f"tenant:{tenant}" if tenant in self.cache.index.tenants else model

    def use_of(self, owner: str) -> ModelUse | None:
        index = self.cache.index
        return index.models.get(owner) or index.tenants.get(owner.removeprefix("tenant:"))

    def check_owners(self) -> None:
        """A chunk in L1 belongs to who stored it first, and counts there alone."""
        there = {(chunk.namespace.id, chunk.key): chunk for chunk in self.cache.index}
        self.owners = {name: owner for name, owner in self.owners.items() if name in there}
        assert self.owners.keys() == there.keys()
        assert all(chunk.namespace.owner is self.use_of(self.owners[name]) for name, chunk in there.items())
        counted = Counter(self.owners.values())
        for owner in {*self.cache.index.models, *map("tenant:{}".format, self.cache.index.tenants)}:
            use = self.use_of(owner)
            assert use is not None
            assert use.chunks == counted[owner]

    def store(self, names: list[int], model: str, namespace: bytes, groups: Groups, rank: int, tenant: str) -> None:
        self.check_owners()
        idle = {(chunk.namespace.id, chunk.key): bool(chunk.ready) for chunk in self.idle()}
        slots = range(rank % groups.slot_count, rank % groups.slot_count + 1)
        plan = self.cache.plan_store(namespace, groups, keys(names), PAGE, slots=slots, model_name=model, tenant=tenant)
        self.plans.append(plan)
        self.evicted.append([key for _, key in plan.evicted])
        assert {*plan.evicted} <= {*idle}, "an eviction of what is leased, filled or read"
        assert not {*plan.evicted} & {(chunk.namespace.id, chunk.key) for chunk in plan.found}, "of the store itself"
        left = self.idle(but=plan)
        if any(idle[evicted] for evicted in plan.evicted):
            assert all(chunk.ready for chunk in left), "an incomplete chunk stays, and a READY one leaves"
        owner = self.owner(model, tenant)
        self.check_shares(owner, {self.owners[name] for name in plan.evicted if idle[name]}, left, plan)
        for name in plan.evicted:
            del self.owners[name]
        for chunk in plan.chunks:
            self.owners.setdefault((namespace, chunk.key), owner)
        assert len(plan.chunks) + plan.skipped + plan.no_space == len(names)

    def check_shares(self, owner: str, losers: set[str], left: list[Chunk], plan: StorePlan) -> None:
        """`owner`: of the store's new chunks. `losers`: the owners of which READY chunks were evicted."""
        for loser in losers - {owner}:
            of = self.use_of(loser)
            assert of is not None
            assert of.pages >= of.share_pages, f"{loser} was pushed below its share by {owner}"
        own, lost = self.use_of(owner), owner in losers
        assert own is not None
        others = [chunk for chunk in left if chunk.namespace.owner is not own]
        evictable = [c for c in others if c.namespace.owner.pages - c.page_count >= c.namespace.owner.share_pages]
        if lost and own.pages < own.share_pages:
            assert not evictable, f"{owner} lost its own below its share, while another has more than its share"
        if plan.no_space:
            assert not evictable, "no space, while a chunk may be evicted"
            assert not any(chunk.namespace.owner is own for chunk in left) or not own.share_pages
            assert self.cache.pool.used_pages == self.cache.pool.pages

    def end(self) -> None:
        for plan in self.plans:
            self.cache.finish_store(plan, copied=True)
        for chunks in self.loads:
            self.cache.finish_load(chunks, copied=True)
        for owner in self.leases:
            self.cache.end_lease(owner)
        repeat(self.cache.step)
        self.check_owners()
        self.cache.audit()


SHARES = [
    {},
    {"a": "0.5"},
    {"a": "0.3", "b": "0.5"},
    {"a": "0.25", "b": "0.25", "c": "0.5"},
    {"tenant:t": "0.5"},
    {"a": "0.2", "tenant:t": "0.3", "tenant:u": "0.3"},
]


@every_policy
@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.hypothesis
def test_eviction_spares_used_chunks_and_shares_and_evicts_incomplete_chunks_first(
    policy: str, shares: dict[str, str]
) -> None:
    evictions = Counter[str]()

    @given(steps=walks(150))
    @examples(15)
    def walk(steps: list[Dice]) -> None:
        requests, twin = Requests(policy, **shares), Requests(policy, **shares)
        for dice in steps:
            number = dice.number
            requests.step(dice)
            twin.step(Dice(number))
        assert requests.evicted == twin.evicted, "equal requests, other evictions"
        evictions["all"] += sum(map(len, requests.evicted))
        requests.end()

    walk()
    assert evictions["all"] > 75, "the walks went where nothing is evicted"


@every_policy
@pytest.mark.hypothesis
def test_no_chunk_leaves_before_the_chunks_behind_it(policy: str) -> None:
    """A chunk without its prefix is of no use. Prompts are paths in a tree, and a request has ended before the next begins."""

    @given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=60), st.integers(4, 20))
    @examples(100)
    def ask(paths: list[list[int]], pages: int) -> None:
        cache, names = make_cache(policy, pages), {(): 0}
        for path in paths:
            prompt = [names.setdefault(tuple(path[:end]), len(names)) for end in range(1, len(path) + 1)]
            hits = cache.lookup(ONE_RANK, keys(prompt), ("e", "r"), FOREVER).hit_chunks
            if hits:
                cache.finish_load(cache.plan_load(ONE_RANK, keys(prompt[:hits])), copied=True)
            store(cache, *prompt)
            cache.end_lease(("e", "r"))
            there = resident(cache)
            for known, name in names.items():
                assert name not in there or len(known) == 1 or names[known[:-1]] in there, f"{known} without its prefix"

    ask()


def test_slru_keeps_what_was_used_again_from_a_scan() -> None:
    cache = make_cache("slru", 10)
    store(cache, 1, 2)
    assert use(cache, 1, 2) == 2
    for scanned in range(100, 200):
        store(cache, scanned)
    assert {1, 2} <= resident(cache)
    assert use(cache, 190) == 0


def test_slru_protects_a_part_of_l1_only_the_least_recently_used_give_way() -> None:
    cache = make_cache("slru", 10)
    store(cache, *range(10))
    for name in range(10):
        use(cache, name)
    for scanned in range(100, 120):
        store(cache, scanned)
    protected = round(10 * PROTECTED_SHARE)
    assert {name for name in resident(cache) if name < 10} == {*range(10 - protected, 10)}


def test_what_comes_back_after_its_eviction_is_kept_from_a_scan() -> None:
    cache = make_cache("slru", 10)
    for name in (1, *range(100, 110)):
        store(cache, name)
    assert 1 not in resident(cache)
    store(cache, 1)
    for name in range(200, 230):
        store(cache, name)
    assert 1 in resident(cache)


def test_a_chunk_comes_back_only_with_its_prefix() -> None:
    """Else it would be protected and outlast the chunks before it, without which no lookup finds it."""
    cache = make_cache("slru", 10)
    store(cache, 1, 2)
    use(cache, 1)
    for name in range(100, 109):
        store(cache, name)
    assert resident(cache) & {1, 2} == {1}, "the second one was evicted"
    cache.clear_namespaces()
    repeat(cache.step)
    store(cache, 1, 2)
    for name in range(200, 209):
        store(cache, name)
    assert 2 not in resident(cache)
