"""The lifetimes of a real engine's blocks: the daemon's metrics of them, beside those of vLLM's own collector.

One engine with few blocks serves prompts that share prefixes, is preempted, loads from the daemon and forgets its cache,
while vLLM's collector (`--kv-cache-metrics`) watches every block. The engine's hook forwards to that collector, so both
see the same events; vLLM takes a time at each, we share one among those of 0.2 ms.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny_models
from engines import TIMEOUTS, Engine, Prompt, engine_group
from support.daemon import Daemon, wait_until

from kvserver.protocol import (
    MARK,
    RECORD_ACCESSED,
    RECORD_ALLOCATED,
    RECORD_CLEARED,
    RECORD_EVICTED,
    RECORD_OPERATION_SHIFT,
    RECORD_RELEASED,
)

BLOCKS = 104  # of 32 tokens: three requests of 1,060 tokens and 60 more preempt each other
SECONDS_PER_EVENT = 0.001
OPTIONS = {
    "dtype": "float32",
    "extra": TIMEOUTS,
    "num_gpu_blocks_override": BLOCKS,
    "kv_cache_metrics": True,
    "kv_cache_metrics_sample": 1.0,
}
VLLM = {
    "lifetime": "vllm:kv_block_lifetime_seconds",
    "since_last_access": "vllm:kv_block_idle_before_evict_seconds",
    "reuse_gap": "vllm:kv_block_reuse_gap_seconds",
}
COUNTERS = ["allocations", "reuses", "shared_accesses", "evictions", "recycled", "cleared", "lost", "report_gaps"]
GAUGES = ["active_blocks", "released_blocks", "tracked_blocks", "unsure"]
HISTOGRAMS = ["lifetime", "idle_before_evict", "since_last_access", "reuse_gap"]


@dataclass
class Values:
    """What a histogram knows."""

    count: int = 0
    sum: float = 0.0

    def add(self, nanos: int) -> None:
        self.count += 1
        self.sum += nanos / 1e9

    def is_close_to(self, other: Values) -> bool:
        return self.count == other.count and abs(self.sum - other.sum) <= SECONDS_PER_EVENT * self.count


@dataclass
class Lifetime:
    born: int
    accesses: list[int] = field(default_factory=list)
    owners: int = 1
    released: int = 0


class Model:
    """The plain meaning of the records: every lifetime with all its accesses, kept until its end."""

    def __init__(self) -> None:
        self.values = {name: Values() for name in HISTOGRAMS}
        self.vllm_gaps = Values()  # between the last four accesses of a lifetime, at its end
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.tracked: dict[int, Lifetime] = {}

    def apply(self, records: bytes, marks: bytes) -> None:
        times = dict(MARK.iter_unpack(marks))
        now = 0
        for number, record in enumerate(array("I", records)):
            now = times.get(number, now)
            self.step(now, record >> RECORD_OPERATION_SHIFT, record & ((1 << RECORD_OPERATION_SHIFT) - 1))

    def step(self, now: int, operation: int, block: int) -> None:
        lifetime = self.tracked.get(block)
        if operation == RECORD_ALLOCATED:
            self.end(now, block, "recycled")
            self.tracked[block] = Lifetime(now)
            self.counts["allocations"] += 1
        elif operation == RECORD_ACCESSED:
            assert lifetime is not None
            self.counts["shared_accesses" if lifetime.owners else "reuses"] += 1
            self.values["reuse_gap"].add(now - (lifetime.accesses or [lifetime.born])[-1])
            lifetime.accesses.append(now)
            lifetime.owners += 1
        elif operation == RECORD_RELEASED:
            assert lifetime is not None
            lifetime.owners -= 1
            lifetime.released = now
        elif operation == RECORD_EVICTED:
            self.end(now, block, "evictions")
        elif operation == RECORD_CLEARED:
            self.counts["cleared"] += len(self.tracked)
            self.tracked.clear()
        else:
            raise AssertionError(f"operation {operation}: the daemon received a full state, so something was lost")

    def end(self, now: int, block: int, how: str) -> None:
        lifetime = self.tracked.pop(block, None)
        if lifetime is None:
            return
        self.counts[how] += 1
        self.values["lifetime"].add(now - lifetime.born)
        self.values["since_last_access"].add(now - (lifetime.accesses or [lifetime.born])[-1])
        self.values["idle_before_evict"].add(0 if lifetime.owners else now - lifetime.released)
        last = lifetime.accesses[-4:]
        for earlier, later in itertools.pairwise(last):
            self.vllm_gaps.add(later - earlier)


@dataclass
class Measured:
    """Of one run, all of the same events."""

    vllm: dict[str, Values]
    records: Model
    daemon: dict[str, float]
    vllm_counters: dict[str, float]
    requests: dict[str, Any]  # of the instance's status
    instance_id: str

    def ours(self, name: str) -> Values:
        metric = f"kvserver_l0_block_{name}_seconds"
        return Values(int(self.daemon[f"{metric}_count"]), self.daemon[f"{metric}_sum"])

    def counter(self, name: str) -> float:
        return self.daemon[f"kvserver_l0_{name}_total"]


def metrics_of(daemon: Daemon, instance_id: str) -> dict[str, float]:
    """Name and value of every sample of the instance without a label of its own, such as `le`."""
    code, text = daemon.http("/metrics")
    assert code == 200
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        of = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if of.pop("instance_id", "") == instance_id and set(of) <= {"model_name"}:
            found[name] = float(value)
    return found


def requests_of(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["instances"][0]["requests"]
    return found


def exercise(engine: Engine, prompts: list[Prompt]) -> None:
    """What happens to the blocks."""
    for turn in range(8):  # four prompts of 20 blocks each and their variants do not fit: evictions
        for text in prompts:
            engine.generate([text, [*text[:320], *prompts[turn % 4][320:500]]], max_tokens=4)
            engine.generate([text], max_tokens=10)  # a prefix hit, and blocks that never fill
    engine.generate([(text * 2)[:1060] for text in prompts[:3]], max_tokens=60)  # preemption
    engine.wait_for_stores()
    engine.generate([prompts[0][:40]], max_tokens=2)  # vLLM's reset drops what it has not reported: a step reports it
    engine.forget()
    for text in prompts:
        engine.generate([text], max_tokens=8)
    engine.generate([prompts[3]], max_tokens=2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    model = tiny_models.llama(tmp_path_factory.mktemp("model"))
    with engine_group(model, tmp_path_factory.mktemp("lifetimes")) as group:
        daemon = Daemon(endpoint=group.endpoint, l1_size="256MiB", chunk_tokens=256, metrics_sample_rate=1.0)
        try:
            daemon.start()
            yield run(group.get("lifetimes", **OPTIONS), daemon)
        finally:
            daemon.close()


def run(engine: Engine, daemon: Daemon) -> Measured:
    wait_until(lambda: engine.counters()["connected"], 30)
    engine.ask("keep_records")
    prompts = [[3 + (seed * 331 + i * i * (seed + 1)) % 1000 for i in range(640)] for seed in range(4)]
    exercise(engine, prompts)
    engine.wait_for_stores()
    (instance,) = daemon.status()["instances"]
    instance_id = instance["instance_id"]
    records = Model()
    kept = engine.ask("records")["records"]
    for piece in kept:
        records.apply(bytes.fromhex(piece["records"]), bytes.fromhex(piece["marks"]))
    counted = engine.metrics()
    wait_until(lambda: sum(requests_of(daemon)["prompt_tokens"].values()) >= counted["vllm:prompt_tokens"], 10)
    count = sum(len(piece["records"]) for piece in kept) // 8
    wait_until(
        lambda: metrics_of(daemon, instance_id).get("kvserver_l0_records_total") == count, 10, f"{count} records"
    )
    histograms = engine.ask("histograms")["histograms"]
    return Measured(
        {name: Values(int(histograms[metric]["count"]), histograms[metric]["sum"]) for name, metric in VLLM.items()},
        records,
        metrics_of(daemon, instance_id),
        counted,
        requests_of(daemon),
        instance_id,
    )


def test_measured_run_has_many_events_of_each_kind(measured: Measured) -> None:
    counts = measured.records.counts
    assert measured.vllm_counters["vllm:num_preemptions"] > 0
    assert counts["evictions"] > 200
    assert counts["recycled"] > 10
    assert counts["reuses"] > 50
    assert counts["shared_accesses"] > 10
    assert counts["cleared"] > 10
    assert measured.records.vllm_gaps.count > 20


def test_records_have_the_durations_that_vllm_measured(measured: Measured) -> None:
    records = measured.records
    assert records.values["lifetime"].is_close_to(measured.vllm["lifetime"])
    assert records.values["since_last_access"].is_close_to(measured.vllm["since_last_access"])
    assert records.vllm_gaps.is_close_to(measured.vllm["reuse_gap"])


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_the_daemons_histograms_are_those_of_the_records(measured: Measured, name: str) -> None:
    ours, records = measured.ours(name), measured.records.values[name]
    assert ours.count == records.count
    assert ours.sum == pytest.approx(records.sum, rel=1e-9)


@pytest.mark.parametrize("name", ["lifetime", "since_last_access"])
def test_the_daemons_histograms_are_vllms_within_a_millisecond_per_event(measured: Measured, name: str) -> None:
    assert measured.ours(name).is_close_to(measured.vllm[name])


def test_the_daemon_counts_what_happened(measured: Measured) -> None:
    assert {name: measured.counter(name) for name in COUNTERS} == measured.records.counts
    assert measured.counter("evictions") + measured.counter("recycled") == measured.vllm["lifetime"].count


def test_every_lifetime_began_and_has_ended_or_goes_on(measured: Measured) -> None:
    ends = sum(measured.counter(name) for name in ("evictions", "recycled", "cleared", "lost"))
    gauges = {name: measured.daemon[f"kvserver_l0_{name}"] for name in GAUGES}
    assert measured.counter("allocations") == ends + gauges["tracked_blocks"]
    assert (
        gauges["tracked_blocks"] == gauges["active_blocks"] + gauges["released_blocks"] == len(measured.records.tracked)
    )
    assert gauges["unsure"] == 0


def test_the_sources_of_prompts_add_up_to_vllms_prompt_tokens(measured: Measured) -> None:
    tokens, loads = measured.requests["prompt_tokens"], measured.requests["request_loads"]
    cached = tokens["l0"] + tokens["l1"]
    assert sum(tokens.values()) == measured.vllm_counters["vllm:prompt_tokens"]
    assert tokens["l0"] > 0
    assert tokens["l1"] > 0
    assert loads["done"] > 0
    theirs = measured.vllm_counters["vllm:prompt_tokens_cached"]
    assert cached == theirs if not loads["failed"] else cached <= theirs  # a failed one's were computed


def test_printed_durations_of_vllm_and_kvserver_are_close(
    measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[tuple[str, Values, Values]] = [
        (name, measured.vllm[name], measured.ours(name)) for name in ("lifetime", "since_last_access")
    ]
    rows.append(("reuse_gap, vLLM's rule", measured.vllm["reuse_gap"], measured.records.vllm_gaps))
    rows.append(("reuse_gap", Values(), measured.ours("reuse_gap")))
    rows.append(("idle_before_evict", Values(), measured.ours("idle_before_evict")))
    with capsys.disabled():
        print("\n| seconds | vLLM: count | sum | kvserver: count | sum | difference per event, ms |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, theirs, mine in rows:
            apart = f"{(mine.sum - theirs.sum) / theirs.count * 1e3:.4f}" if theirs.count else ""
            vllm = f"{theirs.count} | {theirs.sum:.4f}" if theirs.count else "| "
            print(f"| {name} | {vllm} | {mine.count} | {mine.sum:.4f} | {apart} |")
        print({name: int(measured.counter(name)) for name in COUNTERS})
    assert all(theirs.is_close_to(mine) for _, theirs, mine in rows if theirs.count)
