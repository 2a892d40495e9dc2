"""Hits of a prompt in L1 and L2, followed by typed events; L0 is in tests/daemon/engine_events."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from support.plain_match import plain_match
from support.properties import examples, walks

from kvserver.config import Settings
from kvserver.kv_events import ObserverContext
from kvserver.kv_events.types import (
    KeysCleared,
    KeysRemoved,
    KeysStored,
    ReaderConnected,
    ReaderDisconnected,
    Tier,
)
from kvserver.protocol import DescribeScheduler
from kvserver.routing import KVIndex
from kvserver.routing.prefix_index import Match, make_index

PREFIXES = [bytes([n]) * 64 for n in (1, 2)]
LORA = b"l" * 32
CHUNK_BLOCKS = 4


@pytest.fixture
def index():
    index = KVIndex(64 << 20, follow_engines=True)
    yield index
    index.close()


def reader_of(name, prefix=PREFIXES[0], chunk_blocks=CHUNK_BLOCKS, model="model"):
    scheduler = DescribeScheduler(instance_id=name, incarnation="1", model_name=model, variant="epoch")
    return ReaderConnected(1, 0, scheduler, prefix, chunk_blocks, 16)


def reader_leaves(name):
    return ReaderDisconnected(1, 0, name, "model")


def prompt_of(seed, blocks=40, hash_bytes=32):
    generator = random.Random(seed)
    return [generator.randbytes(hash_bytes) for _ in range(blocks)]


def chunk(prompt, number, chunk_blocks=CHUNK_BLOCKS):
    """The key of the chunk."""
    return prompt[(number + 1) * chunk_blocks - 1].ljust(32, b"\0")


def stored(*keys, tier=Tier.L1, namespace=PREFIXES[0], group=0):
    return KeysStored(tier, namespace, keys, group)


def removed(*keys, tier=Tier.L1, namespace=PREFIXES[0], group=None):
    return KeysRemoved(tier, namespace, keys, group)


def plain(prompt, l1, l2, tails):
    """As a lookup finds it, for an engine without an L0: `tails` are single blocks in L1."""

    def behind(first):
        part = prompt[first : first + CHUNK_BLOCKS]
        return first + next((at for at, block in enumerate(part) if not tails[block]), len(part))

    _, in_l1, in_l2, both = plain_match(prompt, [l1, l2], (-1, 0, 1, CHUNK_BLOCKS))
    filled = both > in_l1
    whole = len(prompt) // CHUNK_BLOCKS * CHUNK_BLOCKS
    l1_l2 = both if filled and both < whole else behind(both)
    return Match(0, behind(in_l1), in_l2, l1_l2, max(both, l1_l2))


def match(index, prompt, name="engine"):
    (found,) = index.match(index.known_engines(instance_ids=[name]), b"".join(prompt), len(prompt[0]))
    return found


def test_chunks_are_found_from_the_start_of_the_prompt(index):
    prompt = prompt_of(1)
    index.observe(reader_of("engine"))
    index.observe(stored(*(chunk(prompt, n) for n in (0, 1, 3))))
    assert match(index, prompt) == Match(0, 8, 0, 8, 8)
    index.observe(stored(chunk(prompt, 2), tier=Tier.L2))
    assert match(index, prompt) == Match(0, 8, 0, 16, 16), "L2 carries L1 on"
    index.observe(removed(chunk(prompt, 0)))
    assert match(index, prompt) == Match(0, 0, 0, 0, 0)


def test_single_blocks_are_found_behind_the_chunks_where_a_lookup_finds_them(index):
    prompt = prompt_of(1, blocks=10)
    index.observe(reader_of("engine"))
    index.observe(stored(chunk(prompt, 0)))
    index.observe(stored(*prompt[4:6], group=-1))
    index.observe(stored(*prompt[8:10], group=-1))
    assert match(index, prompt) == Match(0, 6, 0, 6, 6), "inside the first missed chunk"
    index.observe(stored(chunk(prompt, 1), tier=Tier.L2))
    assert match(index, prompt) == Match(0, 6, 0, 10, 10), "behind the last chunk, once a fill has brought it"
    assert match(index, prompt_of(1, blocks=16)[:10] + prompt_of(2, blocks=6)) == Match(0, 6, 0, 8, 8), (
        "after a fill that ends before the last chunk none are looked up"
    )
    index.observe(removed(*prompt[:6]))
    assert match(index, prompt).l1 == 0, "the chunk was evicted, and its blocks are no chunks'"
    index.observe(stored(chunk(prompt, 0)))
    assert match(index, prompt).l1 == 6
    index.observe(removed(prompt[5], group=-1))
    assert match(index, prompt).l1 == 5
    index.observe(KeysCleared(Tier.L1, b""))
    assert match(index, prompt) == Match(0, 0, 0, 0, 0)


def test_only_single_blocks_are_found_too(index):
    prompt = prompt_of(1, blocks=3)
    index.observe(reader_of("engine"))
    index.observe(stored(*prompt[:2], group=-1))
    assert match(index, prompt) == Match(0, 2, 0, 2, 2)
    assert match(index, [block[-8:] for block in prompt]) == Match(0, 2, 0, 2, 2)


@pytest.mark.parametrize("hash_bytes", [16, 32])
def test_keys_of_short_hashes_are_known_without_their_zeros(index, hash_bytes):
    prompt = prompt_of(1, hash_bytes=hash_bytes)
    index.observe(reader_of("engine"))
    index.observe(stored(chunk(prompt, 0)))
    assert match(index, prompt).l1 == 4
    assert match(index, [block[-8:] for block in prompt]).l1 == 4
    index.observe(removed(chunk(prompt, 0)))
    assert match(index, prompt).l1 == 0


def test_engines_of_one_namespace_prefix_find_the_same_and_those_of_another_nothing(index):
    prompt = prompt_of(1)
    for name, prefix in (("one", PREFIXES[0]), ("two", PREFIXES[0]), ("other", PREFIXES[1])):
        index.observe(reader_of(name, prefix))
    index.observe(stored(chunk(prompt, 0)))
    assert [match(index, prompt, name).l1 for name in ("one", "two", "other")] == [4, 4, 0]


def test_chunks_of_a_lora_are_found_by_engines_of_its_weights(index):
    prompt = prompt_of(1)
    index.observe(reader_of("engine"))
    index.observe(stored(chunk(prompt, 0), namespace=PREFIXES[0] + LORA))
    index.observe(stored(chunk(prompt, 0), namespace=PREFIXES[0] + LORA[::-1]))
    index.observe(removed(chunk(prompt, 0), namespace=PREFIXES[0] + LORA))
    assert match(index, prompt).l1 == 4, "the chunk is also in another namespace"


def test_chunks_stored_before_an_engine_connected_are_found(index):
    prompt = prompt_of(1)
    index.observe(reader_of("first"))
    index.observe(stored(chunk(prompt, 0)))
    index.observe(reader_leaves("first"))
    assert index.known_engines() == []
    index.observe(reader_of("second"))
    assert match(index, prompt, "second").l1 == 4


def test_an_engine_with_new_weights_finds_nothing_of_the_old(index):
    prompt = prompt_of(1)
    index.observe(reader_of("engine"))
    index.observe(stored(chunk(prompt, 0)))
    index.observe(reader_of("engine", PREFIXES[1]))
    assert match(index, prompt).l1 == 0
    index.observe(reader_of("engine"))
    assert match(index, prompt).l1 == 4


def test_readers_are_chosen_by_model_and_by_name(index):
    for name, model in (("a", "x"), ("b", "x"), ("c", "y")):
        index.observe(reader_of(name, model=model))
    assert [reader.instance_id for reader in index.known_engines("x")] == ["a", "b"]
    assert [reader.instance_id for reader in index.known_engines("x", ["b", "c"])] == ["b"]
    assert len(index.known_engines()) == 3


def test_namespace_prefixes_without_readers_make_room_for_those_with_readers(index):
    prompt = prompt_of(1)
    for n in range(64):
        index.observe(stored(chunk(prompt, 0), namespace=n.to_bytes(64, "big")))
    index.observe(reader_of("engine"))
    index.observe(stored(chunk(prompt, 0)))
    assert match(index, prompt).l1 == 4
    assert index.status().dropped_reaches == 1
    index.observe(removed(chunk(prompt, 0), namespace=bytes(64)))  # of the dropped namespace prefix
    assert match(index, prompt).l1 == 4


def test_chunks_for_which_the_index_has_no_owner_are_counted(index):
    prompt = prompt_of(1)
    prefixes = [n.to_bytes(64, "big") for n in range(65)]
    for n, prefix in enumerate(prefixes):
        index.observe(reader_of(f"engine {n}", prefix))
        index.observe(stored(chunk(prompt, 0), chunk(prompt, 1), namespace=prefix))
    assert [match(index, prompt, f"engine {n}").l1 for n in (0, 63, 64)] == [8, 8, 0]
    assert index.status().refused_blocks == 2
    assert index.status().dropped_reaches == 0
    index.observe(reader_leaves("engine 0"))
    index.observe(stored(chunk(prompt, 0), chunk(prompt, 1), namespace=prefixes[64]))
    assert match(index, prompt, "engine 64").l1 == 8
    assert index.status().refused_blocks == 2


def test_empty_namespace_prefixes_without_readers_are_forgotten(index):
    prompt = prompt_of(1)
    for n in range(200):
        namespace = n.to_bytes(64, "big")
        index.observe(reader_of("engine", namespace))
        index.observe(stored(chunk(prompt, 0), namespace=namespace))
        index.observe(removed(chunk(prompt, 0), namespace=namespace))
    index.observe(reader_leaves("engine"))
    assert (index.status().dropped_reaches, index.status().blocks) == (0, 0)


def test_memory_is_the_settings_and_what_does_not_fit_is_counted():
    context = ObserverContext(Settings(kv_index_size="1MiB"), "boot", 0)
    index = make_index(context)
    prompts = [prompt_of(seed, 256 * CHUNK_BLOCKS) for seed in range(250)]
    for prompt in prompts:
        index.observe(stored(*(chunk(prompt, n) for n in range(256))))
    status = index.status()
    assert status.most_bytes == 1 << 20 >= status.memory_bytes
    assert status.refused_blocks == 250 * 256 - status.blocks > 0
    index.close()


def test_a_large_l2_leaves_room_for_l1():
    index = make_index(ObserverContext(Settings(kv_index_size="1MiB"), "boot", 0))
    index.observe(reader_of("engine"))
    found = [prompt_of(seed, 256) for seed in range(250)]
    for keys in found:
        index.observe(stored(*keys, tier=Tier.L2))
    status = index.status()
    assert status.refused_blocks == 250 * 256 - status.blocks > 0
    prompt = prompt_of("l1", 256 * CHUNK_BLOCKS)
    index.observe(stored(*(chunk(prompt, n) for n in range(256))))
    assert match(index, prompt).l1 == len(prompt)
    assert index.status().refused_blocks == status.refused_blocks
    index.observe(removed(*found[-1], tier=Tier.L2))  # which were refused
    index.close()


def test_what_an_instance_shows_is_what_its_tiers_hold(index):
    prompt = prompt_of(1)
    index.observe(reader_of("engine"))
    index.observe(stored(chunk(prompt, 0), chunk(prompt, 1)))
    shown = index.instance("engine")
    assert (shown["incarnation"], shown["l0"]["blocks"], shown["l1"]["chunks"], shown["l2"]["chunks"]) == ("1", 0, 2, 0)
    assert shown["l0"]["kv_events"] is None
    assert index.instance("absent") is None


@given(steps=walks(100))
@examples(20)
def test_random_events_agree_with_a_plain_model(steps):
    index = KVIndex(64 << 20, follow_engines=True)
    prompts = [prompt_of(n) for n in range(3)]
    prompts += [prompt[:18] + prompt_of(9)[18:] for prompt in prompts]
    held = defaultdict(Counter)  # by namespace and tier: keys
    readers = {}
    for generator in steps:
        namespace = generator.choice(PREFIXES) + generator.choice([b"", LORA])
        tier, prompt = generator.choice(list(Tier)), generator.choice(prompts)
        tails = tier is Tier.L1 and generator.random() < 0.5
        one = prompt[generator.randrange(40)] if tails else chunk(prompt, generator.randrange(10))
        mine, group = held[namespace, "tails" if tails else tier], -1 if tails else 0
        action = generator.random()
        if action < 0.02:
            index.observe(KeysCleared(tier, cleared := generator.choice([b"", *PREFIXES])))
            for (space, at), keys in held.items():
                if at in ((tier, "tails") if tier is Tier.L1 else (tier,)) and space.startswith(cleared):
                    keys.clear()
        elif action < 0.5 and not mine[one]:
            mine[one] = 1
            index.observe(stored(one, tier=tier, namespace=namespace, group=group))
        elif action < 0.8 and mine[one]:
            mine[one] = 0
            index.observe(removed(one, tier=tier, namespace=namespace, group=-1 if tails else None))
        elif action < 0.9:
            name = generator.choice("ab")
            readers[name] = generator.choice(PREFIXES)
            index.observe(reader_of(name, readers[name]))
        elif (name := generator.choice("ab")) in readers:
            del readers[name]
            index.observe(reader_leaves(name))
        for name, prefix in readers.items():
            keys = [held[prefix, at] + held[prefix + LORA, at] for at in (Tier.L1, Tier.L2, "tails")]
            for asked in (prompt, prompt[: generator.randrange(41)]):
                assert not asked or match(index, asked, name) == plain(asked, *keys)
    index.close()
