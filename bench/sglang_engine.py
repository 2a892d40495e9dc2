"""SGLang on CPU with kvserver: the first token beside SGLang's own cache and a linker of files; what the scheduler's thread pays.

    KVSERVER_BIN=.venv/bin/kvserver .venv-sglang/bin/python bench/sglang_engine.py [--only first,decode,thread,bound]

first   Time to the first token of a real engine, prompt by prompt and engine by engine in turn: cold, warm from the linker after a flush,
        and asked once more, when SGLang's own cache has the prompt. SGLang's count of cached tokens must fit, else the run fails.
decode  Milliseconds between the tokens of requests that decode, alone, while other prompts are loaded, while SGLang's own cache has them
        (the floor: the rest of each is computed), and while they are computed. Of a smaller model. Column cached counts the prompts
        that were: a lookup that was answered too late is a prompt that is computed.
thread  SGLang's tree and a linker in this process, no model, linkers in turn. A pass with 32 waiting requests, none of which is
        admitted: SGLang asks about all, and about the first once more, as its policy lpm does. Times are over a linker that answers []
        at once. The floor of hits is one that answers all pages at once: SGLang's own cost of a hit. Column fit counts the lookups
        that the first pass of new requests begins. The calls that begin a store and that load, as time of the clock and as time of
        the thread on the CPU.
bound   Hit tokens that kvserver.load_wait_ms and kvserver.load_share leave out, by the adapter's own bound: with the rates that `first`
        measured, and calculated for rates that are assumed.

The engines run one prompt at a time and sleep while idle, one thread each. The linker of files is `files_linker.py`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/vllm"), str(ROOT / "tests/sglang")]
os.environ.setdefault("KVSERVER_BIN", str(ROOT / ".venv/bin/kvserver"))  # before the import that reads it

import tiny_models  # noqa: E402
from common import percentile, table  # noqa: E402
from engine_environment import ENVIRONMENT  # noqa: E402
from sglang_engines import PAGE, Engine  # noqa: E402
from support.daemon import Daemon, wait_until  # noqa: E402

os.environ.update(ENVIRONMENT)
LAYERS, HIDDEN, TOKENS = 12, 1024, 1500
CACHED = (TOKENS - 1) // PAGE * PAGE
SMALL_LAYERS, SMALL_HIDDEN = 4, 256  # of `decode`: a token of the other model takes too long for many samples
WARM_UPS = 2
# The bounds of waits are those of a product, and nothing else differs from its defaults.
SETTINGS = {
    "kvserver.lookup_poll_ms": 1.0,
    "kvserver.lookup_timeout_ms": 100.0,
    "kvserver.load_wait_ms": 1000.0,
    "kvserver.load_share": 0.25,
}


def token_bytes(layers: int, hidden: int) -> int:
    """Bytes of a token's KV in float32."""
    return layers * 2 * (hidden // 64) * 32 * 4


TOKEN_BYTES = token_bytes(LAYERS, HIDDEN)


def prompt(seed: int, length: int = TOKENS) -> list[int]:
    return tiny_models.prompt(seed, length)


# ---- real engines -------------------------------------------------------------------------


class Lane:
    """One engine with a linker. `stored` waits until the linker's store of so many pages more has ended."""

    def __init__(self, engine: Engine, stored: Callable[[], int]) -> None:
        self.engine, self._stored = engine.wait_ready(), stored

    def first_token(self, tokens: list[int], cached: int) -> float:
        """Milliseconds. AssertionError unless SGLang took so many tokens from a cache."""
        answer = self.engine.ask("generate", prompts=[tokens], max_tokens=1, salt=None)
        found = answer["outputs"][0]["cached_tokens"]
        assert found == cached, f"{found} tokens were cached, not {cached}"
        return 1000 * float(answer["seconds"])

    def store(self, tokens: list[int]) -> float:
        before = self._stored()
        took = self.first_token(tokens, 0)
        wait_until(lambda: self._stored() == before + TOKENS // PAGE, 30, "stored")
        return took

    def round(self, tokens: list[int]) -> dict[str, float]:
        cold = self.store(tokens)
        self.engine.flush()
        warm = self.first_token(tokens, CACHED)
        own = self.first_token(tokens, CACHED)
        self.engine.flush()
        return {"cold": cold, "warm": warm, "own": own}


@contextmanager
def lanes(
    model: Path, folder: Path, names: Sequence[str], token: int = TOKEN_BYTES
) -> Iterator[tuple[dict[str, Lane], Daemon]]:
    with ExitStack() as stack:
        daemon = Daemon(l1_size="4GiB", copy_threads=1)
        stack.callback(daemon.close)
        daemon.start()
        options: dict[str, Any] = {"max_total_tokens": 16384, "sleep_on_idle": True, "log_level": "warning"}
        made: dict[str, Lane] = {}
        for name in names:
            log = folder / f"{name}.log"
            if name == "kvserver":
                engine = Engine(model, daemon.endpoint, log, extra=SETTINGS, **options)
                stored = lambda: int(daemon.status()["totals"]["stored_bytes"]) // (PAGE * token)  # noqa: E731
            else:
                files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-files-", dir="/dev/shm")))
                engine = Engine(
                    model, "", log, linker=("files_linker", "FilesLinker"), extra={"folder": str(files)},
                    environ={"PYTHONPATH": str(Path(__file__).parent)}, **options,
                )  # fmt: skip
                stored = lambda files=files: sum(1 for path in files.iterdir() if not path.suffix)  # noqa: E731
            stack.callback(engine.kill)
            made[name] = Lane(engine, stored)
        if "kvserver" in names:
            wait_until(lambda: any(i["namespace"] for i in daemon.status()["instances"]), 30, "registered")
        yield made, daemon


class Rates:
    """Rates that this run has measured. `copied`: GB/s of loads through the daemon, from the daemon's own clock."""

    def __init__(self, prefill: float, copied: float) -> None:
        self.prefill, self.copied = prefill, copied


def first(model: Path, folder: Path, prompts: int) -> Rates:
    with lanes(model, folder, ("kvserver", "files")) as (made, daemon):
        before: dict[str, Any] = {}
        rounds: list[dict[str, dict[str, float]]] = []
        for seed in range(WARM_UPS + prompts):
            if seed == WARM_UPS:
                before = loads(daemon)
            names = list(made) if seed % 2 else list(reversed(made))
            rounds.append({name: made[name].round(prompt(seed)) for name in names})
        after = loads(daemon)
    kept = rounds[WARM_UPS:]

    def ratio(name: str, lane: str, beside: str) -> float:
        return statistics.median(each[name][lane] / each[name][beside] for each in kept)

    rows = [
        [name, *(statistics.median(each[name][lane] for each in kept) for lane in ("cold", "warm", "own")),
         ratio(name, "warm", "cold"), ratio(name, "warm", "own"),
         statistics.median(each["kvserver"]["warm"] / each[name]["warm"] for each in kept)]
        for name in ("kvserver", "files")
    ]  # fmt: skip
    print(f"time to first token, ms: {TOKENS} tokens, {LAYERS} x {HIDDEN}, medians of {prompts} prompts")
    print(table(["linker", "cold", "warm", "own cache", "warm/cold", "warm/own", "kvserver/warm"], rows), end="\n\n")
    cold = statistics.median(each["kvserver"]["cold"] for each in kept)
    return Rates(TOKENS / cold * 1000, (after["bytes"] - before["bytes"]) / (after["nanos"] - before["nanos"]))


def loads(daemon: Daemon) -> dict[str, int]:
    (instance,) = daemon.status()["instances"]
    return {"bytes": daemon.status()["totals"]["loaded_bytes"], "nanos": instance["requests"]["load_nanos"]}


def decode(model: Path, folder: Path, requests: int = 4, tokens: int = 300) -> None:
    """Prompts arrive beside as many decoding requests, as often in each row."""
    rows: list[list[object]] = []
    with lanes(model, folder, ("kvserver",), token_bytes(SMALL_LAYERS, SMALL_HIDDEN)) as (made, _):
        lane = made["kvserver"]
        others = [prompt(1000 + n) for n in range(8)]
        for text in others:
            lane.store(text)
        gaps: dict[str, list[float]] = {}
        # On a busy machine an answer may come too late for a pass: such a prompt is computed.
        hits: dict[str, int] = {}
        for name, beside, cached in (
            ("alone", [], []),
            ("loads", others, [CACHED] * len(others)),
            ("own cache", others, [CACHED] * len(others)),
            ("prefills", [prompt(2000 + n) for n in range(8)], [0] * len(others)),
        ):
            lane.engine.flush()
            for text in beside if name == "own cache" else ():
                lane.engine.ask("generate", prompts=[text], max_tokens=1, salt=None)
            texts = [prompt(3000 + 10 * len(gaps) + n, 64) for n in range(requests)]
            answer = lane.engine.ask("decode", prompts=texts, max_tokens=tokens, beside=beside, pause=0.5)
            hits[name] = sum(found == CACHED for found in answer["cached"])
            assert name == "loads" or answer["cached"] == cached, f"{name}: {answer['cached']}"
            gaps[name] = [1000 * gap for gap in answer["gaps"]]
    for name, found in gaps.items():
        rows.append([
            name, hits[name], len(found), percentile(found, 0.5), percentile(found, 0.99), max(found),
            percentile(found, 0.99) / percentile(gaps["alone"], 0.99),
            percentile(found, 0.99) / percentile(gaps["own cache"], 0.99),
        ])  # fmt: skip
    print(
        f"ms between the tokens of {requests} requests that decode, {SMALL_LAYERS} x {SMALL_HIDDEN}, while 8 prompts of {TOKENS} tokens arrive"
    )
    print(table(["beside", "cached", "samples", "p50", "p99", "most", "p99/alone", "p99/own cache"], rows), end="\n\n")


# ---- the scheduler's thread ---------------------------------------------------------------

WAITING = 32


def thread(model: Path, samples: int) -> None:
    from files_linker import FilesLinker
    from modelless import Stage
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

    from kvserver.adapters.sglang import KVServerLinker
    from kvserver.adapters.sglang.contract import without_cache

    floor = without_cache(UnifiedCacheLinker, "it is the floor of a benchmark", lambda: LayerWiseLoadCounter(0))
    empty = type("NoPages", (floor,), {"lookup": lambda self, rid, transfers: []})
    full = type("AllPages", (floor,), {"lookup": lambda self, rid, transfers: [len(transfers[0].keys)]})
    shape: dict[str, Any] = {"tokens": 8192, "layers": LAYERS, "heads": HIDDEN // 64, "head": 32}
    with ExitStack() as stack:
        daemon = Daemon(l1_size="4GiB", copy_threads=1)
        stack.callback(daemon.close)
        daemon.start()
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-files-", dir="/dev/shm"))
        kinds = {"[] at once": empty, "all at once": full, "kvserver": KVServerLinker, "files": FilesLinker}
        stages = {}
        for name, linker in kinds.items():
            extra = {"folder": folder} if name == "files" else SETTINGS
            stages[name] = Stage(str(model), daemon.endpoint, linker=linker, extra=extra, **shape)
            stack.callback(stages[name].close)
        ours = stages["kvserver"]
        wait_until(lambda: ours.next_pass() or daemon.status()["instances"][0]["namespace"], 10, "registered")
        known = [prompt(seed) for seed in range(4)]
        for name in ("kvserver", "files"):
            for number, text in enumerate(known):
                stages[name].compute(text[:CACHED], number)
                stages[name].wait_for_stores()
                stages[name].forget()
        print(passes(stages, known, samples), end="\n\n")
        print(copies({name: stages[name] for name in ("kvserver", "files")}, known, samples // 20), end="\n\n")


def passes(stages: dict[str, Any], known: list[list[int]], samples: int) -> str:
    """A table of passes: later ones, and the first one of each 20 with the same waiting requests."""
    ids = itertools.count()
    unknown = [prompt(100 + seed) for seed in range(4)]
    cases = {
        "[] at once": (stages["[] at once"], known),
        "all at once": (stages["all at once"], known),
        "kvserver, misses": (stages["kvserver"], unknown),
        "kvserver, hits": (stages["kvserver"], known),
        "files, hits": (stages["files"], known),
    }
    waiting: dict[str, list[Any]] = {}
    first_pass, later, first_on_cpu, on_cpu = ({name: [] for name in cases} for _ in range(4))
    fit: dict[str, list[float]] = {name: [] for name in cases}

    def one_pass(name: str, took: dict[str, list[float]], ran: dict[str, list[float]]) -> None:
        stage = cases[name][0]
        began, began_on_cpu = time.perf_counter(), time.thread_time()
        stage.next_pass()
        for request in (*waiting[name], waiting[name][0]):
            stage.match(request)
        ran[name].append(1000 * (time.thread_time() - began_on_cpu))
        took[name].append(1000 * (time.perf_counter() - began))

    def lookups(name: str) -> int:
        linker = cases[name][0].linker
        return int(linker.cache.counters["lookups"]) if name.startswith("kvserver") else 0

    def answered(name: str) -> bool:
        """A pass in which nothing of these requests was under way."""
        before = lookups(name)
        one_pass(name, {name: []}, {name: []})
        return lookups(name) == before

    for number in range(samples):
        for name, (stage, texts) in cases.items():
            if number % 20 == 0:
                waiting[name] = [stage.request(texts[n % len(texts)], rid=f"w{next(ids)}") for n in range(WAITING)]
                before = lookups(name)
                one_pass(name, first_pass, first_on_cpu)
                fit[name].append(lookups(name) - before)
                wait_until(lambda n=name: answered(n) and answered(n), 5, "all answers")
            one_pass(name, later, on_cpu)
    rows, first_rows = [], []
    for name, values in later.items():
        floor = later[floor_of(name)]
        rows.append([
            name, percentile(values, 0.5), percentile(values, 0.99), median_excess(values, later["[] at once"]),
            median_excess(values, floor),
            *(median_excess(on_cpu[name], on_cpu[other]) for other in ("[] at once", floor_of(name))),
        ])  # fmt: skip
        over = [one - other for one, other in zip(first_pass[name], first_pass["[] at once"], strict=True)]
        first_rows.append([
            name, percentile(over, 0.5), percentile(over, 0.99),
            *(median_excess(first_on_cpu[name], first_on_cpu[other]) for other in ("[] at once", floor_of(name))),
            statistics.median(fit[name]),
        ])  # fmt: skip
    header = [
        "linker answers",
        "p50",
        "p99",
        "over []",
        "over its floor",
        "over [] on the CPU",
        "over its floor on the CPU",
    ]
    first_header = [
        "linker answers",
        "over [], p50",
        "p99",
        "on the CPU",
        "over its floor on the CPU",
        "lookups that fit",
    ]
    return (
        f"ms of a pass with {WAITING} waiting requests of {TOKENS} tokens: {samples} passes in turn\n{table(header, rows)}\n\n"
        f"the same of the first pass, when all {WAITING} are new: {samples // 20} passes\n{table(first_header, first_rows)}"
    )


def floor_of(name: str) -> str:
    return "all at once" if name.endswith("hits") else "[] at once"


def median_excess(values: list[float], beside: list[float]) -> float:
    """The median of the differences of neighbours: the machine's pace cancels out."""
    return statistics.median(one - other for one, other in zip(values, beside, strict=True))


def copies(stages: dict[str, Any], known: list[list[int]], samples: int) -> str:
    """A table of the calls that begin a store, and that load."""
    took: dict[str, list[float]] = {f"{call}, {name}": [] for call in ("offload", "load") for name in stages}
    on_cpu: dict[str, list[float]] = {name: [] for name in took}

    def timed(name: str, call: Callable[..., bool]) -> Callable[..., bool]:
        def call_it(*args: Any, **kwargs: Any) -> bool:
            began, ran = time.perf_counter(), time.thread_time()
            done = call(*args, **kwargs)
            on_cpu[name].append(1000 * (time.thread_time() - ran))
            took[name].append(1000 * (time.perf_counter() - began))
            assert done, f"{name} was refused"
            return done

        return call_it

    for name, stage in stages.items():
        stage.linker.offload = timed(f"offload, {name}", stage.linker.offload)
        stage.linker.load = timed(f"load, {name}", stage.linker.load)
    for number in range(samples):
        for stage in stages.values():
            stage.insert(prompt(10_000 + number % 100)[:CACHED])  # the daemon and the folder have them after 100
            stage.wait_for_stores()
            stage.forget(zero=False)
            request = stage.request(known[number % len(known)])
            wait_until(lambda s=stage, r=request: s.next_pass() or s.hit(r) == CACHED, 5, "a hit")
            stage.allocator.free(stage.load(request))
    rows = [
        [name, len(found), statistics.median(found), statistics.median(on_cpu[name])] for name, found in took.items()
    ]
    title = f"ms of SGLang's calls for {CACHED // PAGE} pages, {CACHED * TOKEN_BYTES / 1e6:.0f} MB"
    return f"{title}\n{table(['call, linker', 'samples', 'median', 'on the CPU'], rows)}"


# ---- the bound of a load ------------------------------------------------------------------

LENGTHS = 8_192, 32_768, 145_408  # 8k, 32k, 142k
SHAPES = {
    "Llama 3 8B": 32 * 2 * 8 * 128 * 2,
    "Llama 3 70B, a rank of 8": 80 * 2 * 128 * 2,
    "Llama 3 70B, one rank": 80 * 2 * 8 * 128 * 2,
}


def bound(rates: Rates | None) -> None:
    from kvserver.adapters.sglang.budget import Budget

    def lost(page_tokens: int, token_bytes: int, copied: float, prefill: float) -> list[object]:
        """Tokens of each length that no lookup promises."""
        made = Budget(
            SETTINGS["kvserver.load_wait_ms"] / 1000, SETTINGS["kvserver.load_share"], page_tokens, clock := Clock()
        )
        made.batch_begins()
        made.computed(round(prefill) * 10 // page_tokens)
        clock.now += 10
        made.pass_ends()
        pages_a_second = copied * 1e9 / token_bytes / page_tokens
        made.copied(round(pages_a_second * 10), 10.0)
        found: list[object] = [length - made.affordable(length // page_tokens) * page_tokens for length in LENGTHS]
        return [f"{copied:.1f}", f"{prefill:.0f}", page_tokens, token_bytes, *found]

    rows: list[list[object]] = []
    if rates is not None:
        rows.append([f"measured, {LAYERS} x {HIDDEN}", *lost(PAGE, TOKEN_BYTES, rates.copied, rates.prefill)])
    for name, token_bytes in SHAPES.items():
        for copied, prefill in itertools.product((20.0, 50.0), (2_000.0, 20_000.0)):
            rows.append([f"calculated, {name}", *lost(64, token_bytes, copied, prefill)])
    print("hit tokens that the bound of a load leaves out; calculated: from assumed rates, nothing was run")
    print(table(["rates", "GB/s", "prefill tokens/s", "page", "bytes a token", *(f"of {n:,}" for n in LENGTHS)], rows))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--only", default="first,decode,thread,bound")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    only, rates = options.only.split(","), None
    with tempfile.TemporaryDirectory(prefix="kvserver-bench-") as name:
        folder = Path(name)
        model = tiny_models.llama(
            folder / "model", layers=LAYERS, hidden=HIDDEN, dtype="float32", max_position_embeddings=4096
        )
        if "first" in only:
            rates = first(model, folder, options.prompts)
        if "decode" in only:
            decode(
                tiny_models.llama(folder / "small", layers=SMALL_LAYERS, hidden=SMALL_HIDDEN, dtype="float32",
                                  max_position_embeddings=4096),
                folder,
            )  # fmt: skip
        if "thread" in only:
            thread(model, options.samples)
        if "bound" in only:
            bound(rates)


if __name__ == "__main__":
    main()
