"""Two real servers, one daemon, and the example router before them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import Prompt
from serving import Server, completion
from support.daemon import Daemon, fetch, wait_until
from support.ports import reserved_port

FILE = Path(__file__).parent.parent.parent / "deploy/router/router.py"
NAMES = ("one", "two")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    daemon = Daemon(l1_size="256MiB", chunk_tokens=256).start()
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def servers(model: Path, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("servers")
    started = {}
    try:
        for name in NAMES:
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"ipc://{folder}/{name}.events",
                "replay_endpoint": f"ipc://{folder}/{name}.replay",
            }
            started[name] = Server(
                *(model, daemon.endpoint, folder / f"{name}.log", name, {"kvserver.load_interval_ms": 50}),
                kv_events_config=json.dumps(events),
            )
        for server in started.values():
            server.wait_ready()
        wait_until(lambda: len(daemon.status()["instances"]) == 2, 30, "both are registered")
        yield started
    finally:
        for server in started.values():
            server.close()


class Router:
    """The example, run as its README describes."""

    def __init__(self, daemon: Daemon, servers: dict[str, Server]) -> None:
        self._reservation, port = reserved_port()
        self.url = f"http://127.0.0.1:{port}"
        engines = [text for name, server in servers.items() for text in ("--engine", f"{name}={server.url}")]
        self.process = subprocess.Popen(
            [
                *(sys.executable, str(FILE), "--port", str(port)),
                *("--daemon", f"http://127.0.0.1:{daemon.http_port}", *engines),
                *("--tokenize-seconds", "2", "--match-seconds", "2"),  # a busy machine's
            ]
        )
        wait_until(self._answers, 20, "the router listens")

    def _answers(self) -> bool:
        try:
            return fetch(self.url + "/health")[0] == 200
        except OSError:
            return False

    def complete(self, prompt: Prompt, count: int = 4) -> tuple[str, list[int]]:
        """(which engine answered, its tokens)."""
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(completion(prompt, count)).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.headers["x-kvserver-engine"], json.load(answer)["choices"][0]["token_ids"]

    @property
    def guesses(self) -> int:
        number: int = json.loads(fetch(self.url + "/router")[1])["guesses"]
        return number

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self._reservation.close()


@pytest.fixture
def router(daemon: Daemon, servers: dict[str, Server]) -> Iterator[Router]:
    router = Router(daemon, servers)
    yield router
    router.close()


def matched(daemon: Daemon, prompt: Prompt) -> dict[str, int]:
    """Blocks of the prompt in the engines' own memory, by engine."""
    body = json.dumps({"model": "tiny", "tokens": prompt}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{daemon.http_port}/kv/match", body)
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return {row["instance_id"]: row["l0"] for row in json.load(answer)["instances"]}


def idle(daemon: Daemon) -> None:
    def none() -> bool:
        loads: list[dict[str, Any] | None] = [row["load"] for row in daemon.status()["instances"]]
        return all(load is not None and not load["running"] + load["waiting"] for load in loads)

    wait_until(none, 20, "no engine has work")


def test_a_repeated_prompt_goes_to_the_engine_that_holds_it(
    daemon: Daemon, servers: dict[str, Server], router: Router, prompt: Callable[..., Prompt]
) -> None:
    prompts = [prompt(number, 1000) for number in range(4)]
    owners, answers = zip(*(router.complete(words) for words in prompts), strict=True)
    assert set(owners) == set(NAMES), "prompts that no engine holds spread"
    for words, owner in zip(prompts, owners, strict=True):
        wait_until(lambda w=words, h=owner: matched(daemon, w)[h] >= 30, 20, "the daemon knows who holds it")
    idle(daemon)
    for _ in range(2):
        for words, owner, tokens in zip(prompts, owners, answers, strict=True):
            assert router.complete(words) == (owner, tokens)
            idle(daemon)
    assert router.guesses == 0


def test_requests_are_answered_while_the_daemon_is_stopped(
    daemon: Daemon, servers: dict[str, Server], router: Router, prompt: Callable[..., Prompt]
) -> None:
    daemon.freeze()
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda number: router.complete(prompt(50 + number, 40), 30), range(4)))
    finally:
        daemon.thaw()
    assert {name for name, _ in found} == set(NAMES)
    assert all(len(tokens) == 30 for _, tokens in found)
    assert router.guesses == 4


def test_requests_are_answered_when_an_engine_has_ended(
    daemon: Daemon, servers: dict[str, Server], router: Router, prompt: Callable[..., Prompt]
) -> None:
    """Comes last: the engine stays away."""
    servers["two"].close()
    assert [router.complete(prompt(90 + number, 40))[0] for number in range(4)] == ["one"] * 4
