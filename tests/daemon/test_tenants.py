"""`--share tenant:NAME` in a real daemon: whose a chunk is, what a flood leaves, and that a tenant's name isolates nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import run
from support.daemon import Daemon, wait_until
from support.kept_l1 import restart
from support.pins import KEYS, TOKENS, describe, pins, post
from support.worker import Worker, make_keys

from kvserver.protocol import AwaitFill, LookupReply

MakeDaemon, MakeWorker = Callable[..., Daemon], Callable[..., Worker]
A, B = "tenant:a=0.5", "tenant:b=0.2"
PROMPT = make_keys(6, "a prompt of tenant a")


def store(worker: Worker, keys: list[bytes], tenant: str = "") -> None:
    worker.store(keys, worker.blocks_for(len(keys)), tenant=tenant)


def flood(daemon: Daemon, worker: Worker, tenant: str, evictions: int = 60) -> None:
    """Store other prompts until L1 has evicted so many more chunks."""
    before, number = daemon.status()["l1"]["evictions"], 0
    while daemon.status()["l1"]["evictions"] < before + evictions:
        assert number < 1000, "nothing is evicted"
        store(worker, make_keys(4, ("flood", tenant, before, number)), tenant)
        number += 1


def tenants(daemon: Daemon) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = daemon.status()["l1"]["tenants"]
    return found


def owned(daemon: Daemon) -> dict[str, int]:
    """Chunks by owner, of those that have any."""
    l1 = daemon.status()["l1"]
    chunks = {name: use["chunks"] for name, use in l1["models"].items() if use["chunks"]}
    return chunks | {f"tenant:{name}": use["chunks"] for name, use in l1["tenants"].items() if use["chunks"]}


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_a_flood_of_a_tenant_leaves_another_its_share_of_the_same_model(
    make_daemon: MakeDaemon, make_worker: MakeWorker, policy: str
) -> None:
    daemon = make_daemon(l1_size="1MiB", share=[A, B], eviction_policy=policy)
    worker = make_worker(daemon)
    store(worker, PROMPT, "a")
    assert owned(daemon) == {"tenant:a": len(PROMPT)}
    for tenant in ("b", "", "of no share"):
        flood(daemon, worker, tenant)
        assert worker.lookup(PROMPT) == len(PROMPT), "any request finds it, whatever its tenant"
        worker.end_request()
    l1 = daemon.status()["l1"]
    uses = [*l1["models"].values(), *l1["tenants"].values()]
    assert sum(use["used_bytes"] for use in uses) == l1["used_bytes"]
    assert sum(use["evictions"] for use in uses) == l1["evictions"]
    assert l1["tenants"]["a"]["evictions"] == 0
    assert l1["tenants"]["b"]["used_bytes"] <= l1["tenants"]["b"]["share_bytes"] + worker.chunk_bytes + l1["page_bytes"]
    assert daemon.metric("kvserver_l1_tenant_share_bytes", tenant="a") == l1["size_bytes"] // 2
    assert daemon.metric("kvserver_l1_tenant_chunks", tenant="a") == len(PROMPT)
    shown = run("status", "--http-port", str(daemon.http_port)).stdout
    assert "share  tenant:a: " in shown
    worker.unregister()
    daemon.wait_for_clean_accounting()
    daemon.audit()


def test_tenants_without_a_share_are_counted_together_and_never_named(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon(share=[A])
    worker = make_worker(daemon)
    names = ["tenant-of-no-share", "tenant:a", "A", "a ", "a\n", "x" * 512]
    for name in names:
        store(worker, make_keys(1, name), name)
    assert owned(daemon) == {worker.model_name: len(names)}
    assert daemon.metric("kvserver_l1_other_tenant_stores_total") == len(names)
    pages = daemon.http("/metrics")[1] + json.dumps(daemon.status())
    assert "tenant-of-no-share" not in pages
    assert 'tenant="a"' in pages
    keys = make_keys(1)
    refused = worker.error_of(worker.lookup_message(keys, tenant="x" * 513))
    assert refused.code == "bad_message"
    refused = worker.error_of(worker.store_message(keys, worker.blocks_for(1), tenant="x" * 513))
    assert refused.code == "bad_message"
    assert daemon.metric("kvserver_l1_other_tenant_stores_total") == len(names)


def test_what_is_read_from_l2_belongs_to_the_tenant_that_reads_it(
    make_daemon: MakeDaemon, make_worker: MakeWorker, tmp_path: Path
) -> None:
    daemon = make_daemon(share=[A, B], l2=f"file://{tmp_path}/l2?size=64MiB")
    with make_worker(daemon) as worker:
        store(worker, PROMPT, "a")
        wait_until(lambda: daemon.tier()["objects"] == len(PROMPT), what="they are written")
    daemon.terminate()
    daemon.start()
    with make_worker(daemon) as worker:
        assert owned(daemon) == {}
        message = worker.lookup_message(PROMPT, tenant="b")
        reply = worker.ask(message, LookupReply)
        assert (reply.hit_chunks, reply.fill_chunks) == (0, len(PROMPT)), "a tier knows no tenants"
        assert worker.ask(AwaitFill(message, 10_000), LookupReply).hit_chunks == len(PROMPT)
        assert owned(daemon) == {"tenant:b": len(PROMPT)}


def test_what_a_prefetch_reads_belongs_to_the_tenant_that_it_names(
    make_daemon: MakeDaemon, make_worker: MakeWorker, tmp_path: Path
) -> None:
    daemon = make_daemon(share=[A], l2=f"file://{tmp_path}/l2?size=64MiB")
    with make_worker(daemon) as worker:
        store(worker, KEYS)
        wait_until(lambda: daemon.tier()["objects"] == len(KEYS), what="they are written")
    daemon.terminate()
    daemon.start()
    with make_worker(daemon) as worker:
        describe(worker)
        query = {"page": "/cache/prefetches", "tokens": TOKENS, "tenant": "a"}
        wait_until(lambda: post(daemon, **query)[0] == 200, what="the engine is described")
        wait_until(lambda: owned(daemon) == {"tenant:a": len(KEYS)}, what="they are read")


def test_a_restart_keeps_whose_a_chunk_is_and_a_tenant_without_a_share_then_leaves_it_to_its_model(
    make_daemon: MakeDaemon, make_worker: MakeWorker, path: Path
) -> None:
    daemon = make_daemon(l1_size="1MiB", share=[A, B], l1_file=path)
    mine, others = make_keys(3, "b"), make_keys(2, "none")
    with make_worker(daemon) as worker:
        model = worker.model_name
        for keys, tenant in ((PROMPT, "a"), (mine, "b"), (others, "")):
            store(worker, keys, tenant)
    kept = {"tenant:a": len(PROMPT), "tenant:b": 3, model: 2}
    used = {name: use["used_bytes"] for name, use in tenants(daemon).items()}
    assert owned(daemon) == kept
    restart(daemon)
    assert owned(daemon) == kept
    assert used == {name: use["used_bytes"] for name, use in tenants(daemon).items()}
    with make_worker(daemon) as worker:
        flood(daemon, worker, "b")
        assert worker.lookup(PROMPT) == len(PROMPT)
        worker.end_request()
    restart(daemon, share=[B])
    assert "tenant:a" not in owned(daemon)
    assert owned(daemon)[model] >= len(PROMPT)
    with make_worker(daemon) as worker:
        assert worker.lookup(PROMPT) == len(PROMPT)
        worker.end_request()
        flood(daemon, worker, "")
    daemon.wait_for_clean_accounting()
    daemon.audit()


def test_a_requests_pin_is_bounded_by_its_tenants_share(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon(l1_size="1MiB", share=[A, B], pin_share=0.5)
    worker = make_worker(daemon)

    def pinned(tenant: str) -> dict[str, Any]:
        keys, request_id = make_keys(12, ("pinned", tenant)), f"pin {tenant}"
        worker.lookup(keys, request_id, pin_seconds=3600.0, tenant=tenant)
        store(worker, keys, tenant)
        worker.end_request(request_id)
        return next(pin for pin in pins(daemon) if pin["owner"].endswith(f"/{request_id}"))

    l1 = daemon.status()["l1"]
    for tenant, share in (("a", 0.5), ("b", 0.2), ("", 0.3)):
        found = pinned(tenant)
        assert 0 < found["bytes"] <= 0.5 * share * l1["size_bytes"], tenant
        if tenant:
            assert found["bytes"] + worker.chunk_bytes + l1["page_bytes"] > 0.5 * l1["tenants"][tenant]["share_bytes"]
    worker.unregister()
    daemon.wait_for_accounting(tickets=0)
    daemon.audit()
