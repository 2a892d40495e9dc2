"""What vLLM's questions cost: requests that wait for storage, beside decoding ones; and questions asked before the answer is there.

    .venv-vllm/bin/python bench/questions.py [--steps 1500] [--rounds 300]

A real daemon, and vLLM's real scheduler with the connector around a model that is not there (tests/adapters/modelless.py).

Waiting: 8 requests decode, and in a second engine 8 more beside 32 whose prompts are in L2 by the daemon's replies, and whose fills
never end: a relay in a process of its own sends these replies. In turn, a step of the first engine, of the second, and of the second with a
connector that answers "not known yet" at once, which is what vLLM itself takes to ask. Times are of `Scheduler.schedule()`, with
the connector's part, in milliseconds. *added*: over no waiting requests; *ours*: over the connector that answers at once.

Questions: requests whose prompts of 1,500 tokens are in L1 arrive between two steps, as vLLM takes them, alone or 32 at once, at an idle
engine or beside 8 that decode. *early*: share of the first questions that were asked before the answer was there; *again*: questions that were put off to
a later pass, a request; *wait*: what all questions of a pass took, in milliseconds, beside *known*: the same, of requests whose answers had
arrived before; *lost*: their difference.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP / "tests"), str(TOP / "tests/adapters")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import zmq  # noqa: E402
from common import median, percentile, table  # noqa: E402
from made_up_model import prompt  # noqa: E402
from model_folder import write_model  # noqa: E402
from modelless import Engine, configure  # noqa: E402
from support.daemon import Daemon  # noqa: E402

from kvserver.protocol import AwaitFill, Lookup, LookupReply, decode_request, encode  # noqa: E402

CHUNK, BLOCK, TOKENS = 256, 16, 1500
RUNNING, WAITING, AT_ONCE = 8, 32, 32
FILL_SECONDS = 10.0


def relay(endpoint: str, daemon: str) -> None:
    """Between engines and their daemon: all of every prompt is in L2, and no fill ends."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    dealers: dict[bytes, zmq.Socket[bytes]] = {}
    while True:
        poller = zmq.Poller()
        for socket in (router, *dealers.values()):
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll())
        for engine, dealer in dealers.items():
            if dealer in ready:
                router.send_multipart([engine, *dealer.recv_multipart()])
        if router not in ready:
            continue
        engine, number, raw = router.recv_multipart()
        message = decode_request(raw)
        if isinstance(message, Lookup):
            router.send_multipart([engine, number, encode(LookupReply(0, fill_chunks=len(message.keys) // 32))])
        elif not isinstance(message, AwaitFill):
            if engine not in dealers:
                dealers[engine] = context.socket(zmq.DEALER)
                dealers[engine].connect(daemon)
            dealers[engine].send_multipart([number, raw])


class Timed:
    """Milliseconds of each call of a method, which it replaces on `owner`."""

    def __init__(self, owner: Any, name: str) -> None:
        self.method, self.ms = getattr(owner, name), list[float]()
        setattr(owner, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter_ns()
        try:
            return self.method(*arguments, **options)
        finally:
            self.ms.append((time.perf_counter_ns() - began) / 1e6)


def engine_on(endpoint: str, folder: Path, **extra: Any) -> Engine:
    return Engine(*configure(folder, endpoint, num_blocks=8000, block_size=BLOCK, asynchronous=False, extra=extra))


def decode(engine: Engine, seeds: Iterator[int]) -> None:
    """RUNNING requests are being decoded."""
    names = [f"d{next(seeds)}" for _ in range(RUNNING)]
    for name in names:
        engine.add(name, prompt(int(name[1:]), 40), count=1900)
    engine.run(until=lambda: all(engine.answers[name].tokens for name in names))


# ---- requests that wait for storage ---------------------------------------------------------------


def waiting_rows(steps: int, folder: Path) -> list[list[object]]:
    seeds = itertools.count(1)
    daemon = Daemon(l1_size="64MiB", chunk_tokens=CHUNK)
    between = multiprocessing.get_context("fork").Process(
        target=relay, args=(daemon.endpoint + ".relay", daemon.endpoint), daemon=True
    )
    between.start()
    daemon.start()
    engines = [
        engine_on(daemon.endpoint + ".relay", folder, **{"kvserver.fill_timeout_ms": FILL_SECONDS * 1e3})
        for _ in range(2)
    ]
    alone, beside = engines
    timed = [Timed(engine.scheduler, "schedule") for engine in engines]
    half = beside.connector.scheduler
    assert half is not None
    ask, not_known = beside.connector.get_num_new_matched_tokens, lambda *_: (None, False)
    found: dict[str, list[float]] = {"alone": [], "at once": [], "ours": []}

    def measure(which: str, engine: Engine, times: Timed) -> None:
        times.ms.clear()
        engine.step()
        found[which] += times.ms

    rounds = 0
    while len(found["ours"]) < steps:
        for engine in engines:
            decode(engine, seeds)
        names = [f"w{next(seeds)}" for _ in range(WAITING)]
        for name in names:
            beside.add(name, prompt(int(name[1:]), TOKENS))
        rounds += 1
        beside.run(until=lambda all_wait=rounds * WAITING: half.counters["fills"] == all_wait)
        until = time.monotonic() + FILL_SECONDS * 0.8
        while time.monotonic() < until and len(found["ours"]) < steps and len(alone.scheduler.running) == RUNNING:
            measure("alone", alone, timed[0])
            measure("ours", beside, timed[1])
            beside.connector.get_num_new_matched_tokens = not_known
            measure("at once", beside, timed[1])
            beside.connector.get_num_new_matched_tokens = ask
        assert all(beside.status_of(name) == "WAITING" for name in names)
        for engine in engines:
            for name in list(engine.scheduler.requests):
                engine.abort(name)
            engine.run()
    for engine in engines:
        engine.close()
    between.terminate()
    between.join()
    daemon.close()
    rows: list[list[object]] = []
    for name, values in found.items():
        p50, p99 = median(values), percentile(values, 0.99)
        rows.append([name, len(values), p50, p99, p50 - median(found["alone"]), p50 - median(found["at once"])])
    return rows


# ---- questions before the answer ------------------------------------------------------------------


class Questions:
    """Every question of vLLM's: the request, what it took, and whether it was put off."""

    def __init__(self, engine: Engine) -> None:
        self.asked: list[tuple[str, float, bool]] = []
        method = engine.connector.get_num_new_matched_tokens

        def ask(request: Any, local: int) -> Any:
            began = time.perf_counter_ns()
            answer = method(request, local)
            self.asked.append((request.request_id, (time.perf_counter_ns() - began) / 1e6, answer[0] is None))
            return answer

        engine.connector.get_num_new_matched_tokens = ask


def wait_for_answers(engine: Engine) -> None:
    """Before vLLM asks about them."""
    half = engine.connector.scheduler
    assert half is not None
    deadline = time.monotonic() + 5
    while any(state.answer is None for state in half._requests.values() if not state.admitted):
        half._dispatcher.receive()
        assert time.monotonic() < deadline


def question_row(engine: Engine, prompts: list[list[int]], count: int, busy: bool, rounds: int) -> list[object]:
    numbers = itertools.count(len(engine.answers))
    questions = Questions(engine)
    half = engine.connector.scheduler
    assert half is not None
    early = again = 0
    waits: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds):
        known = bool(number % 2)
        if busy and len(engine.scheduler.running) < RUNNING:
            decode(engine, numbers)
        names = [f"q{next(numbers)}" for _ in range(count)]
        questions.asked.clear()

        for name, tokens in zip(names, prompts, strict=False):
            engine.add(name, tokens, count=1)
        if known:
            wait_for_answers(engine)
        else:
            half._dispatcher.receive()
            early += sum(half._requests[name].answer is None for name in names)
        engine.step()
        waits[known].append(sum(ms for name, ms, _ in questions.asked if name in names))
        engine.run(until=lambda mine=names: all(engine.answers[name].finish_reason for name in mine))
        if not known:
            again += sum(put_off for name, _, put_off in questions.asked if name in names)
        assert all(engine.answers[name].external > 1000 for name in names), "a hit"
        if not busy:
            engine.run()
        forget(engine)
    asked = count * rounds
    mine, theirs = median(waits[False]), median(waits[True])
    return [
        count, "8 decode" if busy else "idle", early / asked, again / asked,
        mine, percentile(waits[False], 0.99 if rounds >= 1000 else 0.9), theirs, mine - theirs,
    ]  # fmt: skip


def forget(engine: Engine) -> None:
    """Evict all blocks that no request uses from vLLM's own prefix cache."""
    pool = engine.pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))


def question_rows(rounds: int, folder: Path) -> list[list[object]]:
    daemon = Daemon(l1_size="256MiB", chunk_tokens=CHUNK)
    daemon.start()
    prompts = [prompt(10_000 + number, TOKENS) for number in range(AT_ONCE)]
    first = engine_on(daemon.endpoint, folder)
    for number, tokens in enumerate(prompts):
        first.generate(f"cold{number}", tokens, count=1)
    first.close()
    rows = []
    for busy in (False, True):
        for count in (1, AT_ONCE):
            engine = engine_on(daemon.endpoint, folder)
            engine.generate("first", prompt(1, 40))
            rows.append(question_row(engine, prompts, count, busy, rounds if count == 1 else max(30, rounds // 4)))
            engine.close()
    daemon.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvq-") as name:
        folder = write_model(Path(name))
        print(f"steps of {RUNNING} decoding requests; {WAITING} others wait for fills that never end")
        print(
            table(["waiting", "steps", "p50 ms", "p99", "added", "ours"], waiting_rows(options.steps, folder)),
            flush=True,
        )
        print("questions for requests that are in L1")
        header = ["at once", "engine", "early", "again", "wait ms", "p90", "known", "lost"]
        print(table(header, question_rows(options.rounds, folder)))


if __name__ == "__main__":
    main()
