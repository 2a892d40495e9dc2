"""An engine that reported a prefill speed near 0 made the saved seconds infinite, in `/status` no JSON and as long as its series lasted;
an infinite speed was shown as reported. Such speeds are none.
"""

from __future__ import annotations

import json
import math

import pytest
from support.daemon import wait_until
from support.worker import make_keys


@pytest.mark.parametrize("speed", [1e-320, 1e-30, 1e300, math.inf])
def test_seconds_stay_finite_whatever_speed_an_engine_reports(make_daemon, make_worker, speed):
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys, blocks = make_keys(2), worker.blocks_for(2)
    worker.store(keys, blocks)
    worker.end_request(prefill_tokens_per_second=speed)
    wait_until(lambda: daemon.status()["instances"][0]["requests"]["ended_requests"] == 1)
    worker.load(keys, blocks)

    def refuse(constant: str) -> None:
        raise AssertionError(f"/status has {constant}")

    (instance,) = json.loads(daemon.http("/status")[1], parse_constant=refuse)["instances"]
    assert instance["prefill_tokens_per_second"] == 0
    assert instance["requests"]["saved_seconds"] == instance["requests"]["prefill_seconds_gained"] == 0
