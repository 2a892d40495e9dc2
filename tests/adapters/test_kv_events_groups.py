"""KV events of hybrid models: the daemon's stream and the engines' name, by KV cache group, the blocks that objects in L1 hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hybrids import HYBRIDS, Hybrid, window
from kv_events_log import events_on
from kv_scene import Scene
from made_up_model import prompt
from modelless import Engine
from msgspec.structs import replace
from support.daemon import Daemon
from tap import Tap
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvserver.adapters.vllm.groups import object_groups
from kvserver.cache import Groups
from kvserver.kv_events.wire import full_attention_first
from kvserver.protocol import KEY_BYTES, KVGroup, Lookup, LookupReply, ObjectGroup, Store
from kvserver.protocol.client import Client

MODELS = {
    **{name: HYBRIDS[name] for name in ("gpt-oss", "long window", "gemma", "llama4", "qwen3-next", "nemotron")},
    "short window only": Hybrid([window(24)] * 2, ["window"]),
    "long window only": Hybrid([window(100)] * 2, ["window"]),
}
Object = tuple[int, bytes]  # object group, key


class Ready(NamedTuple):
    ready: int  # bits of object groups


class HybridScene(Scene):
    """What is resident follows from the engines' stores, until L1 evicts."""

    def __init__(self, daemon: Daemon, engines: list[Engine], tap: Tap, model: Hybrid) -> None:
        self.tap = tap
        self.model = model
        self.groups: tuple[ObjectGroup, ...] = object_groups(engines[0].config, engines[0].caches)
        self.evicts = False
        self._cleared = 0  # messages before the last clear
        super().__init__(daemon, engines)

    def clear(self) -> None:
        super().clear()
        self._cleared = len(self.tap.received)

    @property
    def resident(self) -> set[tuple[int, Any]]:
        """By the engine's numbers of KV cache groups; on the daemon's stream full attention has the first ones."""
        specs = [group.kv_cache_spec for group in self.engines[0].caches.kv_cache_groups]
        groups = full_attention_first(tuple(KVGroup(get_kv_cache_spec_kind(spec).value) for spec in specs))
        engines = {number: index for index, (number, _) in enumerate(groups)}
        return {(engines[number], name) for number, name in super().resident}

    @property
    def stores(self) -> list[Store]:
        return [message for message in self.tap.received[self._cleared :] if isinstance(message, Store)]

    def stored(self) -> set[Object]:
        """And not dropped since."""
        found: set[Object] = set()
        for store in self.stores:
            found |= {(store.group, key) for key in split(store.keys)}
            found -= {(store.group, key) for key in split(store.dropped)}
        return found

    def named(self, one: Object) -> set[tuple[int, bytes]]:
        """The blocks of an object: the last ones of its chunk, each named by the last hash inside it."""
        group = self.groups[one[0]]
        hashes = self.hashes[one[1]]
        step = len(hashes) * group.block_tokens // self.model.chunk
        last = hashes[-1 : -1 - step * group.object_blocks(self.model.chunk) : -step]
        return {(member, name) for member in group.members for name in last}

    @property
    def hashes(self) -> dict[bytes, list[bytes]]:
        """Of each chunk that was stored."""
        found: dict[bytes, list[bytes]] = {}
        for store in self.tap.of(Store):
            if store.contents is not None:
                hashes, keys = split(store.contents.hashes), split(store.keys)
                each = len(hashes) // len(keys)
                found |= {key: hashes[at * each : (at + 1) * each] for at, key in enumerate(keys)}
        return found

    def objects(self, resident: set[tuple[int, Any]]) -> set[Object]:
        """Whose blocks are all on the stream."""
        return {one for one in self.stored() if self.named(one) <= resident}

    def wrong(self, resident: set[tuple[int, Any]]) -> str:
        found = self.objects(resident)
        whole = set().union(*map(self.named, found))
        if resident != whole:
            return f"{len(resident - whole)} blocks of no whole object"
        if not self.evicts and found != self.stored():
            return f"{len(found)} of {len(self.stored())} objects"
        used = self.daemon.status()["l1"]["used_bytes"]
        expected = sum(self.object_bytes(group) for group, _ in found)
        return f"{used} bytes in L1, {expected} on the stream" if used != expected else ""

    def object_bytes(self, number: int) -> int:
        """In whole pages of L1."""
        group, page = self.groups[number], self.daemon.status()["l1"]["page_bytes"]
        kv_cache_groups = self.engines[0].caches.kv_cache_groups
        layers = sum(len(kv_cache_groups[member].layer_names) for member in group.members)
        block_bytes = kv_cache_groups[group.members[0]].kv_cache_spec.real_page_size_bytes
        return -(-layers * group.object_blocks(self.model.chunk) * block_bytes // page) * page

    def boundaries(self) -> list[tuple[int, int]]:
        """(by the stream, by a lookup) of each prompt that was looked up."""
        objects = self.objects(self.resident)
        groups = Groups(self.groups, 1, self.model.chunk)
        found = []
        for number, lookup in enumerate({each.keys: each for each in self.tap.of(Lookup)}.values()):
            chunks = [
                Ready(sum(1 << group for group in range(len(self.groups)) if (group, key) in objects))
                for key in split(lookup.keys)
            ]
            full = groups.full
            leading = next((at for at, chunk in enumerate(chunks) if chunk.ready & full != full), len(chunks))
            with Client(self.daemon.endpoint) as client:
                reply = client.ask(replace(lookup, request_id=f"asks {number}"), LookupReply)
            found.append((groups.boundary(chunks[:leading]), reply.hit_chunks))
        return found


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Hybrid:
    return MODELS[request.param]


@pytest.fixture
def make_scene(
    make_daemon, make_tap, make_forgetful_engine, model, monkeypatch
) -> Iterator[Callable[..., HybridScene]]:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    scenes: list[HybridScene] = []

    def make(**flags: Any) -> HybridScene:
        daemon = make_daemon(start=False, **flags)
        daemon.flags["kv_events_endpoint"] = f"ipc://{daemon.folder}/events"
        daemon.start()
        tap = make_tap(daemon)
        engines = [make_forgetful_engine(tap.endpoint, adjust=events_on, **model.options) for _ in range(2)]
        scenes.append(HybridScene(daemon, engines, tap, model))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.stream.close()


def test_what_is_stored_dropped_and_cleared_is_named_by_group(make_scene, model):
    scene = make_scene()
    one, other = scene.engines
    tokens = prompt(1, 3 * model.chunk + 10)
    answer = one.generate("first turn", tokens, count=3 * model.chunk)
    assert scene.agree()
    if model.kinds != ["full", "local"]:  # whose objects are of whole chunks, which other boundaries need
        assert any(store.dropped for store in scene.stores)
    other.generate("second turn", [*tokens, *answer.tokens, *prompt(2, model.chunk)])
    other.generate("another", prompt(3, 2 * model.chunk + 1))
    assert scene.agree()
    assert {store.group for store in scene.stores} == set(range(len(model.kinds)))
    found = scene.boundaries()
    assert [by_stream for by_stream, _ in found] == [by_lookup for _, by_lookup in found]
    assert all(by_stream for by_stream, _ in found)
    scene.clear()
    assert not scene.agree()
    one.generate("again", prompt(4, 2 * model.chunk + 1))
    assert scene.agree()
    assert scene.daemon.status()["l1"]["evictions"] == 0


def test_what_is_evicted_is_removed_from_every_stream(make_scene, model):
    scene = make_scene(l1_size="96KiB")
    scene.evicts = True
    dice = random.Random(1)
    for number in range(100):
        if number > 14 and scene.daemon.status()["l1"]["evictions"] > 10:
            break
        tokens = prompt(dice.randrange(number // 2 + 2), dice.randrange(1, 5) * model.chunk + dice.choice([1, 10]))
        dice.choice(scene.engines).generate(f"r{number}", tokens, count=dice.choice([1, 1, 2 * model.chunk]))
    else:
        raise AssertionError("nothing is evicted")
    assert scene.agree()
    found = scene.boundaries()
    assert [by_stream for by_stream, _ in found] == [by_lookup for _, by_lookup in found]
    assert any(by_stream for by_stream, _ in found)
