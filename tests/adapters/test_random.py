"""Many requests at once, in too few blocks, with everything that can happen to them.

Each forward asserts the bytes of every block that any request attends to; at the end every request has
its tokens, none hangs, and every block is back in the pool.
"""

from __future__ import annotations

import random
import time

import pytest
from late_gpu import LateGpu
from made_up_model import prompt
from modelless import Engine
from support.daemon import wait_until

CHUNK = 64
STEPS = 400  # at least; what happens depends on the machine's pace, so it goes on until enough was loaded
LOADS = 5
HANGS_SECONDS = 120.0


class Chaos:
    def __init__(self, seed: int, engine: Engine, daemon) -> None:
        self.random = random.Random(seed)
        self.engine = engine
        self.daemon = daemon
        self.names = 0
        self.frozen_until = 0.0
        self.happened: dict[str, int] = {}
        # A few families of prompts that share prefixes of any length.
        self.families = [prompt(seed * 100 + i, 6 * CHUNK) for i in range(4)]

    def run(self) -> None:
        steps, deadline = 0, time.monotonic() + HANGS_SECONDS
        while steps < STEPS or self.loaded < LOADS:
            assert time.monotonic() < deadline, f"{steps} steps, {self.loaded} loads"
            self.act()
            self.engine.step()
            steps += 1
        self.wait_for_all()

    @property
    def loaded(self) -> int:
        return self.engine.worker.worker.counters["loaded"]

    def wait_for_all(self) -> None:
        """Let everything end. Blocks in quarantine come back with a later step."""
        self.daemon.thaw()
        self.frozen_until = 0.0
        self.engine.run(30, until=lambda: not self.engine.busy)
        if self.engine.gpu is not None:
            self.engine.gpu.finish()
        wait_until(lambda: self.engine.generate_free("tick") == self.engine.num_blocks - 1, 10)
        self.engine.run()

    def act(self) -> None:
        if self.frozen_until and time.monotonic() > self.frozen_until:
            self.daemon.thaw()
            self.frozen_until = 0.0
        live = [name for name, answer in self.engine.answers.items() if answer.finish_reason is None]
        choice = self.random.random()
        if len(live) < 8 and choice < 0.3:
            self.submit()
        elif live and choice < 0.31:
            self.note("aborted")
            self.engine.abort(self.random.choice(live))
        elif choice < 0.3115 and not self.frozen_until:
            self.note("restarted")
            self.daemon.kill()
            self.daemon.start()
        elif choice < (0.33 if self.loading() else 0.313) and not self.frozen_until:
            self.note("frozen")
            self.daemon.freeze()
            self.frozen_until = time.monotonic() + self.random.choice([0.02, 0.2, 0.6])
        elif choice > 0.9995:
            self.note("reset")
            self.wait_for_all()
            self.engine.weights += 1
            assert self.engine.scheduler.reset_prefix_cache(reset_connector=True)

    def loading(self) -> bool:
        return any(self.engine.status_of(name) == "WAITING_FOR_REMOTE_KVS" for name in self.engine.scheduler.requests)

    def submit(self) -> None:
        tokens = self.random.choice(self.families)[: self.random.randrange(20, 6 * CHUNK)]
        if self.random.random() < 0.4:
            tokens = [*tokens, *prompt(self.names, self.random.randrange(1, 40))]
        self.names += 1
        self.engine.add(f"r{self.names}", tokens, count=self.random.choice([1, 3, 40, 120]))

    def note(self, what: str) -> None:
        self.happened[what] = self.happened.get(what, 0) + 1


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
    gpu = None
    if "late" in options:
        options = {name: value for name, value in options.items() if name != "late"}
        pace = random.Random(seed)
        gpu = LateGpu(pause=lambda: time.sleep(pace.choice([0, 0, 0, 0.0001, 0.002])))
    timeouts = {"kvserver.load_timeout_ms": 120, "kvserver.store_timeout_ms": 200, "kvserver.settle_ms": 2}
    engine = make_engine(daemon, num_blocks=70, extra=timeouts, gpu=gpu, **options)
    chaos = Chaos(seed, engine, daemon)
    chaos.run()
    assert {name: answer for name, answer in engine.answers.items() if not answer.right} == {}
    assert len(engine.received) == len(engine.loads)
    print(
        f"seed {seed}: {len(engine.answers)} requests, {len(engine.loads)} loads, "
        f"{chaos.loaded} of them loaded, {engine.preemptions} preemptions, "
        f"{engine.worker.worker.counters['cancelled_stores']} stores cancelled for reuse, "
        f"{engine.connector.scheduler.counters['quarantined_blocks']} blocks quarantined, {chaos.happened}, "
        f"not sent { ({name: n for name, n in engine.worker.worker.counters.items() if name.startswith('not_sent')}) }"
    )
    daemon.wait_for_accounting(tickets=0, pins=0)
