"""What a daemon shows of what the cache brought: ends of requests and copies in, `/metrics` and `/status` out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

from kvserver._native import State
from kvserver.protocol import Error, Status, StatusReply, encode
from kvserver.protocol.fields import Message

TOKENS = "kvserver_prompt_tokens_total"


def samples(daemon: Daemon, name: str) -> dict[str, float]:
    """Samples of one family of the only instance, by what is left of their labels."""
    found = {}
    for labels, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", daemon.http("/metrics")[1], re.MULTILINE):
        rest = [
            text for label, text in re.findall(r'(\w+)="([^"]*)"', labels) if label not in ("instance_id", "model_name")
        ]
        found[",".join(rest)] = float(value)
    return found


def ended(daemon: Daemon, requests: int) -> dict[str, Any]:
    def counts() -> dict[str, Any]:
        found: dict[str, Any] = daemon.status()["instances"][0]["requests"]
        return found

    wait_until(lambda: counts()["ended_requests"] == requests)
    return counts()


def test_prompt_tokens_are_shown_by_source_and_add_up(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    assert samples(daemon, TOKENS) == {"l0": 0, "l1": 0, "l2": 0, "computed": 0}
    worker.end_request(prompt_tokens=1000, local_tokens=256, loaded_tokens=512, loads=1)
    worker.end_request(prompt_tokens=500, loads=1, failed_loads=1)
    counts = ended(daemon, 2)
    assert counts["prompt_tokens"] == {"l0": 256, "l1": 512, "l2": 0, "computed": 732}
    assert samples(daemon, TOKENS) == counts["prompt_tokens"]
    assert samples(daemon, "kvserver_request_loads_total") == {"done": 1, "failed": 1}
    assert samples(daemon, "kvserver_request_hit_ratio_count") == {"": 2}
    assert samples(daemon, "kvserver_request_hit_ratio_sum") == {"": pytest.approx(0.768)}
    assert daemon.status()["totals"]["prompt_tokens"] == counts["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt_tokens": 100, "local_tokens": 500, "loaded_tokens": 500}, (100, 0, 0)),
        ({"prompt_tokens": 100, "local_tokens": 60, "loaded_tokens": 60}, (60, 40, 0)),
        ({"local_tokens": 60, "loaded_tokens": 60}, (0, 0, 0)),
        ({"prompt_tokens": 100, "loads": 1, "failed_loads": 5}, (0, 0, 100)),
    ],
)
def test_sources_that_do_not_fit_together_are_cut(
    make_daemon: Callable[..., Daemon],
    make_worker: Callable[..., Worker],
    fields: dict[str, int],
    expected: tuple[int, int, int],
) -> None:
    """A lease must end whatever its engine states, so the message is not refused."""
    daemon = make_daemon()
    worker = make_worker(daemon)
    worker.end_request(**fields)
    counts = ended(daemon, 1)
    assert tuple(counts["prompt_tokens"][source] for source in ("l0", "l1", "computed")) == expected
    assert min(counts["request_loads"].values()) == 0


@pytest.mark.parametrize("tokens", [-1, (1 << 31) + 1])
def test_tokens_that_no_prompt_has_are_refused(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker], tokens: int
) -> None:
    worker = make_worker(make_daemon())
    reply = worker.reply_to(worker.end_request(prompt_tokens=tokens), 5)
    assert isinstance(reply, Error)
    assert (reply.code, "prompt_tokens" in reply.message) == ("bad_message", True)


class OlderEnd(Message, tag="EndRequest"):
    instance_id: str
    incarnation: str
    model_name: str
    sequence: int
    request_id: str


def test_of_engines_that_state_no_sources_nothing_is_shown(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    older = OlderEnd(worker.instance_id, worker.incarnation, worker.model_name, 0, "r")
    assert b"prompt_tokens" not in encode(older)
    worker.send(older)
    counts = ended(daemon, 1)
    assert sum(counts["prompt_tokens"].values()) == 0
    assert samples(daemon, "kvserver_request_hit_ratio_count") == {"": 0}


def test_a_load_faster_than_computing_gains_and_a_slower_one_loses(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon(copy_delay_us=2000)
    worker = make_worker(daemon)
    keys, blocks = make_keys(2), worker.blocks_for(2)
    worker.store(keys, blocks)
    worker.load(keys, blocks)

    def seconds() -> tuple[float, float]:
        gained = samples(daemon, "kvserver_prefill_seconds_gained_total")
        return gained[""], samples(daemon, "kvserver_prefill_seconds_lost_total")[""]

    assert seconds() == (0, 0)  # the engine has reported no speed
    tokens = 2 * worker.chunk_blocks * 16
    worker.end_request(prefill_tokens_per_second=1.0)
    worker.load(keys, blocks)
    gained, lost = seconds()
    assert tokens - 10 < gained < tokens
    assert lost == 0
    worker.end_request(prefill_tokens_per_second=1e9)
    worker.load(keys, blocks)
    after, lost = seconds()
    assert after == gained
    assert lost > 0.001  # the copy is slowed down by more


def test_a_load_that_failed_loses_its_time(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon(pauses=True)
    worker = make_worker(daemon)
    keys, blocks = make_keys(3), worker.blocks_for(3)
    worker.store(keys, blocks)
    with daemon.paused_copies():
        load = worker.begin_load(keys, blocks)
        wait_until(lambda: load.state is State.RUNNING)
        assert load.move(State.RUNNING, State.CANCELLED)
    assert isinstance(load.reply(), Error)
    assert samples(daemon, "kvserver_prefill_seconds_lost_total")[""] > 0
    assert samples(daemon, "kvserver_load_duration_seconds_count") == {"queue": 0, "copy": 0}


def test_several_ranks_gain_once_and_wait_for_the_slowest(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon(copy_delay_us=2000)
    names = {"instance_id": "two-ranks", "incarnation": "one"}
    ranks = [make_worker(daemon, rank=rank, world_size=2, **names) for rank in range(2)]
    keys = make_keys(2)
    for rank in ranks:
        rank.store(keys, rank.blocks_for(2))
    ranks[0].end_request(prefill_tokens_per_second=1.0)
    tokens = 2 * ranks[0].chunk_blocks * 16
    ranks[0].load(keys, ranks[0].blocks_for(2), request_id="r")
    assert samples(daemon, "kvserver_prefill_seconds_gained_total") == {"": 0}
    ranks[1].load(keys, ranks[1].blocks_for(2), request_id="r")
    assert tokens - 10 < samples(daemon, "kvserver_prefill_seconds_gained_total")[""] < tokens


def test_durations_of_copies_are_split_into_queue_and_copy(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    """With one thread the second load waits for the first."""
    daemon = make_daemon(pauses=True, copy_threads=1)
    worker = make_worker(daemon)
    keys, blocks = make_keys(2), worker.blocks_for(2)
    worker.store(keys, blocks)
    assert samples(daemon, "kvserver_store_duration_seconds_count") == {"queue": 1, "copy": 1}
    assert samples(daemon, "kvserver_load_duration_seconds_count") == {"queue": 0, "copy": 0}
    with daemon.paused_copies():
        began = time.monotonic()
        loads = [worker.begin_load(keys, worker.blocks_for(2, first)) for first in (1, 1 + 2 * worker.chunk_blocks)]
        worker.ask(Status(), StatusReply)  # both have been read
        time.sleep(0.1 + 2 * (time.monotonic() - began))
    for load in loads:
        load.reply()
    assert samples(daemon, "kvserver_load_duration_seconds_count") == {"queue": 2, "copy": 2}
    seconds = samples(daemon, "kvserver_load_duration_seconds_sum")
    assert seconds["copy"] == pytest.approx(samples(daemon, "kvserver_load_seconds_total")[""])
    assert seconds["queue"] >= 0.4 * seconds["copy"]


def test_the_sources_go_on_when_an_engine_returns(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon, instance_id="comes-back")
    worker.end_request(prompt_tokens=100, local_tokens=40)
    ended(daemon, 1)
    worker.close()
    wait_until(lambda: daemon.status()["departed"])
    assert samples(daemon, TOKENS)["l0"] == 40
    again = make_worker(daemon, instance_id="comes-back")
    again.end_request(prompt_tokens=100, local_tokens=2)
    assert ended(daemon, 2)["prompt_tokens"]["l0"] == 42
    assert samples(daemon, TOKENS) == {"l0": 42, "l1": 0, "l2": 0, "computed": 158}
