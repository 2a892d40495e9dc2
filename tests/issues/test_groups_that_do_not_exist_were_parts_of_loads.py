"""A Retrieve of an object group that its engine does not have was refused, and counted as the end of one of its load's parts all the same: the
load counted as failed, and a hostile engine could have each of 1,024 loads remember 65,535 parts."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace
from support.daemon import Daemon, wait_until
from support.memory import two_groups
from support.worker import Worker, make_keys

from kvserver.protocol import ErrorCode, ObjectGroup


def test_a_refused_group_is_no_part_of_a_load(daemon: Daemon, make_worker: Callable[..., Worker]) -> None:
    groups = (ObjectGroup("full", (0,), 16), ObjectGroup("window", (1,), 16, tokens=31))
    worker, keys = make_worker(daemon, geometry=two_groups(), groups=groups), make_keys(2)

    def requests() -> dict[str, float]:
        (row,) = [row for row in daemon.status()["instances"] if row["instance_id"] == worker.instance_id]
        return dict(row["requests"])

    worker.store(keys, range(1, 9))
    worker.store(keys[1:], range(9, 11), group=1)
    worker.end_request(prefill_tokens_per_second=1.0)
    wait_until(lambda: requests()["ended_requests"] == 1)
    load = {"request_id": "r", "tokens": 128, "messages": 2}
    worker.load(keys, range(20, 28), **load)
    refused = worker.error_of(replace(worker.load_message(keys, range(20, 28), **load), group=16))
    assert refused.code == ErrorCode.BAD_KEYS.value
    worker.load(keys[1:], range(30, 32), group=1, **load)
    assert 100 < requests()["prefill_seconds_gained"] <= 128
    assert requests()["prefill_seconds_lost"] == 0
