"""KV events of the daemon's tiers, by way of engines without a model and from the daemon itself: both publish the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kv_events_log import Log, events_on
from kv_scene import PER_CHUNK, Scene
from made_up_model import BLOCK, prompt
from model_folder import write_lora
from vllm.lora.request import LoRARequest

CHUNK = PER_CHUNK * BLOCK
TOKENS = prompt(1, 5 * CHUNK + 3)


@pytest.fixture
def make_scene(make_daemon, make_forgetful_engine) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(engines: int = 1, **flags: Any) -> Scene:
        daemon = make_daemon(start=False, **flags)
        daemon.flags["kv_events_endpoint"] = f"ipc://{daemon.folder}/events"
        daemon.start()
        scenes.append(Scene(daemon, [make_forgetful_engine(daemon, adjust=events_on) for _ in range(engines)]))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.stream.close()


def in_chunks(log: Log) -> set[Any]:
    """The blocks of whole chunks that the engine computed, as its own events named them.

    REQUIRES: no two prompts begin alike, and each was computed in one step.
    """
    found: set[Any] = set()
    for event in log.stored("GPU"):
        assert event.parent_block_hash is None or len(event.block_hashes) < PER_CHUNK
        found |= set(event.block_hashes[: len(event.block_hashes) // PER_CHUNK * PER_CHUNK])
    return found


def by_block(events: list[Any]) -> dict[Any, tuple[Any, ...]]:
    """What events state of each block, by its hash."""
    found: dict[Any, tuple[Any, ...]] = {}
    for event in events:
        parent = event.parent_block_hash
        for i, name in enumerate(event.block_hashes):
            tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
            keys = event.extra_keys[i] if event.extra_keys else None
            found[name] = (parent, tokens, event.block_size, event.lora_name, _lists(keys), event.group_idx)
            parent = name
    return found


def _lists(keys: Any) -> Any:
    """What was decoded has lists for tuples."""
    return [_lists(key) for key in keys] if isinstance(keys, (list, tuple)) else keys


@pytest.mark.parametrize("as_int", ["0", "1"], ids=["bytes", "int"])
def test_what_one_engine_stored_all_of_them_announce_by_its_own_names(make_scene, monkeypatch, as_int):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_int)
    scene = make_scene(engines=2)
    scene.engines[0].generate("one", TOKENS)
    assert scene.agree() == in_chunks(scene.logs[0])
    scene.engines[0].generate("two", prompt(2, 3 * CHUNK))
    resident = scene.agree()
    assert resident == in_chunks(scene.logs[0])
    assert len(resident) == 8 * PER_CHUNK
    assert {type(name) for name in resident} == {int if as_int == "1" else bytes}


def test_all_streams_state_the_same_of_a_block(make_scene, tmp_path):
    scene = make_scene()
    lora = LoRARequest("sql", 1, str(write_lora(tmp_path)))
    scene.engines[0].generate("plain", TOKENS)
    scene.engines[0].generate("salted", TOKENS, cache_salt="pepper")
    scene.engines[0].generate("lora", TOKENS, lora_request=lora)
    assert len(scene.agree()) == 15 * PER_CHUNK
    own = by_block(scene.logs[0].stored("GPU"))
    through = by_block(scene.logs[0].stored("CPU"))
    assert through == {name: own[name] for name in through}
    assert by_block(scene.stream.audience.stored("CPU")) == through
    assert {block[3] for block in through.values()} == {None, "sql"}


def test_single_blocks_behind_the_last_chunk_are_stated_as_those_of_chunks(make_scene):
    scene = make_scene(tails="on")
    (engine,) = scene.engines
    engine.generate("long", TOKENS[: 2 * CHUNK] + prompt(3, 2 * BLOCK + 3), cache_salt="pepper", count=1)
    engine.generate("short", prompt(4, BLOCK + 3), count=1)
    resident = scene.agree()
    assert len(resident) == 2 * PER_CHUNK + 2 + 1
    own = by_block(scene.logs[0].stored("GPU"))
    for events in (scene.logs[0].stored("CPU"), scene.stream.audience.stored("CPU")):
        assert by_block(events) == {name: own[name] for name in resident}
    assert scene.daemon.status()["kv_events"]["unannounced"]["undescribed"] == 0


def test_an_engine_announces_what_l2_has_beside_what_l1_has(make_scene, tmp_path):
    scene = make_scene(engines=2, l2=f"file://{tmp_path}/l2?size=64MiB")
    scene.engines[0].generate("one", TOKENS)
    resident = scene.agree()
    written = {(0, name) for name in in_chunks(scene.logs[0])}
    assert {name for _, name in written} == resident
    for log in scene.logs:
        scene.step_until(lambda log=log: log.by_group("STORAGE") == written)
    assert by_block(scene.logs[1].stored("STORAGE")) == by_block(scene.logs[1].stored("CPU"))
    scene.step_until(lambda: scene.stream.by_group("STORAGE") == written)
    scene.clear()
    assert scene.agree() == set()
    for log in scene.logs:
        scene.step_until(lambda log=log: not log.by_group("STORAGE"))


def test_what_is_evicted_is_removed_everywhere(make_scene):
    scene = make_scene(engines=2, l1_size="128KiB")
    for number in range(20):
        scene.engines[number % 2].generate(f"r{number}", prompt(number, 5 * CHUNK + 3))
    resident = scene.agree()
    assert scene.daemon.status()["l1"]["evictions"] > 0
    assert 0 < len(resident) < 60 * PER_CHUNK


def test_what_is_cleared_is_removed_and_no_stream_publishes_all_blocks_cleared(make_scene):
    scene = make_scene(engines=2)
    scene.engines[0].generate("one", TOKENS)
    assert scene.agree()
    clears = scene.stream.audience.clears
    scene.clear()
    assert scene.agree() == set()
    scene.engines[0].generate("two", prompt(2, 3 * CHUNK))
    assert len(scene.agree()) == 3 * PER_CHUNK
    assert [log.clears for log in scene.logs] == [0, 0]
    assert scene.stream.audience.clears == clears


def test_an_engine_that_cleared_its_own_blocks_publishes_the_daemons_again(make_scene):
    scene = make_scene(engines=2)
    scene.engines[0].generate("one", TOKENS)
    resident = scene.agree()
    assert scene.engines[0].scheduler.reset_prefix_cache()
    scene.step_until(lambda: scene.logs[0].clears == 1)
    assert scene.agree() == resident
    assert len(scene.logs[0].stored("CPU")) > len(scene.logs[1].stored("CPU"))


def test_another_daemon_has_none_of_its_blocks(make_scene):
    scene = make_scene(engines=2)
    scene.engines[0].generate("one", TOKENS)
    scene.agree()
    clears = scene.stream.audience.clears
    scene.daemon.kill()
    scene.daemon.start()
    scene.wait_connected(clears)
    assert scene.agree() == set()
    scene.engines[1].generate("two", prompt(2, 3 * CHUNK))
    assert len(scene.agree()) == 3 * PER_CHUNK
    assert [log.clears for log in scene.logs] == [0, 0]


def test_an_engine_of_other_weights_publishes_none_but_its_own(make_scene):
    scene = make_scene(engines=2)
    scene.engines[0].generate("one", TOKENS)
    resident = scene.agree()
    scene.engines[1].weights = 7
    assert scene.engines[1].scheduler.reset_prefix_cache(reset_connector=True)
    scene.step_until(lambda: scene.logs[1].clears == 1 and not scene.logs[1].blocks("CPU"))
    scene.engines[1].generate("two", prompt(2, 3 * CHUNK))
    scene.step_until(lambda: len(scene.logs[1].blocks("CPU")) == 3 * PER_CHUNK)
    assert scene.logs[0].blocks("CPU") == resident
    assert not scene.logs[1].blocks("CPU") & resident


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_at_random_all_end_with_the_same(make_scene, seed):
    source = random.Random(seed)
    scene = make_scene(engines=2, l1_size="192KiB")
    for number in range(40):
        engine = source.choice(scene.engines)
        match source.choices(["serve", "clear", "reset"], [20, 1, 2])[0]:
            case "serve":
                engine.generate(f"r{number}", prompt(source.randrange(20), source.randrange(1, 6) * CHUNK + 1))
            case "clear":
                scene.clear()
            case "reset":
                assert engine.scheduler.reset_prefix_cache()
    scene.engines[0].generate("last", TOKENS)
    assert scene.agree()
