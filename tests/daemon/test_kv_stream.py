"""A real daemon's stream of KV events: each follower knows what L1 holds, through evictions, clears, kills, restarts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable

import pytest
from support.daemon import Daemon, wait_until
from support.kv_chunks import Prompt
from support.kv_follower import Follower
from support.kv_subscriber import Blocks, Subscriber, events_of
from support.worker import Worker

from kvserver.protocol import KVEventsTaken

Resident = set[tuple[str, int | None, object]]


def prompt(*first: int, chunks: int = 4) -> Prompt:
    """So many chunks; prompts with the same first numbers begin alike."""
    tokens = [number for number in first for _ in range(32)]
    tokens += [first[-1] + at for at in range(chunks * 64)]
    return Prompt(tokens[: chunks * 64], chunk_blocks=4, block=16)


def flags(daemon_folder: object) -> dict[str, str]:
    return {
        "kv_events_endpoint": f"ipc://{daemon_folder}/events",
        "kv_events_replay_endpoint": f"ipc://{daemon_folder}/replay",
    }


@pytest.fixture
def daemon(make_daemon, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv")
    return make_daemon(l1_size="1MiB", eviction_policy="lru", **flags(folder))


@pytest.fixture
def audience(daemon):
    """Makes subscribers that are closed at the end."""
    made: list[Subscriber] = []

    def make() -> Subscriber:
        made.append(Subscriber(daemon.flags["kv_events_endpoint"], daemon.flags["kv_events_replay_endpoint"]))
        return made[-1]

    yield make
    for subscriber in made:
        subscriber.close()


def store(worker: Worker, prompt: Prompt, **changes: object) -> None:
    worker.store(prompt.keys, worker.blocks_for(len(prompt.keys)), contents=prompt.contents(), **changes)


def snapshot(daemon: Daemon) -> tuple[int, Blocks]:
    """The sequence and the blocks of GET /kv/snapshot, which may name a block more than once."""
    code, body = daemon.http("/kv/snapshot?model=test/model")
    assert code == 200, body
    head, *events = [json.loads(line) for line in body.splitlines()]
    held, seen = Blocks(), set()
    for event in events:
        fresh = [name for name in event["block_hashes"] if (event["medium"], name) not in seen]
        seen |= {(event["medium"], name) for name in event["block_hashes"]}
        held.apply_event({**event, "block_hashes": [bytes.fromhex(name) for name in fresh]})
    return head["sequence"], held


def found(worker: Worker, prompts: list[Prompt]) -> set[bytes]:
    """The blocks of all chunks that the daemon would load."""
    names: set[bytes] = set()
    for one in prompts:
        for at, key in enumerate(one.keys):
            if worker.lookup([key]):
                names |= set(one.hashes[at * 4 : at * 4 + 4])
    return names


def names(resident: Resident) -> set[object]:
    assert all(medium == "CPU" for medium, _, _ in resident)
    return {name for _, _, name in resident}


def follow(subscriber: Subscriber, expected: set[bytes]) -> None:
    subscriber.follow(lambda: names(subscriber.blocks.resident) == expected)


class Consumers:
    """Subscribers of one daemon's stream, and two engines that request events, of which one stores."""

    def __init__(self, daemon: Daemon, audience: Callable[[], Subscriber], make_worker: Callable[..., Worker]) -> None:
        self.daemon, self.audience, self.make_worker = daemon, audience, make_worker
        self.subscribers = [audience()]
        self.workers: list[Worker] = []
        self.connect(("one", "two"))
        self.followers = [
            Follower(
                lambda ask, at=at: self.workers[at].ask(ask, KVEventsTaken), worker.instance_id, worker.incarnation
            )
            for at, worker in enumerate(self.workers)
        ]
        self.prompts: list[Prompt] = []

    def connect(self, names: Iterable[str]) -> None:
        self.workers = [self.make_worker(self.daemon, instance_id=name, incarnation="1") for name in names]
        for worker in self.workers:
            worker.send(worker.description(hash_form="bytes"))

    def store(self, prompt: Prompt) -> None:
        self.prompts.append(prompt)
        store(self.workers[0], prompt)

    def agree(self) -> set[bytes]:
        """What all consumers, and a snapshot, know: the blocks that the daemon would load."""
        expected = found(self.workers[0], self.prompts)
        for subscriber in self.subscribers:
            follow(subscriber, expected)
        for follower in self.followers:
            wait_until(lambda f=follower: f.step().whole and set(f.blocks) == expected, what="an engine received all")
            assert follower.before == set(), "what an earlier follow reported was reported again or withdrawn"
        sequence, late = snapshot(self.daemon)
        assert names(late.resident) == expected
        assert sequence >= max(subscriber.last for subscriber in self.subscribers)
        return expected


def test_all_consumers_know_what_l1_holds_through_evictions_a_clear_a_halt_a_kill_and_the_end(
    daemon, audience, make_worker
):
    consumers = Consumers(daemon, audience, make_worker)
    (first,) = consumers.subscribers
    consumers.store(prompt(1, 2))
    assert consumers.agree() == set(prompt(1, 2).hashes)
    for follower in consumers.followers:
        assert b"".join(event.tokens for event in follower.received) == prompt(1, 2).contents().tokens
        assert {event.medium for event in follower.received} == {"CPU"}

    def evicting() -> bool:
        consumers.store(prompt(1, 1000 * len(consumers.prompts)))
        return daemon.status()["l1"]["evictions"] >= 3

    wait_until(evicting, what="three evictions")
    resident = consumers.agree()
    assert resident
    assert not set(prompt(1, 2).hashes) <= resident
    daemon.http("/cache/clear", "POST")
    assert consumers.agree() == set()
    kinds = {event["type"] for _, _, payload in first.received[1:] for event in events_of(payload)}
    assert kinds == {"BlockStored", "BlockRemoved"}, "AllBlocksCleared is for the stream's beginning and end"
    assert [len(follower.follows) for follower in consumers.followers] == [1, 1]

    daemon.freeze()
    worker, halted = consumers.workers[0], prompt(2)
    begun = worker.begin_store(halted.keys, worker.blocks_for(4), contents=halted.contents())
    consumers.subscribers.append(audience())  # which connects to a daemon that does not answer
    with pytest.raises(TimeoutError):
        begun.reply(1)
    daemon.thaw()
    begun.reply()
    consumers.prompts.append(halted)
    consumers.store(prompt(3))
    assert consumers.agree() == {*prompt(2).hashes, *prompt(3).hashes}
    assert first.missed == 0

    daemon.kill()
    daemon.start()
    consumers.connect(("one", "two"))
    consumers.subscribers.append(audience())
    consumers.subscribers[-1].last = 0  # as one that has lost its state: all that is kept is requested
    consumers.store(prompt(4))
    assert consumers.agree() == set(prompt(4).hashes)
    assert [len(set(follower.follows)) for follower in consumers.followers] == [2, 2]
    (stream,) = next(one for one in daemon.status()["kv_events"]["observers"] if one["name"] == "zmq")["streams"]
    assert stream["unbalanced_blocks"] == 0

    daemon.terminate()
    follow(first, set())
    assert [event["type"] for event in events_of(first.received[-1][2])] == ["AllBlocksCleared"]


def test_chunks_of_engines_that_describe_nothing_are_counted_and_not_announced(daemon, audience, make_worker):
    worker, subscriber = make_worker(daemon), audience()
    worker.send(worker.description(hash_form="bytes"))
    dumb, told = prompt(1), prompt(2)
    worker.store(dumb.keys, worker.blocks_for(4))
    store(worker, told)
    follow(subscriber, set(told.hashes))
    assert daemon.status()["kv_events"]["unannounced"]["undescribed"] == 4
    daemon.http("/cache/clear", "POST")
    follow(subscriber, set())


def test_a_stopped_subscriber_costs_the_daemon_nothing(daemon, audience, make_worker):
    """It never reads: what it should have received is dropped, and others receive all."""
    silent, reader = audience(), audience()
    worker = make_worker(daemon)
    worker.send(worker.description(hash_form="bytes"))
    for number in range(400):
        store(worker, prompt(7, number * 1000, chunks=4))
    follow(reader, found(worker, [prompt(7, number * 1000, chunks=4) for number in range(400)]))
    assert silent.received == []
    status = daemon.status()
    assert status["events"]["dropped"] == 0
    assert all(one["state"] == "running" for one in status["kv_events"]["observers"])


def test_blocks_that_a_restart_keeps_are_known_to_all_consumers_again(daemon, audience, make_worker):
    with tempfile.TemporaryDirectory(prefix="kvs-", dir="/dev/shm") as memory:
        assert daemon.terminate() == 0
        daemon.flags["l1_file"] = f"{memory}/l1"
        daemon.start()
        consumers = Consumers(daemon, audience, make_worker)
        prompts = [prompt(1000 * number) for number in range(3)]
        for one in prompts:
            consumers.store(one)
        for _ in range(2):
            assert daemon.terminate() == 0
            daemon.start()
            consumers.connect(("one", "two"))
            wait_until(lambda: daemon.status()["l1"]["chunks"] == 12, what="all is adopted")
            assert consumers.agree() == {name for one in prompts for name in one.hashes}
        assert daemon.status()["kv_events"]["unannounced"]["undescribed"] == 0
        assert daemon.terminate() == 0
