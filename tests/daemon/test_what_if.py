"""What other sizes of L1 would have found, of a real daemon: beside its own counters, and beside plain LRU caches of each size."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.daemon import Daemon, wait_until
from support.traces import plain_lru_hits
from support.worker import Worker, make_keys

from kvserver.cli import status as cli_status
from kvserver.protocol.status import DaemonStatus

SIZES = {"0.25": 0.25, "0.5": 0.5, "1": 1.0, "2": 2.0, "4": 4.0, "8": 8.0, "unlimited": 0.0}


def served(daemon: Daemon, worker: Worker, prompts: list[list[int]]) -> None:
    """Looks up each prompt, stores what was missed, ends the request; returns when all is counted."""
    for number, prompt in enumerate(prompts):
        keys, name = [make_keys(1, id)[0] for id in prompt], f"r{number}"
        worker.lookup(keys, name)
        worker.store(keys, worker.blocks_for(len(keys)))
        worker.end_request(name)
    counted(daemon)


def counted(daemon: Daemon) -> dict[str, Any]:
    """/status once the curve has all lookups, and nothing is queued."""

    def found() -> dict[str, Any] | None:
        status = daemon.status()
        all_of_them = status["what_if"]["looked_up_tokens"] == status["totals"]["lookup_tokens"]
        return status if all_of_them and not status["events"]["queue_depth"] else None

    return wait_until(found, what="every lookup is in the curve")


def would_hit(daemon: Daemon) -> dict[str, int]:
    return {one["size"]: one["would_hit_tokens"] for one in counted(daemon)["what_if"]["sizes"]}


def drawn(seed: int, documents: int, longest: int, count: int, shared: int = 0) -> list[list[int]]:
    """Beginnings of documents, the first ones more often, behind `shared` chunks that all have."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        document = int(documents * draw.random() ** 2)
        first = 1000 + longest * document
        found.append([*range(shared), *range(first, first + draw.randint(1, longest))])
    return found


@pytest.mark.parametrize("shared", [0, 4], ids=["", "behind a prompt that all share"])
def test_what_if_size_one_agrees_with_the_hit_counter_and_each_size_with_an_lru(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker], shared: int
) -> None:
    daemon = make_daemon(l1_size="2MiB", eviction_policy="lru")
    worker = make_worker(daemon)
    prompts = drawn(1, 60, 6, 400, shared)
    served(daemon, worker, prompts)
    status = daemon.status()
    capacity, looked_up = status["l1"]["chunks"], status["totals"]["lookup_tokens"]
    assert status["l1"]["evictions"] > 100, "L1 is full"
    found = would_hit(daemon)
    chunk_tokens = looked_up // sum(map(len, prompts))

    def points(tokens: float) -> float:
        return 100 * tokens / looked_up

    counter = daemon.metric("kvserver_lookup_hit_tokens_total")
    assert points(found["1"]) == pytest.approx(points(counter or 0), abs=0.5)
    for size, times in SIZES.items():
        true = plain_lru_hits(prompts, int(times * capacity)) * chunk_tokens
        assert points(found[size]) == pytest.approx(points(true), abs=2), size
    assert points(found["4"] - found["0.25"]) > 10, "sizes differ"
    assert {size: daemon.metric("kvserver_l1_would_hit_tokens_total", size=size) for size in SIZES} == found


def test_the_curve_follows_the_policy_of_l1(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon(l1_size="2MiB", eviction_policy="slru")
    served(daemon, make_worker(daemon), drawn(2, 60, 6, 300, 4))
    status = daemon.status()
    assert status["l1"]["evictions"] > 100, "L1 is full"
    assert status["what_if"]["policy"] == status["l1"]["policy"] == "slru"
    points = 100 / status["totals"]["lookup_tokens"]
    counter = daemon.metric("kvserver_lookup_hit_tokens_total") or 0
    assert points * would_hit(daemon)["1"] == pytest.approx(points * counter, abs=2)


def test_chunks_that_only_l2_has_are_hits_of_a_larger_l1(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    daemon = make_daemon(l1_size="2MiB", l2=f"file://{tmp_path}?size=64MiB")
    worker = make_worker(daemon)
    served(daemon, worker, [[1, 2, 3, 4]])
    number = 10
    while daemon.metric("kvserver_l1_evicted_chunks_total") < 4:  # type: ignore[operator]
        wait_until(lambda: not daemon.tier()["queue_objects"], what="L2 has all")
        served(daemon, worker, [[number, number + 1]])
        number += 2
    keys = [make_keys(1, id)[0] for id in (1, 2, 3, 4)]
    assert worker.lookup(keys, "again") == 0
    worker.end_request("again")
    tokens = counted(daemon)["totals"]["lookup_tokens"] // (number - 10 + 8) * 4
    first = would_hit(daemon)
    assert (first["0.5"], first["1"], first["2"], first["unlimited"]) == (0, 0, tokens, tokens)
    assert worker.fill(keys, "filled") == 4
    worker.end_request("filled")
    assert worker.lookup(keys, "found") == 4
    then = would_hit(daemon)
    assert then["0.5"] - first["0.5"] == then["1"] - first["1"] >= tokens, "it is the youngest, since the fill"
    assert then["1"] == daemon.metric("kvserver_lookup_hit_tokens_total")


def test_chunks_that_an_earlier_daemon_wrote_to_l2_are_hits_once_they_are_filled(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    daemon = make_daemon(l2=f"file://{tmp_path}?size=64MiB")
    keys = make_keys(4)
    writer = make_worker(daemon)
    writer.store(keys, writer.blocks_for(4))
    wait_until(lambda: (tier := daemon.tier())["objects"] >= 4 and not tier["queue_objects"])
    assert daemon.terminate() == 0
    daemon.start()
    daemon.wait_for_tiers()
    worker = make_worker(daemon)
    assert worker.lookup(keys, "filled") == 0
    assert worker.fill(keys, "filled") == 4
    worker.end_request("filled")
    assert set(would_hit(daemon).values()) == {0}
    assert worker.lookup(keys, "found") == 4
    assert set(would_hit(daemon).values()) == {daemon.metric("kvserver_lookup_hit_tokens_total")} != {0}


def test_cleared_chunks_are_misses_of_every_size(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    served(daemon, worker, [[1, 2, 3]])
    assert daemon.http("/cache/clear", "POST")[0] == 200
    served(daemon, worker, [[1, 2, 3]])
    assert set(would_hit(daemon).values()) == {0}
    served(daemon, worker, [[1, 2, 3]])
    assert set(would_hit(daemon).values()) == {daemon.metric("kvserver_lookup_hit_tokens_total")} != {0}


def test_the_status_command_shows_it_and_its_policy(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon()
    assert "if L1 were" not in cli_status.table(msgspec.convert(daemon.status(), DaemonStatus))
    served(daemon, make_worker(daemon), [[1, 2], [1, 2, 3, 4]])
    wait_until(lambda: daemon.status()["what_if"]["listed_chunks"] == 4, what="the table is read once a second")
    text = cli_status.table(msgspec.convert(daemon.status(), DaemonStatus))
    (line,) = [line for line in text.splitlines() if line.startswith("if L1 were")]
    assert "1x 33.3%, 2x 33.3%" in line
    assert line.endswith("unlimited 33.3% of tokens looked up would be hits in L1 alone (estimated, by slru)")


def test_each_kind_of_engine_has_its_part_of_the_curve(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon()
    for name, count in (("vllm", 1), ("sglang", 2)):
        worker = make_worker(daemon, instance_id=name, model_name=name, connect_now=False)
        worker.attach()
        worker.register(engine=name)
        first = 10 * count  # other prompts: these engines share KV
        served(daemon, worker, [[first, first + 1], *[[*range(first, first + 4)]] * count])
        if name == "vllm":
            assert "of vllm" not in cli_status.table(msgspec.convert(daemon.status(), DaemonStatus))
    found = counted(daemon)["what_if"]
    tokens = {one["engine"]: one["looked_up_tokens"] for one in found["engines"]}
    assert list(tokens) == ["sglang", "vllm"]
    assert sum(tokens.values()) == found["looked_up_tokens"]
    hits = {one["engine"]: one["sizes"][-1]["would_hit_tokens"] / tokens[one["engine"]] for one in found["engines"]}
    assert hits == {"sglang": 6 / 10, "vllm": 2 / 6}
    for at, size in enumerate(found["sizes"]):
        assert size["would_hit_tokens"] == sum(one["sizes"][at]["would_hit_tokens"] for one in found["engines"])
    lines = cli_status.table(msgspec.convert(daemon.status(), DaemonStatus)).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  of ")] == ["sglang", "vllm"]
