"""The gauges of a restarted engine were marked as too low until its next scheduler pass, though its new block pool is empty.

An engine that computed before it registered is the other case: only a full state reports what its pool holds.
"""

from __future__ import annotations

import re

import pytest
from support.block_lifetimes import allocated, exact
from support.daemon import Daemon, wait_until
from support.worker import Worker


def out_of_sync(daemon: Daemon, worker: Worker) -> int | None:
    _, text = daemon.http("/metrics")
    found = re.search(
        rf'^kvserver_l0_unsure{{instance_id="{worker.instance_id}",model_name="test/model"}} (\S+)$', text, re.MULTILINE
    )
    return int(float(found[1])) if found is not None else None


def report(worker: Worker, *blocks: int) -> None:
    worker.report(exact((1, [record for block in blocks for record in allocated(block)]), full=True))


@pytest.fixture
def first(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    report(worker, 1, 2)
    wait_until(lambda: daemon.status()["instances"][0]["l0"]["active_blocks"] == 2)
    return daemon, worker


def disconnect(daemon: Daemon, worker: Worker) -> None:
    worker.hang_up()
    wait_until(lambda: daemon.status()["instances"] == [])


def test_a_restarted_engine_without_work_is_in_sync(first, make_worker):
    daemon, former = first
    disconnect(daemon, former)
    worker = make_worker(daemon, instance_id=former.instance_id)
    wait_until(lambda: daemon.status()["instances"][0]["l0"].get("lost") == 2)
    assert daemon.status()["instances"][0]["l0"]["active_blocks"] == 0
    assert out_of_sync(daemon, worker) == 0


def test_an_engine_that_registers_again_is_out_of_sync_until_its_full_state_has_come(first):
    daemon, worker = first
    disconnect(daemon, worker)
    worker.connect()
    wait_until(lambda: out_of_sync(daemon, worker) == 1)
    report(worker, 1)
    wait_until(lambda: out_of_sync(daemon, worker) == 0)


def test_an_engine_that_computed_before_it_met_this_daemon_is_out_of_sync(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon, connect_now=False)
    worker.attach()
    worker.register(has_computed=True)
    wait_until(lambda: out_of_sync(daemon, worker) == 1)
    report(worker, 1)
    wait_until(lambda: out_of_sync(daemon, worker) == 0)
