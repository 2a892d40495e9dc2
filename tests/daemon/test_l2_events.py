"""A real daemon with a file tier: consumers of KV events, the snapshot and matches know what it holds, whatever happens to it."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.kv_chunks import Prompt
from support.kv_follower import Follower
from support.kv_subscriber import Subscriber
from support.worker import Worker

from kvserver.protocol import Clear, Cleared, KVEventsTaken, LookupReply

PER_CHUNK, CHUNKS = 4, 12
Names = set[tuple[str, bytes]]  # medium and hash


def prompt(number: int) -> Prompt:
    first = 10_000 * number
    return Prompt(range(first, first + CHUNKS * PER_CHUNK * 16), chunk_blocks=PER_CHUNK, block=16)


class Scene:
    """A daemon with a file tier, an engine, and consumers of each kind that outlive both."""

    def __init__(self, folder: Path, size: str = "64MiB", **flags: Any) -> None:
        self.daemon = Daemon(
            l2=f"file://{folder}/l2?size={size}",
            kv_events_endpoint=f"ipc://{folder}/events",
            kv_events_replay_endpoint=f"ipc://{folder}/replay",
            **{"l1_size": "8MiB", **flags},
        )
        self.subscriber = Subscriber(f"ipc://{folder}/events", f"ipc://{folder}/replay")
        self.follower = Follower(lambda ask: self.worker.ask(ask, KVEventsTaken), "engine", "1")

    def start(self) -> None:
        self.daemon.start()
        self.wait(lambda tier: tier["state"] == "ready")
        self.connect()

    def connect(self) -> None:
        self.worker = Worker(self.daemon.endpoint, instance_id="engine", incarnation="1")
        self.worker.send(self.worker.description(hash_form="bytes"))

    def end(self, how: signal.Signals) -> None:
        self.worker.close()
        (self.daemon.terminate if how == signal.SIGTERM else self.daemon.kill)()

    def close(self) -> None:
        self.worker.close()
        self.subscriber.close()
        self.daemon.close()

    def wait(self, holds: Any) -> None:
        wait_until(lambda: holds(self.daemon.tier()))

    # ---- what happens -------------------------------------------------------------------------

    def store(self, *numbers: int, described: bool = True) -> None:
        for number in numbers:
            one = prompt(number)
            contents = one.contents() if described else None
            self.worker.store(one.keys, self.worker.blocks_for(CHUNKS), contents=contents)
            self.wait(lambda tier: not tier["queue_objects"])

    def fill(self, number: int, wait_ms: int = 5000) -> int:
        return self.worker.fill(prompt(number).keys, wait_ms=wait_ms)

    def clear(self) -> None:
        self.worker.ask(Clear(), Cleared)

    # ---- what consumers know ------------------------------------------------------------------

    def looked_up(self, number: int) -> tuple[int, int]:
        """Blocks that a lookup finds in L1, and after a fill."""
        request = f"look up {number}"
        reply = self.worker.ask(self.worker.lookup_message(prompt(number).keys, request), LookupReply)
        self.worker.end_request(request)
        return PER_CHUNK * reply.hit_chunks, PER_CHUNK * max(reply.hit_chunks, reply.fill_chunks)

    def matched(self, number: int) -> tuple[int, int]:
        hashes = [value.hex() for value in prompt(number).hashes]
        found = self.daemon.match(block_hashes=hashes).get("engine")  # once it is known
        return (found["l1"], found["l1_l2"]) if found is not None else (-1, -1)

    def matches(self, *numbers: int) -> list[tuple[int, int]]:
        """As matches and lookups find them."""

        def both() -> list[tuple[int, int]] | None:
            matched = [self.matched(number) for number in numbers]
            return matched if matched == [self.looked_up(number) for number in numbers] else None

        return wait_until(both, what="a match finds what lookups find")

    def snapshot(self) -> Names:
        code, body = self.daemon.http("/kv/snapshot?model=test/model")
        assert code == 200, body
        events = [json.loads(line) for line in body.splitlines()][1:]
        return {(event["medium"], bytes.fromhex(name)) for event in events for name in event["block_hashes"]}

    def announced(self, expected: Names) -> None:
        """By the daemon's stream, to an engine that follows, and in a snapshot."""
        blocks = self.subscriber.blocks
        self.subscriber.follow(lambda: {(medium, name) for medium, _, name in blocks.resident} == expected)
        wait_until(
            lambda: (
                self.follower.step().whole and {(medium, name) for medium, _, name in self.follower.names} == expected
            )
        )
        assert self.follower.before == set(), "what an earlier daemon reported was reported again or withdrawn"
        assert self.snapshot() == expected


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with running(tmp_path) as made:
        yield made


@contextlib.contextmanager
def running(folder: Path, *args: Any, **flags: Any) -> Iterator[Scene]:
    made = Scene(folder, *args, **flags)
    try:
        made.start()
        yield made
    finally:
        made.close()


def names(medium: str, *numbers: int) -> Names:
    return {(medium, name) for number in numbers for name in prompt(number).hashes}


def test_what_is_written_is_announced_with_medium_storage_beside_l1s(scene: Scene) -> None:
    scene.store(1)
    scene.announced(names("CPU", 1) | names("STORAGE", 1))
    assert scene.matches(1) == [(48, 48)]
    chunks = [prompt(1).contents(at, at + 1) for at in range(CHUNKS)]
    for medium in ("CPU", "STORAGE"):
        stored = {each.hashes: each.tokens for each in scene.follower.received if each.medium == medium}
        assert stored == {chunk.hashes: chunk.tokens for chunk in chunks}
    scene.store(2, described=False)
    assert scene.matches(1, 2) == [(48, 48), (48, 48)]
    scene.announced(names("CPU", 1) | names("STORAGE", 1))
    scene.clear()
    scene.announced(set())
    assert scene.matches(1, 2) == [(0, 0), (0, 0)]


def test_what_l1_evicts_stays_in_storage_and_comes_back_described(tmp_path: Path) -> None:
    with running(tmp_path, l1_size="1MiB") as scene:
        scene.store(*range(6))
        hits = scene.matches(*range(6))
        assert all(filled == 48 for _, filled in hits)
        gone = [number for number, (in_l1, _) in enumerate(hits) if not in_l1]
        assert gone
        assert scene.fill(gone[0]) == CHUNKS
        assert scene.matches(gone[0]) == [(48, 48)]
        scene.subscriber.follow(
            lambda: names("CPU", gone[0]) <= {(m, n) for m, _, n in scene.subscriber.blocks.resident}
        )
        assert names("STORAGE", *range(6)) <= scene.snapshot()
        assert scene.daemon.status()["kv_events"]["unannounced"]["undescribed"] == 0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_after_a_restart_matches_find_all_and_events_what_an_engine_describes(
    scene: Scene, end: signal.Signals
) -> None:
    scene.store(1, 2)
    scene.announced(names("CPU", 1, 2) | names("STORAGE", 1, 2))
    scene.end(end)
    scene.start()
    assert scene.matches(1, 2) == [(0, 48), (0, 48)]
    scene.announced(set())
    assert scene.fill(1) == CHUNKS
    assert scene.matches(1, 2) == [(48, 48), (0, 48)]
    scene.announced(set())
    scene.store(1)  # an engine names its tokens
    scene.announced(names("CPU", 1) | names("STORAGE", 1))
    scene.clear()
    scene.announced(set())
    assert scene.matches(1, 2) == [(0, 0), (0, 0)]
    scene.end(end)
    scene.start()
    assert scene.matches(1, 2) == [(0, 0), (0, 0)]


def test_what_the_tier_evicts_is_removed(tmp_path: Path) -> None:
    with running(tmp_path, size="2MiB", l1_size="1MiB") as scene:
        scene.store(*range(20))
        assert scene.daemon.tier()["evictions"]
        hits = scene.matches(*range(20))
        assert (0, 0) in hits
        assert (0, 48) in hits
        resident = names("STORAGE", *[number for number, (_, filled) in enumerate(hits) if filled == 48])
        snapshot = scene.snapshot()
        assert resident <= snapshot
        assert sum(medium == "STORAGE" for medium, _ in snapshot) == PER_CHUNK * scene.daemon.tier()["objects"]
        scene.announced(snapshot)


def test_a_corrupt_object_is_removed_once_it_was_read(tmp_path: Path) -> None:
    with running(tmp_path) as scene:
        scene.store(1)
        scene.announced(names("CPU", 1) | names("STORAGE", 1))
        scene.end(signal.SIGKILL)
        (data,) = (path for path in (tmp_path / "l2").iterdir() if path.stat().st_size >= 32 << 20)
        with data.open("r+b") as file:
            file.seek(1 << 16)
            file.write(bytes(1 << 16))
        scene.start()
        assert scene.matches(1) == [(0, 48)]
        assert 0 <= scene.fill(1) < CHUNKS
        assert scene.daemon.tier()["corrupt"] >= 1
        ((in_l1, filled),) = scene.matches(1)
        assert in_l1 == filled < 48


def test_a_stopped_subscriber_of_many_writes_costs_the_daemon_nothing(tmp_path: Path) -> None:
    """It never reads: what it should have received is dropped, and others receive all."""
    with (
        running(tmp_path, size="2MiB", l1_size="1MiB") as scene,
        contextlib.closing(Subscriber(scene.daemon.flags["kv_events_endpoint"])) as silent,
    ):
        scene.store(*range(60))
        blocks = scene.subscriber.blocks
        scene.subscriber.follow(lambda: {(m, n) for m, _, n in blocks.resident} == scene.snapshot())
        assert {medium for medium, _, _ in blocks.resident} == {"CPU", "STORAGE"}
        assert silent.received == []
        status = scene.daemon.status()
        assert status["events"]["dropped"] == 0
        assert all(one["state"] == "running" for one in status["kv_events"]["observers"])
