"""Slots of windows and of states that a late load may still write: through SGLang's tree, a pause of the daemon, a flush and the release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trees
from support.daemon import Daemon, wait_until
from test_sglang_trees import text
from trees import Tree

LATE = {"kvserver.load_wait_ms": 100.0}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    started = Daemon(l1_size="1GiB", pauses=True)
    started.start()
    yield started
    started.close()


@pytest.mark.parametrize("flush", [False, True], ids=["", "flushed"])
@pytest.mark.parametrize("kind", ["mha", "windows", "states"])
def test_a_late_load_keeps_the_slots_of_every_pool_until_its_copies_have_ended(
    kind: str, flush: bool, daemon: Daemon, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = trees.prepare(model)
    monkeypatch.setattr(trees, "EXTRA", trees.EXTRA | LATE)
    tree = Tree(kind, daemon.endpoint, arguments)
    allocators = [allocator.of for allocator in tree.linker._allocators]

    def available() -> list[int]:
        tree.next_pass()
        return [allocator.available_size() for allocator in allocators]

    timeouts = 0

    def kept_slots() -> list[int]:
        """Slots of each pool that a late load keeps; none if the daemon had not begun it in time."""
        nonlocal timeouts
        timeouts = tree.linker.cache._half.counters["timeouts"]
        assert tree.load_all(prompt)[0] == 0
        return [before - now for before, now in zip(free, available(), strict=True)]

    try:
        tree.wait_for_daemon(daemon)
        prompt = text(8, ("kept", kind, flush))
        tree.compute(prompt)
        tree.flush()
        free = available()
        with daemon.paused_copies():
            kept = wait_until(lambda: any(found := kept_slots()) and found, 30, "a late load that has begun")
            assert all(kept), "slots of each pool"
            if flush:
                tree.flush()
                assert [before - now for before, now in zip(free, available(), strict=True)] == kept
            assert tree.linker.cache._half.counters["timeouts"] == timeouts + 1, "one load"
        wait_until(lambda: available() == free, 30, "the slots")
        if flush:  # each was free once: none is free twice
            for allocator, size in zip(allocators, free, strict=True):
                assert len(set(allocator.alloc(size).tolist())) == size
        assert not tree.linker.faults.counts
    finally:
        tree.close()
