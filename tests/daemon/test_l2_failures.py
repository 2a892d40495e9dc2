"""Storage behind L1 while things end: clears, kills, a stop with a long queue, an engine's death, records at wrong places."""

from __future__ import annotations

import contextlib
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.engine_process import EngineProcess
from support.slow_proxy import SlowProxy
from support.valkey import ValkeyStore
from support.worker import Worker, make_keys

from kvserver.protocol import AwaitFill, Clear, Cleared, LookupReply

HEADER_BYTES = 4096  # of a record (csrc/l2/record.h)


def tiers(daemon: Daemon) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.status()["l2"]
    return found


def written(daemon: Daemon, objects: int) -> None:
    wait_until(lambda: all(t["written_objects"] >= objects and not t["queue_objects"] for t in tiers(daemon)), 30)


def begin_fill(worker: Worker, keys: list[bytes], request_id: str = "r") -> int:
    return worker.send(AwaitFill(worker.lookup_message(keys, request_id), 5000))


def fill(worker: Worker, keys: list[bytes]) -> int:
    reply = worker.reply_to(begin_fill(worker, keys), 20)
    assert isinstance(reply, LookupReply), reply
    return reply.hit_chunks


def store(worker: Worker, keys: list[bytes], **changes: Any) -> list[bytes]:
    """15 chunks at most; returns the bytes of their blocks."""
    blocks = worker.blocks_for(len(keys))
    worker.memory.fill()
    content = worker.memory.blocks(blocks)
    worker.store(keys, blocks, **changes)
    return content


@contextlib.contextmanager
def daemon_on(*urls: str) -> Iterator[Daemon]:
    daemon = Daemon(l2=list(urls), l1_size="16MiB")
    try:
        yield daemon.start().wait_for_tiers()
    finally:
        daemon.close()


def restart(daemon: Daemon) -> None:
    daemon.terminate()
    daemon.start().wait_for_tiers()


@pytest.fixture(scope="module")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyStore]:
    server = ValkeyStore(tmp_path_factory.mktemp("valkey"))
    yield server
    server.close()


# ---- clears -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "moment"), [("file", 0), ("file", 1), ("valkey", 0)])
def test_what_was_cleared_while_it_was_written_and_read_does_not_come_back_after_a_kill(
    kind: str, moment: int, tmp_path: Path, store_server: ValkeyStore
) -> None:
    """A seeded random part of the queue is written by then. Nor does another machine find it in a tier that they share."""
    delay = random.Random(f"{kind} {moment}").uniform(0.0, 0.5)
    limit = "write_limit=400KB"
    file_url, shared_url = f"file://{tmp_path}/l2?size=64MiB&{limit}", store_server.url_of(f"clear-{moment}", limit)
    with daemon_on(file_url if kind == "file" else shared_url) as daemon:
        old, new = make_keys(12), [make_keys(12) for _ in range(4)]
        with Worker(daemon.endpoint) as worker:
            store(worker, old)
            written(daemon, 12)
        restart(daemon)  # so that L1 lacks them
        with Worker(daemon.endpoint) as worker:
            before = tiers(daemon)[0]["written_objects"]
            for keys in new:
                store(worker, keys)
            wait_until(lambda: tiers(daemon)[0]["written_objects"] > before)
            time.sleep(delay)
            begin_fill(worker, old)
            assert tiers(daemon)[0]["queue_objects"] > 0, "the test needs a queue"
            worker.ask(Clear(), Cleared)
            daemon.kill()
        daemon.start().wait_for_tiers()
        with Worker(daemon.endpoint) as worker:
            assert [fill(worker, keys) for keys in (old, *new)] == [0] * 5
            kept = make_keys(3)
            content = store(worker, kept)
            wait_until(lambda: tiers(daemon)[0]["written_objects"] >= 3)
        if kind == "valkey":
            with daemon_on(shared_url) as other, Worker(other.endpoint) as worker:
                assert [fill(worker, keys) for keys in (old, *new)] == [0] * 5
                assert fill(worker, kept) == 3
                assert worker.loaded(kept) == content


# ---- ends ---------------------------------------------------------------------------------------


def test_a_stop_with_a_long_queue_ends_in_time_and_what_was_written_is_right(tmp_path: Path) -> None:
    with daemon_on(f"file://{tmp_path}/l2?size=64MiB&write_limit=100KB") as daemon:
        prompts = [make_keys(12) for _ in range(8)]
        with Worker(daemon.endpoint) as worker:
            contents = [store(worker, keys) for keys in prompts]
            wait_until(lambda: tiers(daemon)[0]["written_objects"])
            assert tiers(daemon)[0]["queue_objects"] > 0, "the test needs a queue"
        began = time.monotonic()
        assert daemon.terminate() == 0
        assert time.monotonic() - began < 20, "it waits 5 s for its tiers"
        assert "objects were not written to L2 within 5 s" in daemon.log
        daemon.start().wait_for_tiers()
        with Worker(daemon.endpoint) as worker:
            found = [fill(worker, keys) for keys in prompts]
            assert 0 < sum(found) < 8 * 12
            for keys, content, hit in zip(prompts, contents, found, strict=True):
                if hit:
                    assert worker.loaded(keys[:hit]) == content[: len(content) // 12 * hit]
        assert tiers(daemon)[0]["corrupt"] == 0


def test_the_death_of_an_engine_ends_its_fill(store_server: ValkeyStore) -> None:
    """While its objects are on their way: they bring nothing into L1, and another engine reads them again."""
    proxy = SlowProxy(store_server.port)
    try:
        url = store_server.url_of("death").replace(str(store_server.port), str(proxy.port))
        with daemon_on(url) as daemon:
            with EngineProcess(daemon.endpoint) as engine:
                digest = engine.ask("digest", 1, 6)
                assert engine.ask("store", "p", 1, 6) == 6
                written(daemon, 6)
            restart(daemon)
            with EngineProcess(daemon.endpoint) as engine:
                assert engine.ask("fill_hits", "absent", 1, 2000) == 0, "connections of the tier are made"
                proxy.delay_seconds = 0.5
                engine.ask("begin_fill", "p", 6)
                wait_until(lambda: [i["requests"]["fills"] for i in daemon.status()["instances"]] == [1])
                assert daemon.accounting()["used_pages"] > 0
                engine.kill()
                wait_until(lambda: not daemon.status()["instances"])
                proxy.delay_seconds = 0.0
            daemon.wait_for_accounting(tickets=0, pins=0, leases=0)
            daemon.audit()
            with EngineProcess(daemon.endpoint) as engine:
                wait_until(lambda: engine.ask("fill_hits", "p", 6, 5000) == 6)
                engine.ask("poison", 7, 1, 6)
                assert engine.ask("load", "p", 1, 6) == 6
                assert engine.ask("digest", 1, 6) == digest
    finally:
        proxy.close()


# ---- records at wrong places --------------------------------------------------------------------


def records(data: bytes) -> dict[tuple[bytes, bytes], tuple[int, int]]:
    """(namespace, key) -> (first byte, bytes) of all records in a file tier's data."""
    found = {}
    for at in range(0, len(data), HEADER_BYTES):
        if data[at : at + 8] == b"KVSL2REC":
            (slots,), (size,) = struct.unpack_from("<I", data, at + 20), struct.unpack_from("<I", data, at + 80)
            sizes = struct.unpack_from(f"<{slots}Q", data, at + 512)
            length = HEADER_BYTES + sum(-(-each // HEADER_BYTES) * HEADER_BYTES for each in sizes)
            found[data[at + 88 : at + 88 + size], data[at + 32 : at + 64]] = at, length
    return found


@pytest.mark.parametrize("of", ["another namespace", "an earlier generation"])
def test_a_record_of_another_name_is_a_counted_miss(of: str, tmp_path: Path) -> None:
    """It is right in all else: the key, the lengths, its digest."""
    keys, path = make_keys(3), tmp_path / "l2" / "data"
    with daemon_on(f"file://{tmp_path}/l2?size=8MiB") as daemon:
        with Worker(daemon.endpoint) as one, Worker(daemon.endpoint, layout="other") as two:
            store(one, keys)
            if of == "another namespace":
                store(two, keys)
                written(daemon, 6)
            else:
                written(daemon, 3)
        daemon.terminate()
        before = path.read_bytes()
        daemon.start().wait_for_tiers()
        if of == "an earlier generation":
            with Worker(daemon.endpoint) as one:
                one.ask(Clear(), Cleared)
                store(one, keys)
                written(daemon, 3)
        daemon.terminate()
        after = bytearray(path.read_bytes())
        sources = records(before)
        assert len(sources) == (6 if of == "another namespace" else 3)
        for (namespace, key), (at, length) in records(bytes(after)).items():
            (source,) = (
                place
                for (of_namespace, of_key), place in sources.items()
                if of_key == key and (of_namespace != namespace) == (of == "another namespace")
            )
            assert source[1] == length
            moved = before[source[0] : source[0] + length]
            assert moved != after[at : at + length], "the test would change nothing"
            after[at : at + length] = moved
        path.write_bytes(bytes(after))
        daemon.start().wait_for_tiers()
        with Worker(daemon.endpoint) as one:
            assert fill(one, keys) == 0
            wait_until(lambda: tiers(daemon)[0]["corrupt"] == 3)
            content = store(one, keys)
            restart(daemon)
        with Worker(daemon.endpoint) as one:
            assert fill(one, keys) == 3
            assert one.loaded(keys) == content
