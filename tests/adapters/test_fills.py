"""What the daemon has only in its storage is awaited and loaded: tokens and every byte, by vLLM's own scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hybrids import HYBRIDS
from made_up_model import prompt
from modelless import Engine
from support.daemon import Daemon, wait_until
from support.plain_tier import PlainTier
from support.server import PAGE_BYTES, Running, running_server

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices

CHUNK = 64
MakeEngine = Callable[..., Engine]


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon], tmp_path: Path) -> Daemon:
    return make_daemon(l2=f"file://{tmp_path}/l2?size=64MiB")


def restart(daemon: Daemon) -> None:
    """All that was stored is written; then L1 is empty."""

    def written() -> bool:
        status = daemon.status()
        return (
            status["l2"][0]["objects"] > 0 and not status["l2"][0]["queue_objects"] and not status["books"]["tickets"]
        )

    wait_until(written)
    daemon.terminate()
    daemon.start()
    daemon.wait_for_tiers()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_an_earlier_daemon_wrote_is_loaded(daemon: Daemon, make_engine: MakeEngine, asynchronous: bool) -> None:
    tokens = prompt(1, 3 * CHUNK + 20)
    first = make_engine(daemon, asynchronous=asynchronous)
    first.generate("cold", tokens)
    first.close()
    restart(daemon)
    warm = make_engine(daemon, asynchronous=asynchronous)
    answer = warm.generate("warm", tokens)
    assert (answer.local, answer.external) == (0, 3 * CHUNK)
    (instance,) = (each for each in daemon.status()["instances"] if each["requests"]["fills"])
    assert instance["requests"]["filled_tokens"] == 3 * CHUNK
    daemon.wait_for_accounting(tickets=0, pins=0, leases=0)


def test_all_ranks_load_what_an_earlier_daemon_wrote(daemon: Daemon, make_engine: MakeEngine) -> None:
    tokens = prompt(2, 3 * CHUNK + 20)
    first = make_engine(daemon, world_size=2)
    first.generate("cold", tokens)
    first.close()
    restart(daemon)
    assert make_engine(daemon, world_size=2).generate("warm", tokens).external == 3 * CHUNK


@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_windows_and_states_of_an_earlier_daemon_are_loaded(daemon: Daemon, make_engine: MakeEngine, name: str) -> None:
    """As far as a boundary was kept: the chunks of a hit are those of a daemon that never ended."""
    model = HYBRIDS[name]
    tokens = prompt(3, 5 * model.chunk + 20)
    first = make_engine(daemon, **model.options)
    first.generate("cold", tokens)
    first.close()
    expected = make_engine(daemon, **model.options)
    hit = expected.generate("warm", tokens).external // model.chunk * model.chunk
    expected.close()
    assert hit > 0
    restart(daemon)
    assert make_engine(daemon, **model.options).generate("filled", tokens).external == hit


class Stoppable(NamedTuple):
    """A server of this process, whose tier the test stops."""

    running: Running
    tier: PlainTier


@pytest.fixture
def stoppable() -> Iterator[Stoppable]:
    region = HostRegion(64 << 20)
    tier = PlainTier(region, PAGE_BYTES)
    devices = Devices(CpuDevice(region, PAGE_BYTES, 1))
    with running_server(devices, region.size, tiers=[tier.configured()]) as running:
        yield Stoppable(running, tier)


def stored(stoppable: Stoppable, make_engine: MakeEngine, tokens: list[int], **options: Any) -> None:
    """The prompt is in L2 and not in L1, and the tier is stopped."""
    engine = make_engine(stoppable.running.endpoint, **options)
    engine.generate("cold", tokens)
    engine.close()
    wait_until(lambda: len(stoppable.tier.objects) >= len(tokens) // CHUNK)
    stoppable.running.call(stoppable.running.parts.cache.clear_namespaces)
    stoppable.tier.stopped = True


def test_other_requests_run_while_one_waits_for_storage(stoppable: Stoppable, make_engine: MakeEngine) -> None:
    tokens = prompt(4, 3 * CHUNK + 20)
    stored(stoppable, make_engine, tokens)
    engine = make_engine(stoppable.running.endpoint, extra={"kvserver.fill_timeout_ms": 10_000})
    waits = engine.add("waits", tokens)
    engine.run(until=lambda: len(stoppable.tier.waiting) == 3)
    engine.add("runs", prompt(5, 40))
    engine.run(until=lambda: engine.status_of("runs") == "GONE")
    assert engine.status_of("waits") != "GONE"
    stoppable.tier.release()
    engine.run()
    assert waits.external == 3 * CHUNK


def test_a_request_computes_when_storage_is_too_slow(stoppable: Stoppable, make_engine: MakeEngine) -> None:
    tokens = prompt(6, 3 * CHUNK + 20)
    stored(stoppable, make_engine, tokens)
    stoppable.tier.hangs = True
    engine = make_engine(stoppable.running.endpoint, extra={"kvserver.fill_timeout_ms": 200})
    began = time.monotonic()
    assert engine.generate("slow", tokens).external == 0
    assert 0.2 <= time.monotonic() - began < 10
    half = engine.connector.scheduler
    assert half is not None
    assert (half.counters["fills"], half.counters["lookup_timeouts"]) == (1, 0)
    stoppable.tier.hangs = False
    stoppable.tier.release()


def test_an_engine_that_has_a_prompt_itself_awaits_no_fill(stoppable: Stoppable, make_engine: MakeEngine) -> None:
    """Its fill has begun before vLLM asks about it, since another request runs, and never ends."""

    def one_at_a_time(config: Any, caches: Any) -> None:
        config.scheduler_config.max_num_seqs = 1

    tokens = prompt(10, 3 * CHUNK + 20)
    engine = make_engine(
        stoppable.running.endpoint, extra={"kvserver.fill_timeout_ms": 10_000}, adjust=one_at_a_time, asynchronous=False
    )
    half = engine.connector.scheduler
    assert half is not None
    engine.generate("cold", tokens)
    wait_until(lambda: len(stoppable.tier.objects) == 3)
    stoppable.running.call(stoppable.running.parts.cache.clear_namespaces)
    stoppable.tier.stopped = True
    runs = engine.add("runs", prompt(11, 20), count=500)
    engine.run(until=lambda: bool(runs.tokens))
    answer = engine.add("again", tokens)
    engine.run(until=lambda: half.counters["fills"] == 1)
    assert runs.finish_reason is None
    engine.abort("runs")
    engine.run(8, until=lambda: answer.finish_reason is not None)
    assert (answer.local, answer.external, answer.right) == (3 * CHUNK + 16, 0, True)
    stoppable.tier.release()
    engine.run()


def test_request_awaits_no_fill_where_the_fill_timeout_is_zero(stoppable: Stoppable, make_engine: MakeEngine) -> None:
    tokens = prompt(7, 3 * CHUNK + 20)
    stored(stoppable, make_engine, tokens)
    engine = make_engine(stoppable.running.endpoint, extra={"kvserver.fill_timeout_ms": 0})
    assert engine.generate("computed", tokens).external == 0
    assert not [kind for kind, _ in stoppable.tier.began if kind == "get"]


def test_a_request_that_ends_while_it_waits_leaves_nothing(stoppable: Stoppable, make_engine: MakeEngine) -> None:
    tokens = prompt(8, 3 * CHUNK + 20)
    stored(stoppable, make_engine, tokens)
    engine = make_engine(stoppable.running.endpoint, extra={"kvserver.fill_timeout_ms": 10_000})
    engine.add("ends", tokens)
    engine.run(until=lambda: len(stoppable.tier.waiting) == 3)
    engine.abort("ends")
    engine.run()
    wait_until(lambda: not stoppable.tier.waiting)
    stoppable.tier.release()
    engine.close()
    parts = stoppable.running.parts
    wait_until(lambda: stoppable.running.call(lambda: parts.storage.fills.open == parts.cache.space.pins == 0))


def test_requests_compute_though_the_daemon_never_answers_their_fills(
    stoppable: Stoppable, make_engine: MakeEngine
) -> None:
    tokens = prompt(9, 3 * CHUNK + 20)
    stored(stoppable, make_engine, tokens)
    engine = make_engine(stoppable.running.endpoint, extra={"kvserver.fill_timeout_ms": 2000})
    half = engine.connector.scheduler
    assert half is not None
    answers = [engine.add(f"waits-{number}", tokens) for number in range(2)]
    engine.run(until=lambda: half.counters["fills"] == 2)
    with stoppable.running.loop_stopped():
        engine.run(until=lambda: all(answer.finish_reason for answer in answers))
    engine.run()
    assert half.counters["late_fills"] > 0  # the second may find computed what it waits for
    assert [answer.external for answer in answers] == [0, 0]
    assert all(answer.right for answer in answers)
    assert half.counters["lookup_timeouts"] == 0
    stoppable.tier.release()
