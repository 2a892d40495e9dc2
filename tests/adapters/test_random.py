"""Many requests at once, in too few blocks, with everything that can happen to them.

Each forward asserts the bytes of every block that any request attends to; at the end every request has
its tokens, none hangs, and every block is back in the pool.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hybrids import HYBRIDS
from late_gpu import LateGpu
from made_up_model import prompt
from modelless import IMPATIENT, Engine
from support.daemon import Daemon, wait_until

from kvserver.protocol import Error, ErrorCode, Retrieve

LONGEST = 384  # tokens of a prompt, but for some 40 more
STEPS = 400  # at least; what happens depends on the machine's pace, so it goes on until enough was loaded
LOADS = 5
HANGS_SECONDS = 120.0
TIMEOUTS = {"kvserver.load_timeout_ms": 120, "kvserver.store_timeout_ms": 200, **IMPATIENT}


class Chaos:
    """One engine or several on one daemon."""

    def __init__(self, seed: int, engines: list[Engine], daemon: Daemon, longest: int = LONGEST) -> None:
        self.random = random.Random(seed)
        self.engines = engines
        self.daemon = daemon
        self.names = 0
        self.frozen_until = 0.0
        self.happened: Counter[str] = Counter()
        # A few families of prompts that share prefixes of any length.
        self.longest = longest
        self.families = [prompt(seed * 100 + i, longest) for i in range(4)]

    def run(self, steps: int = STEPS, loads: int = LOADS) -> None:
        made, deadline = 0, time.monotonic() + HANGS_SECONDS
        while made < steps or self.loaded < loads:
            assert time.monotonic() < deadline, f"{made} steps, {self.loaded} loads"
            for engine in self.engines:
                self.act(engine)
                engine.step()
            made += 1
        for engine in self.engines:
            self.wait_for_all(engine)

    @property
    def loaded(self) -> int:
        return sum(engine.worker.worker.counters["loaded"] for engine in self.engines)

    def wait_for_all(self, engine: Engine) -> None:
        """Let everything end. Blocks in quarantine come back with a later step."""
        self.daemon.thaw()
        self.frozen_until = 0.0
        engine.run(30, until=lambda: not engine.busy)
        if engine.gpu is not None:
            engine.gpu.finish()
        wait_until(lambda: engine.generate_free("tick") == engine.num_blocks - 1, 10)
        engine.run()

    def act(self, engine: Engine) -> None:
        if self.frozen_until and time.monotonic() > self.frozen_until:
            self.daemon.thaw()
            self.frozen_until = 0.0
        live = [name for name, answer in engine.answers.items() if answer.finish_reason is None]
        choice = self.random.random()
        if len(live) < 8 and choice < 0.3:
            self.submit(engine)
        elif live and choice < 0.31:
            self.happened["aborted"] += 1
            engine.abort(self.random.choice(live))
        elif choice < 0.3115 and not self.frozen_until:
            self.happened["restarted"] += 1
            self.daemon.kill()
            self.daemon.start()
        elif choice < (0.33 if self.loading(engine) else 0.313) and not self.frozen_until:
            self.happened["frozen"] += 1
            self.daemon.freeze()
            self.frozen_until = time.monotonic() + self.random.choice([0.02, 0.2, 0.6])
        elif choice > 0.9995:
            self.happened["reset"] += 1
            self.wait_for_all(engine)
            engine.weights += 1
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)

    def loading(self, engine: Engine) -> bool:
        return any(engine.status_of(name) == "WAITING_FOR_REMOTE_KVS" for name in engine.scheduler.requests)

    def submit(self, engine: Engine) -> None:
        ended = [answer for each in self.engines for answer in each.answers.values() if answer.finish_reason]
        if ended and self.random.random() < 0.2:  # the next turn of a conversation, perhaps with another engine
            self.happened["went on"] += 1
            before = self.random.choice(ended)
            tokens = [*before.prompt, *before.tokens][: self.longest]
        else:
            tokens = self.random.choice(self.families)[: self.random.randrange(20, self.longest)]
        if self.random.random() < 0.4:
            tokens = [*tokens, *prompt(self.names, self.random.randrange(1, 40))]
        self.names += 1
        engine.add(f"r{self.names}", tokens, count=self.random.choice([1, 3, 40, 120]))

    def assert_all_is_well(self) -> None:
        for engine in self.engines:
            assert {name: answer for name, answer in engine.answers.items() if not answer.right} == {}
            assert len(engine.received) == sum(Fraction(1, load.copies) for load in engine.loads), "each load ends once"
        self.daemon.wait_for_accounting(tickets=0, pins=0)

    def __str__(self) -> str:
        workers = [engine.worker.worker.counters for engine in self.engines]
        return (
            f"{sum(len(engine.answers) for engine in self.engines)} requests, {self.loaded} loads, "
            f"{sum(engine.preemptions for engine in self.engines)} preemptions, {sum(workers, Counter())}, {self.happened}"
        )


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {"asynchronous": True}),
        (2, {"asynchronous": True, "drafts": 2}),
        (3, {"asynchronous": False, "drafts": 3}),
        (4, {"asynchronous": True, "world_size": 2}),
        (5, {"asynchronous": False, "max_tokens_per_step": 64}),
        (6, {"asynchronous": True, "max_tokens_per_step": 96, "runner": 2}),
        (7, {"asynchronous": True, "late": True}),
        (8, {"asynchronous": False, "max_tokens_per_step": 96, "late": True, "world_size": 2}),
    ],
)
def test_a_random_run_ends_with_right_tokens_and_all_blocks_free(make_daemon, make_engine, seed, options):
    """`late`: the forward's work happens on a GPU, some time after its step."""
    daemon = make_daemon(copy_delay_us=1000, l1_size="1MiB")
    engine = make_engine(daemon, num_blocks=70, extra=TIMEOUTS, **paced(seed, options))
    chaos = Chaos(seed, [engine], daemon)
    chaos.run()
    print(f"seed {seed}: {chaos}")
    chaos.assert_all_is_well()


RUNS = [
    ("gpt-oss", {"asynchronous": True}),
    ("gpt-oss", {"asynchronous": False, "max_tokens_per_step": 96, "late": True, "world_size": 2}),
    ("long window", {"asynchronous": True, "max_tokens_per_step": 80, "runner": 2}),
    ("long window", {"asynchronous": True, "drafts": 2}),
    ("gemma", {"asynchronous": True, "world_size": 2}),
    ("gemma", {"asynchronous": False, "max_tokens_per_step": 64, "late": True}),
    ("llama4", {"asynchronous": True, "max_tokens_per_step": 160}),
    ("deepseek-v3.2", {"asynchronous": False, "world_size": 2}),
    ("qwen3-next", {"asynchronous": True}),
    ("qwen3-next", {"asynchronous": False, "max_tokens_per_step": 96, "late": True, "world_size": 2}),
    ("kimi-linear", {"asynchronous": True, "world_size": 2}),
    ("nemotron", {"asynchronous": True, "max_tokens_per_step": 80, "runner": 2}),
    ("deepseek-v4", {"asynchronous": True, "max_tokens_per_step": 512}),
    ("deepseek-v4.1", {"asynchronous": True, "max_tokens_per_step": 512}),
    ("deepseek-v4.1", {"asynchronous": False, "drafts": 3}),
    ("glm-5.3", {"asynchronous": True, "world_size": 2}),
    ("qwen4", {"asynchronous": True, "drafts": 2, "max_tokens_per_step": 96}),
    ("qwen4", {"asynchronous": False, "late": True}),
    ("qwen3-next", {"asynchronous": True, "drafts": 2, "runner": 2}),
    ("qwen3-next", {"asynchronous": False, "drafts": 4, "max_tokens_per_step": 96, "late": True}),
    ("kimi-linear", {"asynchronous": True, "drafts": 1}),
    ("nemotron", {"asynchronous": True, "drafts": 3, "runner": 2}),
]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))])
@pytest.mark.parametrize("run", range(len(RUNS)), ids=[f"{model} {number}" for number, (model, _) in enumerate(RUNS)])
def test_engines_of_a_hybrid_share_an_l1_that_is_too_small(make_daemon, make_tap, make_engine, run, seed):
    """Some loads fail in one of their object groups."""
    model, options = RUNS[run]
    daemon = make_daemon(copy_delay_us=1000, l1_size="256KiB" if HYBRIDS[model].chunk == 64 else "1MiB")
    tap = make_tap(daemon)
    dice = random.Random(seed)
    refused = Error(code=ErrorCode.INTERNAL, message="as the test wants it")
    tap.instead = lambda message: refused if isinstance(message, Retrieve) and dice.random() < 0.05 else None
    hybrid = HYBRIDS[model]
    few = {**hybrid.options, "num_blocks": hybrid.few_blocks, "extra": TIMEOUTS}
    engines = [make_engine(tap.endpoint, **{**few, **paced(10 * seed + number, options)}) for number in range(2)]
    chaos = Chaos(10 * run + seed, engines, daemon, longest=max(LONGEST, 3 * hybrid.chunk))
    chaos.run(steps=200)
    print(f"{model} {options} seed {seed}: {chaos}")
    chaos.assert_all_is_well()
    groups = {load.group for engine in engines for load in engine.loads}
    assert groups == set(range(len(hybrid.kinds))), "of every object group something was loaded"


def paced(seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """With a GPU that is late now and then, if they want one."""
    if not options.get("late"):
        return options
    pace = random.Random(seed)
    gpu = LateGpu(pause=lambda: time.sleep(pace.choice([0, 0, 0, 0.0001, 0.002])))
    return {**{name: value for name, value in options.items() if name != "late"}, "gpu": gpu}
