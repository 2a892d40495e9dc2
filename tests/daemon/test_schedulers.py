"""How schedulers describe their engines: notices, answered only where they are refused."""

from __future__ import annotations

import pytest

from kvserver.protocol import DescribeScheduler, EngineLoad


def names(worker, **changes):
    return {
        "instance_id": worker.instance_id,
        "incarnation": worker.incarnation,
        "model_name": worker.model_name,
        **changes,
    }


@pytest.mark.parametrize(
    "kind",
    [
        lambda of: DescribeScheduler(**of, variant="v"),
        lambda of: EngineLoad(**of, interval_seconds=1, running=0, waiting=0),
    ],
)
def test_no_peer_speaks_for_an_instance_that_is_not_there_or_is_another(daemon, worker, kind):
    assert worker.error_of(kind(names(worker, instance_id="nobody"))).code == "unknown_instance"
    assert worker.error_of(kind(names(worker, incarnation="another incarnation"))).code == "duplicate_instance"
    assert worker.error_of(kind(names(worker, model_name="another/model"))).code == "unknown_instance"


def test_a_scheduler_whose_ranks_are_not_all_registered_describes_itself_later(daemon, make_worker):
    half = make_worker(daemon, world_size=2)
    assert half.error_of(DescribeScheduler(**names(half), variant="v")).code == "not_ready"


def test_notices_that_are_taken_have_no_answer(daemon, worker):
    worker.send(DescribeScheduler(**names(worker), variant="v"))
    worker.send(EngineLoad(**names(worker), interval_seconds=1, running=3, waiting=4))
    worker.round_trip()
    assert not list(worker.client.channel.receive())
