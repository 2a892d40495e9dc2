"""Two daemons with one Valkey, standing for two machines: what one wrote the other finds, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.valkey import ValkeyStore
from support.worker import Worker, make_keys

from kvserver.protocol import AwaitFill, Clear, Cleared, LookupReply


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyStore]:
    server = ValkeyStore(tmp_path_factory.mktemp("valkey"))
    yield server
    server.close()


@pytest.fixture
def daemons(store: ValkeyStore, make_daemon: Callable[..., Daemon], request: pytest.FixtureRequest) -> list[Daemon]:
    url = store.url_of(request.node.name.replace("[", "-").replace("]", ""))
    found = [make_daemon(l2=url, l1_size="16MiB") for _ in range(2)]
    for daemon in found:
        tier(daemon, "ready")
    return found


def tier(daemon: Daemon, state: str = "") -> dict[str, Any]:
    def read() -> dict[str, Any] | None:
        (found,) = daemon.status()["l2"]
        return found if state in ("", found["state"]) else None

    return wait_until(read, what=f"the tier is {state}")


def fill(worker: Worker, keys: list[bytes], wait_ms: int = 5000) -> int:
    return worker.ask(AwaitFill(worker.lookup_message(keys), wait_ms), LookupReply).hit_chunks


def store_in(daemon: Daemon, keys: list[bytes], **options: Any) -> list[bytes]:
    with Worker(daemon.endpoint, **options) as worker:
        blocks = worker.blocks_for(len(keys))
        content = worker.memory.blocks(blocks)
        worker.store(keys, blocks)
        wait_until(lambda: (found := tier(daemon))["written_objects"] >= len(keys) and not found["queue_objects"])
        return content


def test_a_second_daemon_hits_at_its_first_lookup(daemons: list[Daemon]) -> None:
    keys = make_keys(10)
    content = store_in(daemons[0], keys)
    with Worker(daemons[1].endpoint) as worker:
        reply = worker.ask(worker.lookup_message(keys), LookupReply)
        assert (reply.hit_chunks, reply.fill_chunks) == (0, 10)
        assert fill(worker, keys) == 10
        blocks = worker.blocks_for(10)
        worker.memory.fill()
        worker.load(keys, blocks)
        assert worker.memory.blocks(blocks) == content
    with Worker(daemons[1].endpoint, layout="other") as other:
        assert fill(other, keys) == 0, "an engine that may not share"


def test_a_clear_by_one_is_one_by_the_other(daemons: list[Daemon]) -> None:
    keys = make_keys(4)
    store_in(daemons[0], keys)
    with Worker(daemons[0].endpoint) as worker:
        worker.ask(Clear(), Cleared)
    with Worker(daemons[1].endpoint) as worker:
        assert fill(worker, keys) == 0


def test_a_stopped_server_costs_a_bounded_wait_and_hits_come_back(store: ValkeyStore, daemons: list[Daemon]) -> None:
    keys = make_keys(4)
    store_in(daemons[0], keys)
    with Worker(daemons[1].endpoint) as worker:
        store.stop()
        try:
            began = time.monotonic()
            assert fill(worker, keys, wait_ms=500) == 0
            assert time.monotonic() - began < 5
            others = make_keys(3)
            worker.store(others, worker.blocks_for(3))
            assert worker.lookup(others) == 3, "L1 works meanwhile"
        finally:
            store.go_on()
        wait_until(lambda: fill(worker, keys, wait_ms=1000) == 4, 60)
