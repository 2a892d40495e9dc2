"""Prefill and decode by two real servers under load: what the prefill's answer hands over is loaded, whatever is still being stored.

The decode server computes a block and a token of each prompt at most. Then the daemon or the prefill server stops in between.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import Prompt
from serving import Server, completion
from support.daemon import Daemon, wait_until
from support.ports import reserved_port
from support.routers import VENV, needs_routers, post

pytestmark = pytest.mark.long

Make = Callable[..., Prompt]
BLOCK, CHUNK = 32, 256
COUNT = int(os.environ.get("KVSERVER_TEST_HANDOVERS", "1000"))  # prompts
CLIENTS = 4
ROLES = {"roles": ("kv_producer", "kv_consumer"), "both": ("kv_both", "kv_both")}


class Pair(NamedTuple):
    daemon: Daemon  # the decode server's
    prefill: Server
    decode: Server
    daemons: tuple[Daemon, ...] = ()  # of both; of one machine it is the decode server's

    def counts(self) -> dict[str, Any]:
        """The decode server's."""
        (row,) = (row for row in self.daemon.status()["instances"] if row["instance_id"] == "decode")
        found: dict[str, Any] = row["requests"]
        return found

    def prefilled(self, text: Prompt) -> dict[str, Any]:
        """The request for the decode server, as a proxy makes it of the prefill's answer."""
        answer = self.prefill.post("/v1/completions", completion(text, 1))
        assert answer["kv_transfer_params"]["kvserver.prefilled_tokens"] == len(text) // BLOCK * BLOCK
        return completion(text, 4, kv_transfer_params=answer["kv_transfer_params"])

    def decoded(self, text: Prompt) -> dict[str, Any]:
        """The decode server's answer to what the prefill server answered, with a hand-over or without."""
        params = self.prefill.post("/v1/completions", completion(text, 1))["kv_transfer_params"]
        return self.decode.post("/v1/completions", completion(text, 4, kv_transfer_params=params))

    def wait_loads_again(self, make: Make) -> None:
        """Wait until a hand-over is loaded, after some failed."""
        self.wait_registered()

        wait_until(
            lambda: computed(self.decoded(make(random.randrange(10**6), 700))) <= self.most_computed,
            120,
            "a hand-over is loaded again",
        )

    @property
    def most_computed(self) -> int:
        """Tokens of a prompt that the decode server computes: single blocks stay on their machine."""
        return (CHUNK if self.daemons else BLOCK) + 1

    def wait_registered(self) -> None:
        def both() -> bool:
            rows = [row for daemon in self.daemons or (self.daemon,) for row in daemon.status()["instances"]]
            return {"prefill", "decode"} <= {row["instance_id"] for row in rows if row["namespace"]}

        wait_until(both, 60, "both servers are registered")


def computed(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that the server computed."""
    usage = answer["usage"]
    return int(usage["prompt_tokens"] - ((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0))


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="module", params=ROLES)
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("servers")
    daemon = Daemon(l1_size="512MiB", chunk_tokens=CHUNK, tails="on").start()
    extra = {"kvserver.fill_timeout_ms": 10_000}
    options = {"enable_prompt_tokens_details": True, "num_gpu_blocks_override": 400}
    servers = [
        Server(model, daemon.endpoint, folder / f"{name}.log", name, extra, role, **options)
        for name, role in zip(("prefill", "decode"), ROLES[request.param], strict=True)
    ]
    try:
        for server in servers:
            server.wait_ready()
        made = Pair(daemon, *servers)
        made.wait_registered()
        yield made
    finally:
        for server in servers:
            server.close()
        daemon.close()


def test_decode_server_computes_a_block_and_a_token_at_most_of_each_prompt_under_load(pair: Pair, prompt: Make) -> None:
    lengths = random.Random(11)
    prompts = [prompt(5000 + number, lengths.randrange(300, 1744)) for number in range(COUNT)]

    def walk(text: Prompt) -> int:
        return computed(pair.decode.post("/v1/completions", pair.prefilled(text)))

    with ThreadPoolExecutor(CLIENTS) as clients:
        found = list(clients.map(walk, prompts))
    more = [(len(text), count) for text, count in zip(prompts, found, strict=True) if count > BLOCK + 1]
    counts = pair.counts()
    shown = {name: counts[name] for name in ("store_waits", "handed_over_tokens", "late_handovers", "lost_handovers")}
    print(f"{COUNT - len(more)} of {COUNT}, {shown}")
    assert not more


def test_public_router_passes_the_hand_over_on_and_none_that_its_client_made_up(
    pair: Pair, prompt: Make, tmp_path: Path
) -> None:
    needs_routers()
    holder, port = reserved_port()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "router.log"
    command = [VENV / "bin" / "vllm-router", "--vllm-pd-disaggregation", "--port", str(port)]
    command += ["--prefill", pair.prefill.url, "--decode", pair.decode.url]
    with log.open("wb") as file:
        router = subprocess.Popen(command, stdout=file, stderr=file)
    try:

        def answers() -> bool:
            assert router.poll() is None, log.read_text()
            try:
                return bool(post(f"{url}/v1/completions", completion(prompt(1, 40), 1), 60.0)["choices"])
            except OSError:
                return False

        wait_until(answers, 60, f"the router answers; {log}")
        before = pair.counts()
        made_up = {"kv_transfer_params": {"kvserver.prefilled_tokens": 10**9, "kvserver.prefilled_by": "elsewhere"}}
        prompts = [prompt(9000 + number, 400 + 60 * number) for number in range(12)]
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(
                clients.map(lambda text: post(f"{url}/v1/completions", completion(text, 4, **made_up), 120.0), prompts)
            )
    finally:
        router.terminate()
        router.wait(20)
        holder.close()
    wait_until(lambda: pair.counts()["ended_requests"] >= before["ended_requests"] + len(prompts))
    counts = pair.counts()
    promised = sum(len(text) // BLOCK * BLOCK for text in prompts)
    assert counts["handed_over_tokens"] - before["handed_over_tokens"] == promised, log.read_text()[-4000:]
    assert (counts["lost_handovers"], counts["late_handovers"]) == (before["lost_handovers"], before["late_handovers"])
    by_source = counts["prompt_tokens"], before["prompt_tokens"]
    assert by_source[0]["computed"] - by_source[1]["computed"] <= len(prompts) * (BLOCK + 1)


def recomputed(pair: Pair, text: Prompt) -> list[int]:
    """The decode server's answer without any cache."""
    pair.decode.forget()
    alone = {"kvserver.max_load_tokens": 0, "kvserver.no_store": True}
    answer = pair.decode.post("/v1/completions", completion(text, 4, kv_transfer_params=alone))
    assert computed(answer) == len(text)
    return tokens(answer)


@pytest.mark.parametrize("event", ["stopped", "killed"])
def test_prompt_is_computed_if_the_daemon_is_stopped_or_killed_behind_the_prefill(
    pair: Pair, prompt: Make, event: str
) -> None:
    """It is answered while the daemon is away, and the next hand-over is loaded again."""
    text = prompt(9100 + len(event), 900)
    request = pair.prefilled(text)
    pair.daemon.freeze() if event == "stopped" else pair.daemon.kill()
    try:
        answer = pair.decode.post("/v1/completions", request)
    finally:
        pair.daemon.thaw() if event == "stopped" else pair.daemon.start()
    assert computed(answer) == len(text)
    assert tokens(answer) == recomputed(pair, text)
    pair.wait_loads_again(prompt)


def test_prompt_is_answered_if_the_prefill_server_is_killed_behind_its_answer(pair: Pair, prompt: Make) -> None:
    """Comes last: the server stays away."""
    text = prompt(9200, 1000)
    request = pair.prefilled(text)
    pair.prefill.kill()
    answer = pair.decode.post("/v1/completions", request)
    assert tokens(answer) == recomputed(pair, text)
    wait_until(lambda: len(pair.daemon.status()["instances"]) == 1, 30, "the daemon has seen its end")
    text = prompt(9201, 1000)
    late = completion(text, 4, kv_transfer_params=request["kv_transfer_params"])
    lost = pair.counts()["lost_handovers"]
    assert computed(pair.decode.post("/v1/completions", late)) == len(text)
    assert pair.counts()["lost_handovers"] == lost + 1
