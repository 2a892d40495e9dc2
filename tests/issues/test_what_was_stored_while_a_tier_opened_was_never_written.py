"""What was stored in L1 while a file tier read its journal was dropped as not writable, and offered to the tier only by a later load: after
a restart an engine's first prompts, which later ones begin with, were in L1 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

OLD, NEW = make_keys(4, "old"), make_keys(8, "new")


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def daemon(tmp_path: Path, gate: Path) -> Iterator[Daemon]:
    """One whose tier has the old keys, and opens again when there is a gate."""
    daemon = Daemon(l2=f"file://{tmp_path}/l2?size=64MiB", l1_size="8MiB", journal_gate=gate, drain_seconds=90)
    try:
        daemon.start()
        daemon.wait_for_tiers()  # there is no journal yet
        with Worker(daemon.endpoint) as worker:
            worker.store(OLD, worker.blocks_for(len(OLD)))
            written(daemon, len(OLD))
        daemon.terminate()
        daemon.start()
        yield daemon
    finally:
        daemon.close()


def written(daemon: Daemon, objects: int) -> None:
    wait_until(lambda: (found := daemon.tier())["objects"] == objects and not found["queue_objects"])


def test_what_was_stored_while_a_tier_opened_is_written_once_it_is_ready(daemon: Daemon, gate: Path) -> None:
    with Worker(daemon.endpoint) as worker:
        blocks = worker.blocks_for(len(NEW))
        content = worker.memory.blocks(blocks)
        worker.store(NEW, blocks)
        worker.store(OLD, worker.blocks_for(len(OLD), first=40))
        found = daemon.tier()
        assert (found["state"], found["queue_objects"]) == ("opening", len(NEW) + len(OLD))
        gate.touch()
        written(daemon, len(NEW) + len(OLD))
        found = daemon.tier()
        assert (found["written_objects"], set(found["dropped"].values())) == (len(NEW), {0})
    daemon.terminate()
    daemon.start()
    daemon.wait_for_tiers()
    with Worker(daemon.endpoint) as worker:
        assert worker.fill(NEW) == len(NEW)
        assert worker.loaded(NEW) == content


def test_a_daemon_that_ends_before_its_tier_has_opened_leaves_at_once(daemon: Daemon, gate: Path) -> None:
    with Worker(daemon.endpoint) as worker:
        worker.store(NEW, worker.blocks_for(len(NEW)))
        assert daemon.tier()["queue_objects"] == len(NEW)
        assert daemon.process is not None
        daemon.process.terminate()
        wait_until(lambda: "objects were not written to L2" in daemon.log, 30, "it does not wait for the tier")
        gate.touch()
