"""A real daemon's stream of KV events: each follower knows what L1 holds, through evictions, clears, kills, restarts."""

from __future__ import annotations

import json
import random

import pytest
from support.daemon import Daemon, wait_until
from support.kv_chunks import Prompt
from support.kv_subscriber import Blocks, Subscriber, events_of
from support.worker import Worker

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
    return make_daemon(l1_size="1MiB", **flags(folder))


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


def test_a_subscriber_receives_stores_evictions_and_clears_and_a_late_one_reads_a_snapshot(
    daemon, audience, make_worker
):
    worker, first = make_worker(daemon), audience()
    worker.send(worker.description(hash_form="bytes"))
    prompts = [prompt(1, 2)]
    store(worker, prompts[0])
    follow(first, set(prompts[0].hashes))
    while daemon.status()["l1"]["evictions"] < 3:
        prompts.append(prompt(1, 1000 * len(prompts)))
        store(worker, prompts[-1])
    expected = found(worker, prompts)
    follow(first, expected)
    sequence, late = snapshot(daemon)
    assert names(late.resident) == expected
    assert sequence >= first.last
    daemon.http("/cache/clear", "POST")
    follow(first, set())
    kinds = {event["type"] for _, _, payload in first.received[1:] for event in events_of(payload)}
    assert kinds == {"BlockStored", "BlockRemoved"}, "AllBlocksCleared is for the stream's beginning and end"
    assert first.missed == 0


def test_a_daemon_that_ends_publishes_that_all_is_cleared(daemon, audience, make_worker):
    worker, subscriber = make_worker(daemon), audience()
    worker.send(worker.description(hash_form="bytes"))
    store(worker, prompt(5))
    follow(subscriber, set(prompt(5).hashes))
    daemon.terminate()
    follow(subscriber, set())
    assert [event["type"] for event in events_of(subscriber.received[-1][2])] == ["AllBlocksCleared"]


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


@pytest.mark.parametrize("seed", range(3))
def test_random_runs_with_kills_end_with_the_same_blocks_for_old_and_new_consumers(daemon, audience, make_worker, seed):
    generator = random.Random(seed)
    prompts = [prompt(*(generator.randrange(4) for _ in range(4)), chunks=generator.randint(1, 4)) for _ in range(25)]
    first, worker = audience(), make_worker(daemon)
    worker.send(worker.description(hash_form="bytes"))
    for step in range(60):
        chance = generator.random()
        if chance < 0.85:
            store(worker, generator.choice(prompts))
        elif chance < 0.93:
            daemon.http("/cache/clear", "POST")
        elif chance < 0.97:
            first.follow(lambda: first.receive(0) is None or True)
        else:
            daemon.kill()
            daemon.start()
            worker = make_worker(daemon)
            worker.send(worker.description(hash_form="bytes"))
            store(worker, generator.choice(prompts))
        if step % 20 == 19:
            expected = found(worker, prompts)
            follow(first, expected)
            sequence, late = snapshot(daemon)
            assert names(late.resident) == expected
            assert sequence >= first.last
    newcomer = audience()
    store(worker, prompt(99))
    expected = found(worker, [*prompts, prompt(99)])
    wait_until(lambda: names(snapshot(daemon)[1].resident) == expected)
    newcomer.last = 0  # as one that has lost its state: all that is kept is requested
    follow(newcomer, expected)
    follow(first, expected)
    (stream,) = next(one for one in daemon.status()["kv_events"]["observers"] if one["name"] == "zmq")["streams"]
    assert stream["unbalanced_blocks"] == 0


def test_a_daemon_that_stood_still_is_followed_on(daemon, audience, make_worker):
    worker, subscriber = make_worker(daemon), audience()
    worker.send(worker.description(hash_form="bytes"))
    store(worker, prompt(1))
    follow(subscriber, set(prompt(1).hashes))
    daemon.freeze()
    keys = prompt(2).keys
    begun = worker.begin_store(keys, worker.blocks_for(len(keys)), contents=prompt(2).contents())
    late = audience()  # which connects to a daemon that does not answer
    with pytest.raises(TimeoutError):
        begun.reply(1)
    daemon.thaw()
    begun.reply()
    store(worker, prompt(3))
    for each in (subscriber, late):
        follow(each, {*prompt(1).hashes, *prompt(2).hashes, *prompt(3).hashes})
