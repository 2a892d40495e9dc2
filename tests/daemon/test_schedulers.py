"""How schedulers describe their engines: notices, answered only where they are refused."""

from __future__ import annotations


def test_a_scheduler_whose_ranks_are_not_all_registered_describes_itself_later(daemon, make_worker):
    half = make_worker(daemon, world_size=2)
    assert half.error_of(half.description()).code == "not_ready"


def test_notices_that_are_taken_have_no_answer(daemon, worker):
    worker.send(worker.description())
    worker.send(worker.stats_message(running=3, waiting=4))
    worker.round_trip()
    assert not list(worker.client.channel.receive())
