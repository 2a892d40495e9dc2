"""Hand-overs under load while a daemon or the store between two machines is stopped or killed: every answer comes, and is right.

The prefill and the decode server are real, with roles of their own or both `kv_both`, and have one daemon, or a daemon each and Valkey between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import Prompt
from serving import Server
from support.daemon import Daemon, wait_until
from support.store_process import StoreProcess, store_process
from test_vllm_handover import CHUNK, CLIENTS, ROLES, Pair, recomputed, tokens

pytestmark = pytest.mark.long

Make = Callable[..., Prompt]
Act = Callable[[], object]
COUNT = 24  # prompts in each event
WAIT_SECONDS = 5  # of a request for what was handed over


class Stage(NamedTuple):
    pair: Pair
    events: dict[str, tuple[Act, Act]]  # what is done, and what ends it


def of_daemon(name: str, daemon: Daemon) -> dict[str, tuple[Act, Act]]:
    return {f"{name} stopped": (daemon.freeze, daemon.thaw), f"{name} killed": (daemon.kill, daemon.start)}


def of_store(store: StoreProcess) -> dict[str, tuple[Act, Act]]:
    return {
        f"store {act}": (lambda act=act: store.do(act), lambda end=end: store.do(end))  # type: ignore[misc]
        for act, end in (("stop", "go_on"), ("kill", "start"))
    }


@pytest.fixture(scope="module", params=[(role, count) for role in ROLES for count in (1, 2)], ids=str)
def stage(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stage]:
    role, machines = request.param
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        flags = {"l1_size": "512MiB", "chunk_tokens": CHUNK, "tails": "on"}
        events: dict[str, tuple[Act, Act]] = {}
        if machines == 2:
            store = stack.enter_context(store_process("valkey", "chaos"))
            flags["l2"] = store.url
            events |= of_store(store)
        daemons = [Daemon(**flags) for _ in range(machines)]
        for name, daemon in zip(("prefill's daemon", "decode's daemon"), daemons, strict=False):
            stack.callback(daemon.close)
            daemon.start()
            events |= of_daemon(name if machines == 2 else "daemon", daemon)
        extra = {"kvserver.fill_timeout_ms": WAIT_SECONDS * 1000, "kvserver.weights_digest": "whole"}
        options = {"enable_prompt_tokens_details": True, "num_gpu_blocks_override": 400}
        servers = []
        for name, kv_role, daemon in zip(("prefill", "decode"), ROLES[role], (daemons[0], daemons[-1]), strict=True):
            server = Server(model, daemon.endpoint, folder / f"{name}.log", name, extra, kv_role, **options)
            stack.callback(server.close)
            servers.append(server)
        for server in servers:
            server.wait_ready()
        pair = Pair(daemons[-1], *servers, tuple(daemons) if machines == 2 else ())
        pair.wait_registered()
        yield Stage(pair, events)


def wait_answered(answers: list[Future[Any]], count: int, what: str) -> None:
    wait_until(lambda: sum(answer.done() for answer in answers) >= count, 600, what)


def test_answers_are_right_whatever_stops_or_is_killed_in_the_middle_of_hand_overs(stage: Stage, prompt: Make) -> None:
    """No request of a client lasts two minutes, which is many times the deadline of each of its waits."""
    pair = stage.pair
    pair.wait_loads_again(prompt)
    for number, (name, (begin, end)) in enumerate(stage.events.items()):
        prompts = [prompt(20_000 + 100 * number + n, 300 + 50 * n) for n in range(COUNT)]
        with ThreadPoolExecutor(CLIENTS) as clients:
            answers = [clients.submit(pair.decoded, text) for text in prompts]
            wait_answered(answers, CLIENTS, f"{name}: some are answered before")
            begin()
            try:
                wait_answered(answers, COUNT - CLIENTS, f"{name}: they are answered meanwhile")
            finally:
                end()
            found = [tokens(answer.result()) for answer in answers]
        assert found == [recomputed(pair, text) for text in prompts], name
        pair.wait_loads_again(prompt)
