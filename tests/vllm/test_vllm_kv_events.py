"""A real vLLM with KV events on, and a daemon that publishes too: both streams publish the same of the daemon's tiers.

The engine is driven by its caller, so it publishes when it is given short requests to serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_models
from engines import TIMEOUTS, Engines, Prompt, engine_group
from support.daemon import Daemon, wait_until
from support.kv_audience import Subscriber
from vllm.distributed.kv_events import KVEventBatch

from kvserver.protocol import Clear, Cleared
from kvserver.protocol.client import Client

CHUNK = 256
PER_CHUNK = CHUNK // 32
TOPIC = "kv"
Make = Callable[..., Prompt]


class Scene:
    """One engine with its stream, and the daemon on its endpoint with its own. close() at the end."""

    def __init__(self, group: Engines, form: str) -> None:
        self._group = group
        self._endpoint = f"{group.endpoint}.{form}"
        self.engine_stream = Subscriber(f"{self._endpoint}.engine", KVEventBatch, TOPIC)
        self.engine = group.start(
            form,
            endpoint=self._endpoint,
            dtype="float32",
            extra=TIMEOUTS,
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"{self._endpoint}.engine",
                "topic": TOPIC,
            },
            environ={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1" if form == "int" else "0"},
        )
        self._daemons: list[Daemon] = []
        self._streams = [self.engine_stream]
        self._forgotten = 0

    def start_daemon(self, **flags: object) -> tuple[Daemon, Subscriber]:
        """A new one, and its stream from its first word on."""
        for old in self._daemons:
            old.close()
        events = f"{self._endpoint}.daemon"
        flags = {"endpoint": self._endpoint, "l1_size": "256MiB", "chunk_tokens": CHUNK} | flags
        daemon = Daemon(kv_events_endpoint=events, **flags)
        self._daemons.append(daemon)
        stream = Subscriber(events, KVEventBatch)
        self._streams.append(stream)
        daemon.start()
        self.wait_known(daemon, stream, 0)
        return daemon, stream

    def wait_known(self, daemon: Daemon, stream: Subscriber, clears: int) -> None:
        """Until the engine has registered, and the subscriber has received its stream."""
        self.engine.wait_ready()
        wait_until(lambda: any(i["namespace"] for i in daemon.status()["instances"]), 30)
        wait_until(lambda: self.step() and stream.audience.clears > clears, 30)

    def step(self) -> bool:
        """A short request, of which nothing is stored."""
        self.engine.generate([[7, 8, 9]], max_tokens=2)
        return True

    def forget(self) -> None:
        """The engine's own blocks, which vLLM reports by AllBlocksCleared."""
        self._forgotten += 1
        self.engine.forget()

    def agree(self, daemon: Daemon, stream: Subscriber) -> set[Any]:
        """The blocks of L1 by both streams, as soon as they agree with the daemon's /status."""

        def same() -> bool:
            self.step()
            resident = stream.blocks("CPU")
            return (
                len(resident) == daemon.status()["l1"]["chunks"] * PER_CHUNK
                and self.engine_stream.blocks("CPU") == resident
            )

        wait_until(same, 30)
        assert self.engine_stream.audience.clears == self._forgotten, "an AllBlocksCleared that is not vLLM's"
        return stream.blocks("CPU")

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        for daemon in self._daemons:
            daemon.close()
        self.engine.kill()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engine_group(tiny_models.llama(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("engines")) as made:
        yield made


@pytest.fixture(scope="module")
def scenes(group: Engines) -> Iterator[Callable[[str], Scene]]:
    """By form of hashes; each engine starts when it is first needed."""
    made: dict[str, Scene] = {}

    def get(form: str) -> Scene:
        if form not in made:
            made[form] = Scene(group, form)
        return made[form]

    yield get
    for scene in made.values():
        scene.close()


def own(scene: Scene, since: int) -> set[Any]:
    """Blocks that the engine published as in its own memory, in its events from the `since`-th on."""
    events = scene.engine_stream.audience.events[since:]
    return {h for e in events if type(e).__name__ == "BlockStored" and e.medium == "GPU" for h in e.block_hashes}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return bool(left["tokens"] == right["tokens"] and left["logprobs"] == right["logprobs"])


@pytest.mark.parametrize(("form", "kind"), [("int", int), pytest.param("bytes", bytes, marks=pytest.mark.long)])
def test_both_streams_name_what_was_stored_as_the_engine_names_it(
    scenes: Callable[[str], Scene], prompt: Make, form: str, kind: type
) -> None:
    scene = scenes(form)
    daemon, stream = scene.start_daemon()
    assert scene.agree(daemon, stream) == set()
    scene.forget()
    before = len(scene.engine_stream.audience.events)
    prompts = [prompt(1, 2 * CHUNK), prompt(2, CHUNK)]
    cold = scene.engine.generate(prompts, max_tokens=4)
    scene.engine.wait_for_stores()
    resident = scene.agree(daemon, stream)
    assert resident == own(scene, before)
    assert len(resident) == 3 * PER_CHUNK
    assert {type(name) for name in resident} == {kind}

    scene.forget()
    warm = scene.engine.generate(prompts, max_tokens=4)
    assert scene.engine.counters()["worker"]["loaded"] > 0
    assert all(same(a, b) for a, b in zip(cold, warm, strict=True))
    assert scene.agree(daemon, stream) == resident, "published again after vLLM's clear"


def test_what_is_evicted_or_cleared_is_removed_from_both_streams(scenes: Callable[[str], Scene], prompt: Make) -> None:
    scene = scenes("int")
    daemon, stream = scene.start_daemon(l1_size="8MiB")
    for seed in range(10, 16):
        scene.engine.generate([prompt(seed, 2 * CHUNK)], max_tokens=2)
        scene.engine.wait_for_stores()
    assert scene.agree(daemon, stream)
    assert daemon.status()["l1"]["evictions"] > 0
    with Client(daemon.endpoint) as client:
        client.ask(Clear(), Cleared)
    assert scene.agree(daemon, stream) == set()
    scene.engine.generate([prompt(16, 2 * CHUNK)], max_tokens=2)
    scene.engine.wait_for_stores()
    assert len(scene.agree(daemon, stream)) == 2 * PER_CHUNK


def test_after_a_daemon_died_the_next_ones_blocks_are_published(scenes: Callable[[str], Scene], prompt: Make) -> None:
    scene = scenes("int")
    daemon, stream = scene.start_daemon()
    scene.engine.generate([prompt(21, 2 * CHUNK)], max_tokens=2)
    scene.engine.wait_for_stores()
    assert scene.agree(daemon, stream)
    clears = stream.audience.clears
    daemon.kill()
    daemon.start()
    scene.wait_known(daemon, stream, clears)
    assert scene.agree(daemon, stream) == set()
    scene.engine.generate([prompt(22, CHUNK)], max_tokens=2)
    scene.engine.wait_for_stores()
    assert len(scene.agree(daemon, stream)) == PER_CHUNK
