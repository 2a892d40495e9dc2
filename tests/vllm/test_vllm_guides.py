"""The commands of `deploy/guides` that need vLLM, with a real one. The others of their pages run in `daemon/test_guides.py`.

Changed are ports, home, and the model: a tiny one in a folder, with the flags by which it runs on a CPU without a tokenizer. vLLM's package for
CPUs has another name, so `vllm serve` is a function that starts the same server by its module.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import runner_v2
from support.guides import END, GUIDES, at_port, blocks_of, carried_out, environment_of
from support.ports import reserved_port

FLAGS = "--dtype float32 --max-model-len 2048 --num-gpu-blocks-override 200 --enforce-eager --skip-tokenizer-init"
ON_A_CPU = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
PROMPT = [7 * number % 1000 for number in range(900)]
FUNCTIONS = f"""{END}
vllm() {{ shift 2; exec nice {sys.executable} -m vllm.entrypoints.openai.api_server --model "$MODEL" --port ENGINE {FLAGS} "$@"; }}
is_up() {{ until curl -sf localhost:ENGINE/health; do kill -0 $engine; sleep 0.5; done; }}
ask() {{ curl -sSf localhost:ENGINE/v1/completions -H 'content-type: application/json' \\
  -d '{json.dumps({"model": "MODEL", "prompt": PROMPT, "max_tokens": 1})}'; }}
"""


class Guides:
    """The pages' blocks as lines of one script."""

    def __init__(self, model: Path, home: Path) -> None:
        self._reservations = [reserved_port(), reserved_port()]
        (_, self._port), (_, self._engine_port) = self._reservations
        self._home = home
        self._model = model

    def lines_of(self, page: str, word: str = "", needs: str = "") -> list[str]:
        """Of the blocks of this page with this word; with `needs`, of those alone. An engine has its pid in $engine."""
        (guide,) = [guide for guide in GUIDES if guide.stem == page]
        found = []
        for block in blocks_of(guide):
            if block.needs in ("", "vllm") and word in block.commands and (not needs or block.needs == needs):
                commands = at_port(at_port(block.commands, self._port), self._engine_port, 8000)
                if "vllm serve" in commands:
                    commands = re.sub(r" --port 8000", "", commands).removesuffix("&") + " &\nengine=$!"
                found.append(f"# {block}\n{commands}")
        assert found, f"{page} has no such block"
        return found

    def run(self, lines: list[str]) -> str:
        """What they print. AssertionError if one fails."""
        script = "\n".join([FUNCTIONS, *lines]).replace("ENGINE", str(self._engine_port))
        script = script.replace('"MODEL"', f'"{self._model}"')
        (self._home / "run/kvserver").mkdir(mode=0o700, parents=True)
        environment = (
            environment_of(self._home, self._port) | ON_A_CPU | runner_v2.environment() | {"MODEL": str(self._model)}
        )
        code, output = carried_out(script, self._home, environment, 500)
        assert code == 0, output
        return output

    def close(self) -> None:
        for reservation, _ in self._reservations:
            reservation.close()


@pytest.fixture
def guides(model: Path) -> Iterator[Guides]:
    with tempfile.TemporaryDirectory(prefix="kvg-") as home:  # short, because sockets lie below it
        guides = Guides(model, Path(home))
        yield guides
        guides.close()


@pytest.mark.long
def test_the_first_hour_ends_with_tokens_from_l1_and_an_engine_whose_cache_is_on(guides: Guides) -> None:
    page = guides.lines_of("first-hour")
    looks = next(number for number, lines in enumerate(page) if "kvserver explain" in lines)
    serve = guides.lines_of("first-hour", "vllm serve")
    again = ["ask", "kill $engine", "wait $engine || true", *serve, "is_up", "ask"]
    found_again = (
        "until kvserver doctor --engine http://127.0.0.1:ENGINE; do sleep 0.2; done"  # the page restarts the daemon
    )
    looks_at_it = [found_again, *guides.lines_of("troubleshooting", needs="vllm")]
    output = guides.run([*page[:looks], *again, *page[looks:], *looks_at_it])
    tokens = {
        source: float(value)
        for source, value in re.findall(
            r'^kvserver_prompt_tokens_total\{[^}]*source="(\w+)"[^}]*\} ([\d.]+)', output, re.MULTILINE
        )
    }
    assert tokens["l1"] >= 256
    assert tokens["l1"] + tokens["computed"] + tokens["l0"] == 2 * len(PROMPT)
    assert re.search(r"^vllm:kvserver_connected\{[^}]*\} 1.0$", output, re.MULTILINE)


@pytest.mark.long
def test_the_guide_of_agents_shows_keeps_and_deletes_the_session_of_a_request(guides: Guides) -> None:
    serve, ask, look, keep, delete = guides.lines_of("agents")
    ask = ask.replace('"prompt": "..."', f'"prompt": {PROMPT}')
    stored = look.replace("curl", "until curl", 1).rstrip() + "; do sleep 0.2; done"
    output = guides.run(
        ["kvserver serve --l1-size 64MiB --pin-share 0.5 &", serve, "is_up", ask, stored, look, keep, delete]
    )
    assert re.search(r'"session_id":"agent-7".*"tokens":768', output)
    assert output.count('"outcome":"accepted","tokens":768') == 2, "it was pinned, then deleted"


@pytest.mark.long
def test_an_engine_with_the_settings_for_routers_announces_what_the_daemon_has(guides: Guides) -> None:
    (at_events, events), (at_replay, replay) = reserved_port(), reserved_port()
    subscriber = f"""{sys.executable} -c '
import zmq
events = zmq.Context().socket(zmq.SUB)
events.bind("tcp://127.0.0.1:{events}")
events.subscribe(b"")
while b"CPU" not in events.recv_multipart()[-1]:
    pass
' &
subscriber=$!"""
    (serve,) = guides.lines_of("routers", needs="vllm")
    serve = serve.replace("--block-size 16", "--block-size 32")  # which kernels for CPUs take
    # vLLM binds to all interfaces, and connects to one.
    serve = serve.replace("tcp://*:5557", f"tcp://127.0.0.1:{events}").replace(
        "tcp://*:5558", f"tcp://127.0.0.1:{replay}"
    )
    asks = "while kill -0 $subscriber; do ask; sleep 0.2; done\nwait $subscriber"
    guides.run(["kvserver serve --l1-size 64MiB --kv-events on &", subscriber, serve, "is_up", asks])
    at_events.close()
    at_replay.close()


@pytest.mark.long
def test_the_guide_of_tenants_gives_the_chunks_of_a_trusted_request_to_its_tenant(guides: Guides) -> None:
    serve, ask = guides.lines_of("sizing", needs="vllm")
    ask = ask.replace('"prompt": "..."', f'"prompt": {PROMPT}')
    shown = "curl -sSf localhost:$KVSERVER_HTTP_PORT/metrics | grep '^kvserver_l1_tenant_chunks{tenant=\"acme\"} 3'"
    stored = f"until {shown}; do sleep 0.2; done"
    guides.run(["kvserver serve --l1-size 64MiB --share tenant:acme=0.3 &", serve, "is_up", ask, stored])
