"""When a part of a store counts, by the server's clock and by the worker's state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from .engines import LLAMA
from .world import World


def nothing(world: World) -> None:
    """Do nothing: what was copied counts."""


def pass_the_deadline(world: World) -> None:
    world.now += 61


def hang_up(world: World) -> None:
    world.hang_up(world.engines[0].ranks[0])
    world.watch_lifelines()


@pytest.mark.parametrize(("then", "published"), [(nothing, 1), (pass_the_deadline, 0), (hang_up, 0)])
def test_a_reported_part_counts_unless_its_deadline_or_its_worker_has_gone(
    then: Callable[[World], None], published: int, tmp_path: Path
) -> None:
    with closing(World(tmp_path, {"llama-0": LLAMA}, pages=60)) as world:
        engine = world.engines[0]
        world.connect(engine.ranks[0])
        world.come_to_rest()
        rank = engine.ranks[0]
        keys = engine.model.keys(0)[:2]
        world.store(rank, keys, "")
        (ticket,) = world.device.open
        world.device.run(ticket, engine.model.object_blocks(0))
        world.device.report(ticket)
        then(world)
        world.complete_copies()
        assert world.counts["published"] == published
        chunks = [world.record((engine.namespace(""), key)) for key in keys]
        assert [bool(chunk and chunk.ready) for chunk in chunks] == [bool(published), False]
        world.end()
