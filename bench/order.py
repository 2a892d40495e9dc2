"""Where in a step copies begin: when a store is found, when a load ends, and how long stores keep blocks, by a made-up GPU.

    .venv-vllm/bin/python bench/order.py [--step-ms 20] [--rounds 100]

A real daemon, and vLLM's real scheduler with the connector around a model that is not there (tests/adapters/modelless.py). A thread plays the
GPU's stream: each forward takes --step-ms, and the engine waits for a step's end as vLLM does, one step later with asynchronous scheduling. One
request is being decoded all the time. Medians, in milliseconds.

*found*: from the end of the forward that computed a prompt of 4 chunks until a lookup of another connection finds all of it. *kept*: how long a block of it
was kept from vLLM by its store alone or beside its request. *loaded*: from a request's arrival until its load of 4 chunks is reported to
vLLM. *before the forward* is what the connector does. *behind the forward*: copies begin as vLLM calls start_load_kv and wait_for_save.
*not accepted*: behind the forward that computes the KV, before vLLM has accepted the step, which other engines must not read: no way of storing is faster.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP / "tests"), str(TOP / "tests/adapters")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from common import median, table  # noqa: E402
from late_gpu import LateGpu  # noqa: E402
from made_up_model import prompt  # noqa: E402
from model_folder import write_model  # noqa: E402
from modelless import Engine, configure  # noqa: E402
from support.daemon import Daemon  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402

from kvserver.protocol import Lookup, LookupReply  # noqa: E402
from kvserver.protocol.client import Channel  # noqa: E402

CHUNK, CHUNKS = 64, 4
TOKENS = CHUNK * CHUNKS + 10
FORMS = "before the forward", "behind the forward", "not accepted"


class Paced(Engine):
    """Steps take time on its GPU, and their outputs are known when the GPU has done them."""

    def __init__(self, daemon: Daemon, folder: Path, form: str, asynchronous: bool, seconds: float) -> None:
        extra = {"kvserver.store_timeout_ms": 60_000}
        made = configure(folder, daemon.endpoint, num_blocks=400, asynchronous=asynchronous, extra=extra)
        super().__init__(*made, gpu=LateGpu())
        self.ended: dict[str, float] = {}  # when the forward that computed a prompt had ended
        self._seconds = seconds
        self._steps: deque[threading.Event] = deque()
        self._forward, self.batch.forward = self.batch.forward, self._paced
        if form != "before the forward":
            for runner in self.runners:
                connector: Any = runner.connector
                connector.bind_connector_metadata = lambda plan, c=connector: (
                    KVConnectorBase_V1.bind_connector_metadata(c, plan)
                )
                connector.start_load_kv = lambda context, c=connector: (c._begin_stores(), c._begin_loads())
        if form == "not accepted":
            acceptance = self.connector.scheduler._acceptance
            hold = acceptance.hold
            acceptance.hold = lambda *store: (hold(*store), acceptance._accept(acceptance._planning.stores.pop()))

    def _paced(self, output: Any, weights: int) -> Any:
        assert self.gpu is not None
        self.gpu.queue(lambda: time.sleep(self._seconds if output.total_num_scheduled_tokens else 0))
        result = self._forward(output, weights)
        names, done = [new.req_id for new in output.scheduled_new_reqs], threading.Event()

        def end() -> None:
            self.ended.update(dict.fromkeys(names, time.monotonic()))
            done.set()

        self.gpu.queue(end)
        self._steps.append(done)
        return result

    def _update(self, *step: Any) -> None:
        self._steps.popleft().wait()
        super()._update(*step)


class Finder(threading.Thread):
    """Looks up keys until all are found."""

    def __init__(self, channel: Channel, lookup: Lookup) -> None:
        super().__init__(daemon=True)
        self.found_at = 0.0
        self._channel, self._lookup = channel, lookup

    def run(self) -> None:
        while not self.found_at:
            if self._channel.send(self._lookup) is None:
                continue
            self._channel.wait(1)
            for _, reply in self._channel.receive():
                if isinstance(reply, LookupReply) and reply.hit_chunks == CHUNKS:
                    self.found_at = time.monotonic()
            time.sleep(0.0002)


def decode(engine: Engine, seeds: list[int]) -> None:
    if not engine.scheduler.running:
        answer = engine.add(f"decoded{len(engine.answers)}", prompt(seeds.pop(), 30), count=1500)
        engine.run(until=lambda: bool(answer.tokens))


def store_times(engine: Engine, channel: Channel, seeds: list[int]) -> tuple[float, float]:
    """(found, kept), in milliseconds."""
    finders: list[Finder] = []
    name, kept = f"stored{len(engine.answers)}", 0.0
    names = engine.connector.scheduler._notices._sender
    sender = names["instance_id"], names["incarnation"], "finder"

    def look(plan: Any) -> None:
        for store in plan.stores:
            if store.request_id == name and not finders:
                lookup = Lookup(*sender, store.chunk_blocks, store.keys, store.variant, durability=store.durability)
                finders.append(Finder(channel, lookup))
                finders[0].start()

    engine.before_step = look
    answer = engine.add(name, prompt(seeds.pop(), TOKENS), count=1)
    until = time.monotonic() + 10
    while not (answer.finish_reason and finders and finders[0].found_at):
        before, blocks = time.monotonic(), len(engine.connector.scheduler._pool.kept)
        engine.step()
        kept += blocks * (time.monotonic() - before)
        assert time.monotonic() < until
    engine.before_step = lambda plan: None
    return 1e3 * (finders[0].found_at - engine.ended[name]), 1e3 * kept / (CHUNKS * CHUNK // 16)


def load_time(engine: Engine, tokens: list[int]) -> float:
    pool = engine.pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))  # its own cache forgets the prompt
    name, began = f"loaded{len(engine.answers)}", time.monotonic()
    answer = engine.add(name, tokens, count=1)
    engine.run(until=lambda: name in engine.received)
    taken = time.monotonic() - began
    engine.run(until=lambda: answer.finish_reason is not None)
    assert answer.external == CHUNKS * CHUNK, "a hit"
    return 1e3 * taken


def row(form: str, asynchronous: bool, seconds: float, rounds: int, folder: Path) -> list[object]:
    daemon = Daemon(l1_size="512MiB", chunk_tokens=CHUNK, metrics_sample_rate=0.01)
    daemon.start()
    engine = Paced(daemon, folder, form, asynchronous, seconds)
    seeds = list(range(100_000, 100_000 + 3 * rounds))
    warm = prompt(1, TOKENS)
    found, kept, loaded = [], [], []
    channel = Channel(daemon.endpoint)
    store_times(engine, channel, [1])
    for _ in range(rounds):
        decode(engine, seeds)
        times = store_times(engine, channel, seeds)
        found.append(times[0])
        kept.append(times[1])
        if form != "not accepted":
            loaded.append(load_time(engine, warm))
    for name in list(engine.scheduler.requests):
        engine.abort(name)
    engine.run()
    engine.close()
    channel.close()
    daemon.close()
    scheduling = "asynchronous" if asynchronous else "synchronous"
    return [scheduling, form, median(found), median(kept), median(loaded) if loaded else "-"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        rows = [
            row(form, asynchronous, options.step_ms / 1e3, options.rounds, model)
            for asynchronous in (False, True)
            for form in FORMS
        ]
    print(table(["scheduling", "copies begin", "found", "kept", "loaded"], rows))


if __name__ == "__main__":
    main()
