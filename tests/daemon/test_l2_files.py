"""A daemon with a folder as L2: what it wrote comes back after its end, byte for byte, and nothing else does."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys, wire_form

from kvserver.cli import status as cli_status
from kvserver.protocol import Clear, Cleared, Durability, LookupReply, Store, Stored
from kvserver.protocol.status import DaemonStatus

KEYS = make_keys(12, "files")


@contextlib.contextmanager
def daemon_with(folder: Path, parameters: str = "", size: str = "64MiB", **flags: Any) -> Iterator[Daemon]:
    daemon = Daemon(l2=f"file://{folder}?size={size}{parameters}", l1_size="8MiB", **flags)
    try:
        daemon.start()
        daemon.wait_for_tiers()
        yield daemon
    finally:
        daemon.close()


def written(daemon: Daemon, objects: int) -> None:
    wait_until(lambda: (found := daemon.tier())["objects"] >= objects and not found["queue_objects"])


def explained(daemon: Daemon, request_id: str) -> tuple[str, dict[str, int]] | None:
    """Its outcome, and its tokens by source."""
    code, body = daemon.http(f"/explain?request_id={request_id}")
    if code != 200:
        return None
    (request,) = json.loads(body)["requests"]
    return request["outcome"], {source: request["tokens"][source] for source in ("l0", "l1", "l2", "computed")}


def store(worker: Worker) -> list[bytes]:
    blocks = worker.blocks_for(len(KEYS))
    content = worker.memory.blocks(blocks)
    worker.store(KEYS, blocks)
    return content


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_written_comes_back_after_the_daemons_end(tmp_path: Path, end: signal.Signals) -> None:
    with daemon_with(tmp_path / "l2") as daemon:
        with Worker(daemon.endpoint) as worker:
            content = store(worker)
            written(daemon, len(KEYS))
        (daemon.terminate if end == signal.SIGTERM else daemon.kill)()
        daemon.start()
        daemon.wait_for_tiers()
        with Worker(daemon.endpoint) as worker:
            assert worker.lookup(KEYS) == 0
            assert worker.fill(KEYS) == len(KEYS)
            assert worker.loaded(KEYS) == content
        with Worker(daemon.endpoint, layout="other") as other:
            assert other.fill(KEYS) == 0, "another namespace"


def test_what_was_read_for_a_request_counts_as_of_l2(tmp_path: Path) -> None:
    """In totals, in the explanation of the request and in the table of `kvserver status`."""
    with daemon_with(tmp_path / "l2") as daemon:
        with Worker(daemon.endpoint) as worker:
            store(worker)
            written(daemon, len(KEYS))
        daemon.terminate()
        daemon.start()
        daemon.wait_for_tiers()
        with Worker(daemon.endpoint) as worker:
            assert worker.lookup(KEYS) == 0
            assert worker.fill(KEYS) == len(KEYS)
            worker.loaded(KEYS)
            tokens = len(KEYS) * daemon.status()["instances"][0]["chunk_tokens"]
            worker.end_request("r", prompt_tokens=tokens + 9, loaded_tokens=tokens, loads=1)
            expected = {"l0": 0, "l1": 0, "l2": tokens, "computed": 9}
            wait_until(lambda: daemon.status()["totals"]["prompt_tokens"] == expected)
            wait_until(lambda: explained(daemon, "r") == ("hit", expected), what="the request is explained")
            shown = cli_status.table(msgspec.convert(daemon.status(), DaemonStatus))
            assert f"file: {len(KEYS)} objects" in shown
            assert f"{len(KEYS)} hits, 0 misses" in shown


def test_a_damaged_object_is_a_counted_miss(tmp_path: Path) -> None:
    with daemon_with(tmp_path / "l2") as daemon:
        with Worker(daemon.endpoint) as worker:
            content = store(worker)
            written(daemon, len(KEYS))
        daemon.terminate()
        (data,) = (path for path in (tmp_path / "l2").iterdir() if path.stat().st_size >= 32 << 20)
        raw = bytearray(data.read_bytes())
        at = raw.index(content[len(content) // 2][:64])
        raw[at + 5] ^= 1
        with data.open("r+b") as file:
            file.write(raw)
        daemon.start()
        daemon.wait_for_tiers()
        with Worker(daemon.endpoint) as worker:
            found = worker.fill(KEYS)
            assert found == len(KEYS) // 2
            assert worker.loaded(KEYS[:found]) == content[: len(content) // 2]
        assert daemon.tier()["corrupt"] == 1


def test_cleared_chunks_are_not_found_after_a_restart(tmp_path: Path) -> None:
    with daemon_with(tmp_path / "l2") as daemon:
        with Worker(daemon.endpoint) as worker:
            store(worker)
            written(daemon, len(KEYS))
            assert worker.ask(Clear(), Cleared).chunks == len(KEYS)
        daemon.kill()
        daemon.start()
        daemon.wait_for_tiers()
        with Worker(daemon.endpoint) as worker:
            assert worker.fill(KEYS) == 0


def test_prompts_beyond_the_size_of_l1_are_found(tmp_path: Path) -> None:
    """L1 of a few chunks is a window on L2."""
    with daemon_with(tmp_path / "l2") as daemon, Worker(daemon.endpoint) as worker:
        prompts = [make_keys(12, number) for number in range(8)]
        contents = []
        for number, keys in enumerate(prompts):
            blocks = worker.blocks_for(12)
            worker.memory.fill()
            contents.append(worker.memory.blocks(blocks))
            worker.store(keys, blocks)
            written(daemon, 12 * (number + 1))
        assert daemon.status()["l1"]["evictions"] >= 0
        for keys, content in zip(prompts, contents, strict=True):
            assert worker.fill(keys) == 12
            assert worker.loaded(keys) == content


def test_a_second_daemon_on_the_folder_is_refused(tmp_path: Path) -> None:
    with daemon_with(tmp_path / "l2"):
        second = Daemon(l2=f"file://{tmp_path}/l2?size=64MiB", l1_size="8MiB")
        try:
            with pytest.raises(AssertionError, match="exited with 2") as error:
                second.start()
            assert "another daemon uses it" in str(error.value)
        finally:
            second.close()


def test_what_the_engine_computes_sooner_is_not_read_and_the_daemon_shows_why(tmp_path: Path) -> None:
    measured = make_keys(6)
    with daemon_with(tmp_path / "l2") as daemon:
        with Worker(daemon.endpoint) as worker:
            store(worker)
            worker.store(measured, worker.blocks_for(6))
            written(daemon, len(KEYS) + 6)
        daemon.terminate()
        daemon.start()
        daemon.wait_for_tiers()
        with Worker(daemon.endpoint) as worker:
            assert worker.fill(measured) == 6
            worker.end_request("r", prefill_tokens_per_second=1e11)
            wait_until(lambda: daemon.status()["instances"][0]["prefill_tokens_per_second"])
            assert worker.ask(worker.lookup_message(KEYS, "late"), LookupReply) == LookupReply(0)
            status = daemon.status()
            tokens = len(KEYS) * status["instances"][0]["chunk_tokens"]
            requests = status["instances"][0]["requests"]
            assert (requests["fills"], requests["fills_not_begun"]) == (1, 1)
            assert requests["missed_tokens"]["slow_l2"] == tokens
            assert daemon.tier()["read_bytes_per_second"] > 0
            metrics = daemon.http("/metrics")[1]
            named = f'instance_id="{worker.instance_id}",model_name="{worker.model_name}"'
            assert f'kvserver_lookup_missed_tokens_total{{{named},reason="slow_l2"}} {tokens}' in metrics
            assert f"kvserver_fills_not_begun_total{{{named}}} 1" in metrics
            worker.end_request("late", prompt_tokens=tokens)
            wait_until(lambda: explained(daemon, "late"))
            _, body = daemon.http("/explain?request_id=late")
            assert "reading it was expected to take longer than computing it" in body


def test_kv_that_only_its_process_can_find_is_not_written_to_disk(tmp_path: Path) -> None:
    """Each weights epoch of a trainer is of its own."""
    with daemon_with(tmp_path / "l2") as daemon, Worker(daemon.endpoint) as worker:
        for epoch in range(50):
            keys = make_keys(2)
            worker.store(keys, worker.blocks_for(2), variant=f"epoch-{epoch}", durability=Durability.PROCESS)
            assert worker.lookup(keys, variant=f"epoch-{epoch}", durability=Durability.PROCESS) == 2
        store(worker)
        written(daemon, len(KEYS))
        found = daemon.tier()
        assert (found["written_objects"], found["objects"]) == (len(KEYS), len(KEYS))


def test_an_engine_of_before_durability_was_stated_writes_nothing(tmp_path: Path) -> None:
    """Its messages lack the field and those after it."""
    fields = Store.__struct_fields__
    lacking = len(fields) - fields.index("durability")
    with daemon_with(tmp_path / "l2") as daemon, Worker(daemon.endpoint) as worker:
        keys = make_keys(2)
        raw = msgspec.msgpack.encode(wire_form(worker.store_message(keys, worker.blocks_for(2)))[:-lacking])
        old = msgspec.msgpack.decode(raw, type=Store)
        assert old.durability is Durability.PROCESS
        worker.ask(old, Stored)
        store(worker)
        written(daemon, len(KEYS))
        assert daemon.tier()["written_objects"] == len(KEYS)


def test_a_prompt_that_is_always_found_in_l1_stays_in_a_full_tier(tmp_path: Path) -> None:
    """Nothing of it is ever loaded: the engine has it, too."""
    with daemon_with(tmp_path / "l2", size="2500KiB") as daemon:
        with Worker(daemon.endpoint) as worker:
            hot, evicted = make_keys(6), 0
            worker.store(hot, worker.blocks_for(6))
            written(daemon, 6)
            while evicted < 100:
                keys = make_keys(12)
                worker.store(keys, worker.blocks_for(12))
                assert worker.lookup(hot) == 6
                wait_until(lambda: not daemon.tier()["queue_objects"])
                time.sleep(0.2)  # its age is kept by the second, and a real tier fills more slowly
                evicted = daemon.tier()["evictions"]
        daemon.terminate()
        daemon.start()
        daemon.wait_for_tiers()
        with Worker(daemon.endpoint) as worker:
            assert worker.fill(hot) == 6
