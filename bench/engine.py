"""Time to the first token of real vLLM engines on CPU: without connector, cold with ours, warm with ours.

    KVSERVER_BIN=.venv/bin/kvserver .venv-vllm/bin/python bench/engine.py [--prompts 9] [--tokens 1500] [--ends 32 256]

Per model three engine processes, asked in turn with the same fresh prompt, OMP_NUM_THREADS=1 each: one
without connector, one that stores the prompt, one that never saw it and loads it. Counters of vLLM must show
that the warm engine took the tokens from the daemon, else the run fails. The ceiling of a warm answer is the
engine without connector with as many tokens in its own prefix cache.

With --ends only these chunk sizes, and the first tokens of prompts that end everywhere in a chunk, beside the engine without
connector that has computed the same prompt before, and beside an engine whose connector copies nothing (`floor_connector.py`).

With --peer-vllm-python (or KVSERVER_PEER_VLLM_PYTHON), an interpreter that has vLLM and LMCache both, the
same prompts go to two engines with LMCache's multiprocess connector.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/vllm")]
os.environ.setdefault("KVSERVER_BIN", str(ROOT / ".venv/bin/kvserver"))  # before the import that reads it
# A CPU has the kernels of model runner V2 in Triton's interpreter only, whose time is not to be measured.
os.environ.setdefault("KVSERVER_TEST_RUNNER", "v1")

import tiny_models  # noqa: E402
from common import table  # noqa: E402
from engines import TIMEOUTS, Engine, Engines  # noqa: E402
from peers import Peer  # noqa: E402
from support.daemon import Daemon, wait_until  # noqa: E402

CHUNK_TOKENS = 256, 32  # the default of both servers, and one block of these engines: ours again
MODELS = {"4 x 256": {"layers": 4, "hidden": 256}, "12 x 1024": {"layers": 12, "hidden": 1024}}
WARM_UPS = 2  # prompts that do not count: what a process does only once is not to be measured


FLOOR = {
    "environ": {"PYTHONPATH": str(Path(__file__).parent)},
    "transfer": {"kv_connector": "FloorConnector", "kv_connector_module_path": "floor_connector"},
}
PEER_STORE_SECONDS = 1.0  # its connector does not report when a store has ended


class Lane:
    """One engine, and what it takes until the first token."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine.wait_ready()

    def first_token(self, tokens: list[int], *, external: int = 0, local: int = 0) -> float:
        """Milliseconds. AssertionError unless vLLM took so many tokens from outside and from its own cache."""
        before = self._hits()
        answer = self.engine.ask("generate", prompts=[tokens], max_tokens=1)
        found = tuple(after - count for after, count in zip(self._hits(), before, strict=True))
        assert found == (external, local), f"(external, local) hits were {found}, not {(external, local)}"
        return 1000 * float(answer["seconds"])

    def _hits(self) -> tuple[int, int]:
        metrics = self.engine.metrics()
        names = "vllm:external_prefix_cache_hits", "vllm:prefix_cache_hits"
        external, local = (int(metrics.get(name, 0)) for name in names)
        return external, local


class Took(NamedTuple):
    """Milliseconds until the first token of one prompt."""

    warm: float
    again: float  # the warm engine, asked the same once more: it has the prompt itself then
    own: float  # the engine without connector, which has computed the whole
    floor: float  # with a connector that copies nothing


class Bench:
    """The engines of one model, in turn. `options`: of all of them."""

    def __init__(
        self,
        stack: ExitStack,
        model: Path,
        folder: Path,
        prompt_tokens: int,
        peer_python: str = "",
        with_floor: bool = False,
        **options: Any,
    ) -> None:
        self._tokens = prompt_tokens
        self._seeds = itertools.count()
        self._daemon = Daemon(l1_size="1GiB", chunk_tokens=CHUNK_TOKENS[0], tails="off")
        stack.callback(self._daemon.close)
        self._daemon.start()
        engines = Engines(model, folder, self._daemon.endpoint)
        stack.callback(engines.close)
        started = {name: engines.get(name, **options) for name in ("cold", "warm")}
        started["none"] = engines.get("none", endpoint=None, **options)
        if with_floor:
            started["floor"] = engines.get("floor", **(options | FLOOR))
        if peer_python:
            options |= peer_options(stack.enter_context(Peer(peer_python)), peer_python)
            started |= {name: engines.get(name, **options) for name in ("peer cold", "peer warm")}
        self._lanes = {name: Lane(engine) for name, engine in started.items()}
        wait_until(lambda: sum(bool(i["namespace"]) for i in self._daemon.status()["instances"]) == 2, 30, "registered")
        for name in ("cold", "warm"):
            wait_until(lambda e=started[name]: e.counters()["connected"], 10, "the scheduler half connected")

    def use_chunks_of(self, tokens: int, tails: str = "off") -> None:
        """A daemon with chunks of this size, and with single blocks behind them or without. The engines find it by themselves; what they ask meanwhile may miss."""
        self._daemon.kill()
        self._daemon.flags |= {"chunk_tokens": tokens, "tails": tails}
        self._daemon.start()
        wait_until(lambda: sum(bool(i["namespace"]) for i in self._daemon.status()["instances"]) == 2, 30, "registered")
        for name in ("cold", "warm"):
            engine = self._lanes[name].engine
            for _ in range(2):
                engine.generate([tiny_models.prompt(next(self._seeds), self._tokens)], max_tokens=1)
                engine.wait_for_stores()
                time.sleep(1.5)

    def round(self, chunk_tokens: int) -> dict[str, float]:
        """Milliseconds by lane for one fresh prompt."""
        seed = next(self._seeds)
        hit = self._whole(chunk_tokens)
        tokens, other = tiny_models.prompt(seed, self._tokens), tiny_models.prompt(seed + 1_000_000, self._tokens)
        found: dict[str, float] = {}
        for name in ("none", "cold") if seed % 2 else ("cold", "none"):
            found[name] = self._lanes[name].first_token(tokens)
        self._lanes["cold"].engine.wait_for_stores()  # KV goes to the daemon beside the engine, and after the answer
        wait_until(lambda: self._daemon.accounting()["tickets"] == 0)
        found["warm"] = self._lanes["warm"].first_token(tokens, external=hit)
        found["own"] = self._lanes["none"].first_token(tokens[:hit] + other[hit:], local=hit)
        if "peer cold" in self._lanes:
            found["peer cold"] = self._lanes["peer cold"].first_token(tokens)
            time.sleep(PEER_STORE_SECONDS)
            found["peer warm"] = self._lanes["peer warm"].first_token(tokens, external=self._whole(CHUNK_TOKENS[0]))
        return found

    def lengths(self, lengths: Sequence[int], chunk_tokens: int, block_tokens: int) -> list[Took]:
        """For each so many first tokens of one fresh prompt, all of which were prompts before.

        `chunk_tokens`: what a hit is a multiple of.
        """
        tokens = tiny_models.prompt(next(self._seeds), self._tokens)
        for name in ("none", "cold"):
            self._lanes[name].first_token(tokens)
        for length in lengths:
            self._lanes["cold"].engine.generate([tokens[:length]], max_tokens=1)
            self._lanes["cold"].engine.wait_for_stores()
        wait_until(lambda: self._daemon.accounting()["tickets"] == 0)
        found = []
        for length in lengths:
            self._lanes["warm"].engine.forget()
            hit = min(length // chunk_tokens * chunk_tokens, length - 1)
            own = (length - 1) // block_tokens * block_tokens
            took: dict[str, float] = {}
            lanes = ["own", "warm"] + ["floor"] * ("floor" in self._lanes)
            for name in reversed(lanes) if length % 2 else lanes:
                if name == "own":
                    took[name] = self._lanes["none"].first_token(tokens[:length], local=own)
                elif name == "warm":
                    took[name] = self._lanes["warm"].first_token(tokens[:length], external=hit)
                    took["again"] = self._lanes["warm"].first_token(tokens[:length], local=own)
                else:
                    self._lanes["floor"].engine.forget()
                    external = min(length // block_tokens * block_tokens, length - 1)
                    took[name] = self._lanes["floor"].first_token(tokens[:length], external=external)
            found.append(Took(**took))
        return found

    def _whole(self, chunk_tokens: int) -> int:
        """Tokens of a prompt's whole chunks; one token at least is always computed."""
        return (self._tokens - 1) // chunk_tokens * chunk_tokens


def peer_options(peer: Peer, python: str) -> dict[str, Any]:
    """An engine of `engines.py` with LMCache's connector in place of ours."""
    host, port = peer.url.rsplit(":", 1)
    return {
        "python": python,
        "environ": {
            "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven",
            "LMCACHE_DISABLE_BANNER": "1",
            "PYTHONPATH": str(Path(__file__).with_name("peer_site")),
        },
        "transfer": {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {"lmcache.mp.host": host, "lmcache.mp.port": int(port)},
        },
    }


class Rounds:
    """What each lane took, prompt by prompt."""

    def __init__(self, bench: Bench, prompts: int, chunk_tokens: int) -> None:
        rounds = [bench.round(chunk_tokens) for _ in range(WARM_UPS + prompts)]
        self._rounds = rounds[WARM_UPS:]

    def ms(self, lane: str) -> float:
        """The median."""
        return statistics.median(each[lane] for each in self._rounds)

    def ratio(self, lane: str, beside: str) -> float:
        """The median of one lane's time over another's for the same prompt, a moment apart: the machine's pace cancels out."""
        return statistics.median(each[lane] / each[beside] for each in self._rounds)


OURS = ["model", "chunk", "none", "cold", "cold/none", "warm", "warm/cold", "own cache", "warm/own", "warm/LMCache"]
PEER = ["LMCache, chunks of 256", "cold", "cold/none", "warm"]


def measure(name: str, bench: Bench, prompts: int, with_peer: bool) -> tuple[list[list[object]], list[list[object]]]:
    """Our rows of one model, and the peer's."""
    ours: list[list[object]] = []
    peers: list[list[object]] = []
    for chunk in CHUNK_TOKENS:
        if ours:
            bench.use_chunks_of(chunk)
        rounds = Rounds(bench, prompts, chunk)
        ms, ratio = rounds.ms, rounds.ratio
        beside = ratio("warm", "peer warm") if with_peer else "-"
        ours.append([
            name, chunk, ms("none"), ms("cold"), ratio("cold", "none"), ms("warm"), ratio("warm", "cold"),
            ms("own"), ratio("warm", "own"), beside,
        ])  # fmt: skip
        if with_peer:
            peers.append([name, ms("peer cold"), ratio("peer cold", "none"), ms("peer warm")])
    return ours, peers


BLOCK = 32  # tokens, of these engines: attention on a CPU needs multiples of it, and MLA has no prefix cache there
PROMPT = 1536
ENDS = 16  # lengths of a prompt, spread over the last 256 tokens of it


def ends(sizes: list[int], rounds: int, models: list[str]) -> str:
    """The first token of prompts that end everywhere in a chunk, beside the engine's own prefix cache."""
    rows: list[list[object]] = []
    dice = random.Random(1)
    step = 256 // ENDS
    lengths = [PROMPT - 256 + n * step + 1 + dice.randrange(step) for n in range(ENDS - 1)] + [PROMPT]
    for name in models:
        with tempfile.TemporaryDirectory(prefix="kvserver-bench-") as folder, ExitStack() as stack:
            model = tiny_models.llama(Path(folder, "model"), **MODELS[name])
            bench = Bench(stack, model, Path(folder), PROMPT, with_floor=True, extra=TIMEOUTS)
            for size, tails in itertools.product(sizes, ("off", "on")):
                if tails == "on" and size == BLOCK:
                    continue
                bench.use_chunks_of(size, tails)
                found_by = BLOCK if tails == "on" else size
                bench.lengths(lengths[:2], found_by, BLOCK)  # does not count
                by_end = list(zip(*(bench.lengths(lengths, found_by, BLOCK) for _ in range(rounds)), strict=True))

                def ms(lane: str, by_end: list[tuple[Took, ...]] = by_end) -> float:
                    return statistics.median(getattr(took, lane) for end in by_end for took in end)

                def ratios(lane: str, beside: str, by_end: list[tuple[Took, ...]] = by_end) -> list[float]:
                    """One for each length."""
                    return [statistics.median(getattr(t, lane) / getattr(t, beside) for t in end) for end in by_end]

                same, own = ratios("warm", "again"), ratios("warm", "own")
                rest = [length - min(length // found_by * found_by, length - 1) for length in lengths]
                rows.append([
                    name, size, tails, sum(rest) / len(rest), *map(ms, ("warm", "again", "own", "floor")),
                    statistics.median(same), max(same), statistics.median(own), max(own),
                    f"{sum(ratio <= 1.1 for ratio in same)}, {sum(ratio <= 1.1 for ratio in own)} of {len(own)}",
                    statistics.median(ratios("floor", "own")), statistics.median(ratios("warm", "floor")),
                ])  # fmt: skip
    return table(
        [
            "model",
            "chunk",
            "tails",
            "computed",
            "warm ms",
            "again ms",
            "own ms",
            "floor ms",
            "warm/again",
            "worst end",
            "warm/own",
            "worst end",
            "ends <= 1.1",
            "floor/own",
            "warm/floor",
        ],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--ends", type=int, nargs="+", metavar="CHUNK_TOKENS", help="prompts that end everywhere in a chunk"
    )
    parser.add_argument("--peer-vllm-python", default=os.environ.get("KVSERVER_PEER_VLLM_PYTHON", ""))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    if options.ends:
        print(
            f"time to first token, ms: prompts of {PROMPT - 255} to {PROMPT} tokens, {options.prompts} of each length"
        )
        print(ends(options.ends, options.prompts, options.models))
        return
    rows: list[list[object]] = []
    peers: list[list[object]] = []
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="kvserver-bench-") as folder, ExitStack() as stack:
            model = tiny_models.llama(Path(folder, "model"), **MODELS[name])
            bench = Bench(stack, model, Path(folder), options.tokens, options.peer_vllm_python)
            ours, theirs = measure(name, bench, options.prompts, bool(options.peer_vllm_python))
            rows += ours
            peers += theirs
    print(f"time to first token, ms: {options.tokens} tokens, medians of {options.prompts} prompts, one thread each")
    print(table(OURS, rows), end="\n\n")
    if options.peer_vllm_python:
        print(table(PEER, peers))
    else:
        print("LMCache's connector was not measured: no interpreter with vLLM and LMCache; see bench/README.md")


if __name__ == "__main__":
    main()
