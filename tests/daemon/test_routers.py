"""Routers of others beside real daemons: what Dynamo's indexer and vLLM's router make of their KV events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until
from support.kv_chunks import Prompt
from support.kv_feed import describe, named, namespace_prefix
from support.kv_publisher import Published
from support.kv_subscriber import Subscriber
from support.memory import two_groups
from support.ports import reserved_port
from support.routers import MODEL, DynamoIndexer, VllmRouter, needs_routers
from support.worker import Worker

from kvserver.kv_events.types import KVChunk
from kvserver.protocol import KVGroup, ObjectGroup

pytestmark = pytest.mark.long
BLOCK = 16
MakeWorker = Callable[..., Worker]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    needs_routers()
    with ExitStack() as made:
        yield made


@pytest.fixture
def make_endpoint(stack: ExitStack) -> Callable[[], str]:
    def make() -> str:
        holder, port = reserved_port()
        stack.enter_context(holder)
        return f"tcp://127.0.0.1:{port}"

    return make


def prompt(first: int, chunks: int = 2) -> Prompt:
    return Prompt(range(first, first + 64 * chunks), chunk_blocks=4, block=BLOCK)


def store(worker: Worker, of: Prompt) -> None:
    worker.store(of.keys, worker.blocks_for(len(of.keys)), contents=of.contents())


def connected(worker: Worker, groups: Sequence[KVGroup] = (KVGroup("full_attention"),)) -> Worker:
    worker.send(worker.description(hash_form="int", groups=groups))
    return worker


def tokens_in_l1(indexer: DynamoIndexer, tokens: Sequence[int], number: int = 1) -> int:
    """Of a prompt, from its start, for that worker."""
    return indexer.tokens(tokens).get(str(number), {}).get("cpu", 0)


def test_vllms_router_sends_each_prompt_to_the_machine_that_has_it(
    make_daemon: Callable[..., Daemon],
    make_worker: MakeWorker,
    make_endpoint: Callable[[], str],
    stack: ExitStack,
    tmp_path: Path,
) -> None:
    endpoints = [make_endpoint(), make_endpoint()]
    workers = [connected(make_worker(make_daemon(kv_events_endpoint=at))) for at in endpoints]
    router = stack.enter_context(closing(VllmRouter(tmp_path, endpoints, BLOCK)))
    prompts = [prompt(1000 * number) for number in range(24)]
    for number, each in enumerate(prompts):
        store(workers[number % 2], each)
    wait_until(lambda: [router.chosen(each.tokens) for each in prompts] == [0, 1] * 12, what="all 24 are right")


def test_an_indexer_that_waits_for_the_daemon_needs_no_replay(
    make_daemon: Callable[..., Daemon],
    make_worker: MakeWorker,
    make_endpoint: Callable[[], str],
    stack: ExitStack,
    tmp_path: Path,
) -> None:
    endpoint = make_endpoint()
    indexer = stack.enter_context(closing(DynamoIndexer(tmp_path)))
    indexer.register(1, endpoint, BLOCK)
    worker = connected(make_worker(make_daemon(kv_events_endpoint=endpoint)))
    prompts = [prompt(1000 * number) for number in range(20)]
    for each in prompts:
        store(worker, each)
    wait_until(
        lambda: [tokens_in_l1(indexer, each.tokens) for each in prompts] == [128] * 20,
        what="all 20 prompts are in the index",
    )


def test_an_indexer_that_is_late_replays_what_it_missed(
    make_daemon: Callable[..., Daemon],
    make_worker: MakeWorker,
    make_endpoint: Callable[[], str],
    stack: ExitStack,
    tmp_path: Path,
) -> None:
    endpoint, replay = make_endpoint(), make_endpoint()
    daemon = make_daemon(kv_events_endpoint=endpoint, kv_events_replay_endpoint=replay)
    subscriber = stack.enter_context(closing(Subscriber(endpoint, replay)))
    worker = connected(make_worker(daemon))
    early, late = prompt(0), prompt(1000)
    store(worker, early)
    subscriber.follow(lambda: len(subscriber.blocks.resident) == len(early.hashes))
    indexer = stack.enter_context(closing(DynamoIndexer(tmp_path)))
    indexer.register(1, endpoint, BLOCK, replay)
    store(worker, late)
    wait_until(
        lambda: [tokens_in_l1(indexer, each.tokens) for each in (early, late)] == [128] * 2,
        what="both prompts are in the index",
    )


def test_routers_see_the_full_attention_of_an_engine_whose_first_group_is_a_window(
    make_daemon: Callable[..., Daemon],
    make_worker: MakeWorker,
    make_endpoint: Callable[[], str],
    stack: ExitStack,
    tmp_path: Path,
) -> None:
    endpoints = [make_endpoint(), make_endpoint()]
    daemons = [make_daemon(kv_events_endpoint=at) for at in endpoints]
    groups = (ObjectGroup("full", (1,), BLOCK), ObjectGroup("window", (0,), BLOCK, tokens=31))
    workers = [make_worker(daemon, geometry=two_groups(), groups=groups) for daemon in daemons]
    indexer = stack.enter_context(closing(DynamoIndexer(tmp_path)))
    router = stack.enter_context(closing(VllmRouter(tmp_path, endpoints, BLOCK)))
    for number, endpoint in enumerate(endpoints):
        indexer.register(number, endpoint, BLOCK)
        connected(workers[number], groups=(KVGroup("sliding_window", 32), KVGroup("full_attention")))
    one, other = prompt(0), prompt(1000)
    for worker, each in zip(workers, (one, other), strict=True):
        store(worker, each)
        worker.store(each.keys[1:], range(40, 42), group=1)
    wait_until(lambda: [router.chosen(each.tokens) for each in (one, other)] == [0, 1], what="each goes to its machine")
    wait_until(
        lambda: [tokens_in_l1(indexer, one.tokens, 0), tokens_in_l1(indexer, other.tokens, 1)] == [128] * 2,
        what="both are in the index",
    )


def test_an_indexer_that_never_saw_a_window_stored_loses_nothing_by_its_removal(
    stack: ExitStack, tmp_path: Path
) -> None:
    """Blocks of full attention and of a window have the same hashes."""
    here = namespace_prefix("weights")
    published = stack.enter_context(closing(Published(kv_events_replay_endpoint="")))
    groups = (KVGroup("sliding_window", 32), KVGroup("full_attention"))
    published.feed.reader_connected("engine", here, MODEL, groups=groups)
    window = KVChunk(named("b"), describe("b", parent="a", members=(0,)))
    full = KVChunk(named("b"), describe("a", "b", members=(1,)))
    last = KVChunk(named("c"), describe("c", parent="b", members=(1,)))
    tokens = [*range(32), *range(16)]
    published.feed.stored(here, window)
    published.catch_up(published.subscriber())
    indexer = stack.enter_context(closing(DynamoIndexer(tmp_path)))
    indexer.register(1, published.stream().endpoint, BLOCK)
    wait_until(lambda: published.stream().subscribers == 2, what="the indexer has subscribed")
    published.feed.stored(here, full)
    published.feed.removed(here, window)
    published.feed.stored(here, last)
    wait_until(lambda: tokens_in_l1(indexer, tokens) == 48, what="the last event has arrived")
