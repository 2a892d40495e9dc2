"""Engines that connect, disconnect, are refused or share with no other, as a daemon's /metrics shows them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

from kvserver.protocol.client import RequestFailed


def test_instances_that_connect_die_and_unregister_are_counted(daemon: Daemon) -> None:
    def disconnected(reason: str) -> float:
        return daemon.metric("kvserver_instances_disconnected_total", reason=reason)

    connected = daemon.metric("kvserver_instances_connected_total")
    died, unregistered = disconnected("died"), disconnected("unregistered")
    with Worker(daemon.endpoint) as dies, Worker(daemon.endpoint) as leaves:
        assert daemon.metric("kvserver_instances") == 2
        assert daemon.metric("kvserver_instances_connected_total") == connected + 2
        dies.hang_up()
        leaves.unregister()
        wait_until(lambda: daemon.metric("kvserver_instances") == 0)
    assert disconnected("died") == died + 1
    assert disconnected("unregistered") == unregistered + 1


def test_an_instance_of_two_ranks_connects_once_and_has_died_if_one_of_them_did(daemon: Daemon) -> None:
    connected = daemon.metric("kvserver_instances_connected_total")
    died = daemon.metric("kvserver_instances_disconnected_total", reason="died")
    with Worker(daemon.endpoint, world_size=2) as first:
        same = {"instance_id": first.instance_id, "incarnation": first.incarnation}
        with Worker(daemon.endpoint, world_size=2, rank=1, **same) as second:
            assert daemon.metric("kvserver_instances_connected_total") == connected + 1
            first.hang_up()
            wait_until(lambda: len(daemon.status()["instances"][0]["workers"]) == 1)
            second.unregister()
    wait_until(lambda: daemon.metric("kvserver_instances") == 0)
    assert daemon.metric("kvserver_instances_disconnected_total", reason="died") == died + 1


def test_an_instance_whose_memory_cannot_be_used_is_refused_and_disconnected(daemon: Daemon) -> None:
    before = daemon.metric("kvserver_instances_disconnected_total", reason="refused")
    with Worker(daemon.endpoint, connect_now=False) as worker:
        worker.attach()
        worker.memory.truncate(0, 4096)
        with pytest.raises(RequestFailed, match="bad_memory"):
            worker.register()
    assert daemon.metric("kvserver_instances") == 0
    assert daemon.metric("kvserver_instances_disconnected_total", reason="refused") == before + 1


def test_a_private_instance_is_shown_with_its_reason_while_it_is_registered(daemon: Daemon) -> None:
    with Worker(daemon.endpoint, connect_now=False) as worker, Worker(daemon.endpoint) as shares:
        worker.attach()
        worker.register(private="its weights change in place")
        labels = {"instance_id": worker.instance_id, "reason": "its weights change in place"}
        assert daemon.metric("kvserver_instance_private", **labels) == 1
        assert daemon.metric("kvserver_instance_private", instance_id=shares.instance_id) is None
        worker.unregister()
        assert daemon.metric("kvserver_instance_private") is None


def test_an_instance_is_described_and_reports_its_prefill_speed(daemon: Daemon) -> None:
    with Worker(daemon.endpoint) as worker:
        instance = {"instance_id": worker.instance_id, "model_name": worker.model_name}
        (info,) = daemon.samples("kvserver_instance_info")
        assert (info.value, info.labels) == (
            1,
            {
                **instance,
                "world_size": "1",
                "l0_source": "none",
                "device": "cpu",
                "block_tokens": "16",
                "chunk_tokens": "64",
                "engine": "",
                "engine_version": "",
                "kv_role": "",
            },
        )
        assert daemon.metric("kvserver_engine_prefill_tokens_per_second") is None
        worker.end_request(prefill_tokens_per_second=1234.5)
        wait_until(lambda: daemon.metric("kvserver_engine_prefill_tokens_per_second", **instance) == 1234.5)


def test_leases_tickets_and_pins_are_exported(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(pauses=True)
    assert [daemon.metric(f"kvserver_{name}") for name in ("tickets", "pins", "leases")] == [0, 0, 0]
    with Worker(daemon.endpoint) as worker:
        keys, blocks = make_keys(2), worker.blocks_for(2)
        with daemon.paused_copies():
            store = worker.begin_store(keys, blocks)
            wait_until(lambda: daemon.metric("kvserver_tickets") == 1)
            assert daemon.metric("kvserver_pins") == 2
        store.reply()
        assert worker.lookup(keys) == 2
        assert daemon.metric("kvserver_leases") == 1
        assert daemon.metric("kvserver_pins") == 0
    assert daemon.metric("kvserver_accounting_failures_total") == 0
