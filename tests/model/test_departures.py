"""What the server's clock ends: the counters of an instance that disconnected long ago."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from kvserver.protocol import DEPARTED_SECONDS

from .engines import LLAMA
from .world import World


def test_a_disconnected_instance_is_shown_for_five_minutes_of_the_servers_clock(tmp_path: Path) -> None:
    with closing(World(tmp_path, {"llama-0": LLAMA}, pages=60)) as world:
        engine = world.engines[0]
        world.connect(engine.ranks[0])
        world.come_to_rest()
        world.lookup(engine, "r", engine.model.keys(0), "")
        world.hang_up(engine.ranks[0])
        world.watch_lifelines()
        world.pass_time(DEPARTED_SECONDS - 1)
        (departed,) = world.parts.instances.departed.values()
        assert (departed.instance_id, departed.counts.lookups) == (engine.instance_id, 1)
        world.pass_time(2)
        assert not world.parts.instances.departed
        assert world.parts.instances.totals().lookup_tokens > 0, "sums forget nothing"
        world.end()
