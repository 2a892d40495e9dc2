"""Two daemons with one store, standing for two machines: what one wrote the other finds, and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.mooncake import MooncakeStore
from support.pins import KEYS, TOKENS, describe, post
from support.registration import identity
from support.shared_tiers import SharedStore
from support.valkey import ValkeyStore
from support.worker import Worker, make_keys

from kvserver.protocol import AwaitFill, Clear, Cleared, HandOver, LookupReply, ObjectGroup


@pytest.fixture(scope="module", params=[ValkeyStore, MooncakeStore])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStore]:
    server: SharedStore = request.param(tmp_path_factory.mktemp("store"))
    yield server
    server.close()


@pytest.fixture
def daemons(store: SharedStore, make_daemon: Callable[..., Daemon], request: pytest.FixtureRequest) -> list[Daemon]:
    url = store.url_of(request.node.name.replace("[", "-").replace("]", ""))
    found = [make_daemon(l2=url, l1_size="16MiB") for _ in range(2)]
    for daemon in found:
        daemon.wait_for_tiers()
    return found


def store_in(daemon: Daemon, keys: list[bytes], variant: str = "", **options: Any) -> list[bytes]:
    with Worker(daemon.endpoint, **options) as worker:
        blocks = worker.blocks_for(len(keys))
        content = worker.memory.blocks(blocks)
        worker.store(keys, blocks, variant=variant)
        wait_until(lambda: (found := daemon.tier())["written_objects"] >= len(keys) and not found["queue_objects"])
        return content


def test_a_second_daemon_hits_at_its_first_lookup(daemons: list[Daemon]) -> None:
    keys = make_keys(10)
    content = store_in(daemons[0], keys)
    with Worker(daemons[1].endpoint) as worker:
        reply = worker.ask(worker.lookup_message(keys), LookupReply)
        assert (reply.hit_chunks, reply.fill_chunks) == (0, 10)
        assert worker.fill(keys) == 10
        assert worker.loaded(keys) == content
    with Worker(daemons[1].endpoint, layout="other") as other:
        assert other.fill(keys) == 0, "an engine that may not share"


def test_what_an_engine_of_another_daemon_has_promised_is_awaited(daemons: list[Daemon]) -> None:
    keys = make_keys(10)
    with Worker(daemons[1].endpoint) as worker:
        assert worker.fill(keys) == 0, "from now on all is known to be absent"
        promise = HandOver("a prefill engine", 10 * worker.hello.chunk_tokens)
        number = worker.send(AwaitFill(worker.lookup_message(keys, handed_over=promise), 10_000))
        content = store_in(daemons[0], keys)
        reply = worker.reply_to(number)
        assert isinstance(reply, LookupReply)
        assert (reply.hit_chunks, reply.l2_chunks) == (10, 10)
        assert worker.loaded(keys) == content


def test_blocks_of_a_tail_that_another_daemon_keeps_are_no_lost_hand_over(daemons: list[Daemon]) -> None:
    keys, options = make_keys(3), {"groups": (ObjectGroup("full", (0,), 16),), "tails": True}
    store_in(daemons[0], keys, **options)
    with Worker(daemons[1].endpoint, **options) as worker:
        promise = HandOver("a prefill engine", 3 * worker.hello.chunk_tokens + 16)
        lookup = worker.lookup_message(keys, handed_over=promise, tail_keys=b"".join(make_keys(1, "tail")))
        assert worker.ask(AwaitFill(lookup, 5_000), LookupReply).hit_chunks == 3
        assert worker.ask(lookup, LookupReply).hit_chunks == 3
        (row,) = daemons[1].status()["instances"]
        assert row["requests"]["lost_handovers"] == 0


DIFFERENT: dict[str, dict[str, Any]] = {
    "vllm": {"vllm": "0.33.0"},
    "weights": {"weights": "sha256:other"},
    "dtype": {"dtype": "float16"},
    "kv_dtype": {"kv_dtype": "fp8"},
    "instruction set": {"device": "cpu X86 AVX2"},
    "gpu": {"device": "cuda 9.0"},
    "lora": {"variant": "chain/another-lora"},
    "no lora": {"variant": "chain"},
    "chain": {"variant": "another-chain/lora"},
}


def test_engines_that_differ_in_one_fact_share_nothing(daemons: list[Daemon]) -> None:
    """Between two machines; that an engine states each of them: adapters/test_durability.py."""
    facts = {"vllm": "0.32.0", "weights": "sha256:one", "device": "cpu X86 AVX512"}
    keys, variant = make_keys(3), "chain/lora"
    store_in(daemons[0], keys, identity=identity(**facts), variant=variant)

    def found(**changes: str) -> int:
        of_lora = changes.pop("variant", variant)
        with Worker(daemons[1].endpoint, identity=identity(**{**facts, **changes})) as worker:
            return worker.fill(keys, wait_ms=10_000, variant=of_lora)

    for _ in range(2):  # after slow probes the answer of one may serve only the next lookup
        assert {name: found(**other) for name, other in DIFFERENT.items()} == dict.fromkeys(DIFFERENT, 0)
        wait_until(lambda: found() == len(keys), 60, "an engine that differs in nothing finds them")


def test_a_prefetch_asks_the_store_and_its_request_finds_all_in_l1(daemons: list[Daemon]) -> None:
    store_in(daemons[0], KEYS)
    with Worker(daemons[1].endpoint) as worker:
        describe(worker)

        def begun() -> dict[str, Any] | None:
            _, found = post(daemons[1], page="/cache/prefetches", tokens=TOKENS)
            return found if found.get("id") else None

        assert wait_until(begun, what="the engine is described")["outcome"] == "deferred"

        def listed() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(daemons[1].http("/cache/prefetches")[1])["prefetches"][0]
            return found

        wait_until(lambda: listed()["ready_in_seconds"] == 0, what="all is read")
        assert (listed()["outcome"], listed()["tokens"]) == ("accepted", len(TOKENS))
        reply = worker.ask(worker.lookup_message(KEYS), LookupReply)
        assert (reply.hit_chunks, reply.fill_chunks) == (len(KEYS), 0)


def test_machine_only_kv_is_written_to_tiers_of_its_machine_only(
    store: SharedStore, make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    url = store.url_of("machine-only")
    daemon = make_daemon(l2=[f"file://{tmp_path}/l2?size=64MiB", url], l1_size="16MiB")
    daemon.wait_for_tiers()
    with Worker(daemon.endpoint, connect_now=False) as worker:
        worker.attach()
        worker.register(machine_only="samples of its files name them")
        worker.store(make_keys(3), worker.blocks_for(3))
        with Worker(daemon.endpoint) as other:
            other.store(make_keys(1), other.blocks_for(1))
        wait_until(lambda: all(one["written_objects"] and not one["queue_objects"] for one in daemon.status()["l2"]))
        assert [one["written_objects"] for one in daemon.status()["l2"]] == [4, 1]


def test_clear_by_one_daemon_clears_for_the_other(daemons: list[Daemon]) -> None:
    keys = make_keys(4)
    store_in(daemons[0], keys)
    with Worker(daemons[0].endpoint) as worker:
        worker.ask(Clear(), Cleared)
    with Worker(daemons[1].endpoint) as worker:
        assert worker.fill(keys) == 0


def test_a_stopped_server_costs_a_bounded_wait_and_hits_come_back(store: SharedStore, daemons: list[Daemon]) -> None:
    keys = make_keys(4)
    store_in(daemons[0], keys)
    with Worker(daemons[1].endpoint) as worker:
        store.stop()
        try:
            began = time.monotonic()
            assert worker.fill(keys, wait_ms=500) == 0
            assert time.monotonic() - began < 5
            others = make_keys(3)
            worker.store(others, worker.blocks_for(3))
            assert worker.lookup(others) == 3, "L1 works meanwhile"
        finally:
            store.go_on()
        wait_until(lambda: worker.fill(keys, wait_ms=1000) == 4, 60)
