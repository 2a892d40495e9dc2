"""A real daemon and engine processes whose KV lies in GPU memory: bytes, races, and engines or daemons that stop."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable

import pytest
from support import cuda_driver
from support.daemon import Daemon, wait_until
from support.engine_process import BLOCKS, EngineProcess, many_layers
from support.gpu_memory import SIMULATED, daemon_flags

MakeEngine = Callable[..., EngineProcess]
GEOMETRY = many_layers()
LARGE = (BLOCKS - 1) // 4 - 8  # chunks: nearly all blocks
HUNG_SECONDS = float(os.environ.get("KVSERVER_TEST_HUNG_SECONDS", "5"))


def in_use(daemon: Daemon) -> tuple[int, int, int]:
    """Mappings, connections and copies of engines."""
    counts = daemon.accounting()
    return counts["mappings"], counts["attachments"], counts["tickets"]


def round_trip(engine: EngineProcess, seed: str, count: int = 3) -> None:
    """Store chunks, destroy them, load them elsewhere: AssertionError unless the bytes are equal."""
    engine.ask("fill")
    content = engine.ask("digest", 1, count)
    assert engine.ask("store", seed, 1, count) == count
    engine.ask("fill")
    assert engine.ask("lookup", seed, count) == count
    second = 1 + 4 * count
    assert engine.ask("load", seed, second, count) == count
    assert engine.ask("digest", second, count) == content
    assert engine.ask("digest", 1, count) != content


def test_what_one_engine_stored_another_loads(daemon: Daemon, engine: EngineProcess, make_engine: MakeEngine) -> None:
    first = make_engine(daemon)
    content = first.ask("digest", 1, 8)
    assert first.ask("store", "shared", 1, 8) == 8
    first.kill()
    assert engine.ask("lookup", "shared", 8) == 8
    assert engine.ask("load", "shared", 41, 8) == 8
    assert engine.ask("digest", 41, 8) == content


@pytest.mark.parametrize("count", [1, 5, 20])
def test_a_round_trip_keeps_every_byte(daemon: Daemon, engine: EngineProcess, count: int) -> None:
    round_trip(engine, f"round trip {count}", count)


def test_a_load_whose_word_is_done_has_all_its_bytes_in_place(daemon: Daemon, engine: EngineProcess) -> None:
    assert engine.ask("store", "race", 1, 4) == 4
    assert engine.ask("stale_loads", "race", 1, 4, 50) == 0


def test_the_daemon_reports_the_gpu_and_what_it_moved(daemon: Daemon, engine: EngineProcess) -> None:
    round_trip(engine, "status")
    (gpu,) = daemon.status()["gpus"]
    assert gpu["mapped_bytes"] == sum(GEOMETRY.sizes)
    assert gpu["store"]["dma_bytes"] + gpu["store"]["staged_bytes"] >= 12 * GEOMETRY.block_bytes


def test_an_engine_that_is_killed_before_its_event_fires_stores_nothing(
    daemon: Daemon, engine: EngineProcess, make_engine: MakeEngine
) -> None:
    before = in_use(daemon)
    victim = make_engine(daemon)
    victim.ask("store_after_event", "never", 1, 4, 3000)
    victim.kill()
    round_trip(engine, "meanwhile")
    wait_until(lambda: in_use(daemon) == before, 30)
    assert engine.ask("lookup", "never", 4) == 0


@pytest.mark.parametrize("direction", ["store", "load"])
def test_an_engine_that_is_killed_in_the_middle_of_a_copy_harms_no_other(
    daemon: Daemon, engine: EngineProcess, make_engine: MakeEngine, direction: str
) -> None:
    before = in_use(daemon)
    victim = make_engine(daemon)
    if direction == "load":
        assert victim.ask("store", "large", 1, LARGE) == LARGE
    victim.ask(f"begin_{direction}", "large", 1, LARGE)
    victim.ask("wait_for", "RUNNING", "DONE")
    victim.kill()
    round_trip(engine, f"after the death in a {direction}")
    wait_until(lambda: in_use(daemon) == before, 30)


def test_while_an_engine_hangs_another_stores_and_loads(
    daemon: Daemon, engine: EngineProcess, make_engine: MakeEngine
) -> None:
    """KVSERVER_TEST_HUNG_SECONDS=60 makes it as long as an engine's compilation."""
    hung = make_engine(daemon)
    hung.ask("begin_store", "hung", 1, LARGE // 2)
    hung.freeze()
    until, turns = time.monotonic() + HUNG_SECONDS, 0
    while time.monotonic() < until:
        round_trip(engine, f"beside {turns}")
        turns += 1
    hung.thaw()
    assert turns > 0
    assert hung.ask("wait_for", "DONE", "FAILED") == "DONE"
    round_trip(hung, "awake again")


@pytest.mark.skipif(SIMULATED, reason="a simulated GPU has no memory of its own")
def test_the_memory_of_a_killed_engine_comes_back(
    daemon: Daemon, engine: EngineProcess, make_engine: MakeEngine
) -> None:
    round_trip(engine, "the daemon has taken its own memory")
    gc.collect()  # memory of earlier tests in this process
    in_use_before, before = in_use(daemon), cuda_driver.free_bytes()
    victim = make_engine(daemon)
    victim.ask("begin_store", "killed", 1, LARGE)
    taken = before - cuda_driver.free_bytes()
    assert taken > sum(GEOMETRY.sizes)
    victim.kill()
    wait_until(lambda: in_use(daemon) == in_use_before, 30)
    slack = 64 << 20
    wait_until(lambda: before - cuda_driver.free_bytes() < slack, 30, f"{taken} bytes come back")


def test_blocks_of_a_load_stay_the_daemons_while_it_stands_still(make_engine: MakeEngine) -> None:
    """The daemon is stopped in the middle of a load, whose deadline passes. No byte arrives after the load has ended."""
    delay = {"copy_delay_us": 30_000} if SIMULATED else {}
    daemon = Daemon(l1_size="96MiB" if SIMULATED else "4GiB", **daemon_flags(), **delay).start()
    try:
        engine = make_engine(daemon)
        assert engine.ask("store", "large", 1, LARGE) == LARGE
        content = engine.ask("digest", 1, LARGE)
        for _ in range(20):  # until it is stopped in time
            engine.ask("begin_load", "large", 1, LARGE, 0.5)
            engine.ask("wait_for", "RUNNING", "DONE")
            daemon.freeze()
            if engine.ask("state") == "RUNNING":
                break
            daemon.thaw()
            assert engine.ask("wait_for", "DONE", "FAILED") == "DONE"
        else:
            # Only a real GPU is so fast: not on the list of support/skips.py.
            pytest.skip("the load was faster than the signal, twenty times")
        time.sleep(0.6)  # past the deadline
        assert engine.ask("state") == "RUNNING", "a deadline ends the engine's wait, not the copy"
        assert engine.ask("cancel_load") == "CANCELLING"
        daemon.thaw()
        assert engine.ask("wait_for", "DONE", "CANCELLED", "FAILED") in ("CANCELLED", "DONE")
        engine.ask("poison", 0xA5, 1, LARGE)
        poisoned = engine.ask("digest", 1, LARGE)
        time.sleep(0.1)
        assert engine.ask("digest", 1, LARGE) == poisoned != content
    finally:
        daemon.close()
