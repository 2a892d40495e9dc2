"""Tokens of prompts and chunks were hardly bounded: a few lookups of one engine, with prompts of 2^63 tokens or chunks of 2^62, or the totals
of a few front ends, made sums that no message can carry. From then on the daemon's reply to Status was an internal error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.daemon import Daemon, wait_until
from support.memory import two_groups
from support.worker import Worker, make_keys

from kvserver.protocol import Error, ErrorCode, ObjectGroup, Status, StatusReply
from kvserver.protocol.client import RequestFailed

MakeWorker = Callable[..., Worker]


@pytest.mark.parametrize("tokens", [(1 << 31) + 1, (1 << 63) - 1])
def test_a_lookup_of_a_prompt_of_absurdly_many_tokens_is_refused(
    daemon: Daemon, make_worker: MakeWorker, tokens: int
) -> None:
    worker = make_worker(daemon)
    for _ in range(3):
        reply = worker.reply_to(worker.send(worker.lookup_message(make_keys(1), tokens=tokens)))
        assert isinstance(reply, Error)
        assert (reply.code, "`$.tokens`" in reply.message) == (ErrorCode.BAD_MESSAGE.value, True)
    assert worker.lookup(make_keys(1), tokens=1 << 31) == 0
    assert worker.ask(Status(), StatusReply)


@pytest.mark.parametrize("sizes", [(1 << 31, (1 << 31) - 1), (1 << 21, 1), (1 << 11, (1 << 11) - 1)])
def test_chunks_of_absurdly_many_tokens_are_refused(
    daemon: Daemon, make_worker: MakeWorker, sizes: tuple[int, int]
) -> None:
    """What the blocks of two windows have in common, of which an object is one block."""
    groups = tuple(ObjectGroup("window", (number,), size, tokens=1) for number, size in enumerate(sizes))
    geometry = replace(two_groups(), block_tokens=sizes[0])
    with pytest.raises(RequestFailed, match="at most 1048576") as failed:
        make_worker(daemon, geometry=geometry, groups=groups)
    assert failed.value.code == ErrorCode.BAD_PLANES.value


def test_the_largest_chunks_are_counted(daemon: Daemon, make_worker: MakeWorker) -> None:
    worker = make_worker(
        daemon, geometry=replace(two_groups(), block_tokens=1 << 20),
        groups=tuple(ObjectGroup("window", (number,), 1 << 20, tokens=1) for number in range(2)),
    )  # fmt: skip
    before = daemon.status()["totals"]["lookup_tokens"]
    worker.lookup(make_keys(1) * 16384)
    assert worker.ask(Status(), StatusReply)
    assert daemon.status()["totals"]["lookup_tokens"] - before == 1 << 34


def test_totals_of_all_front_ends_fit_into_a_message(daemon: Daemon, make_worker: MakeWorker) -> None:
    worker = make_worker(daemon)
    for number in range(5):
        worker.send(worker.stats_message(prompt_tokens=(1 << 63) - 1, front_end=number))
    wait_until(lambda: worker.ask(Status(), StatusReply) and load_of(daemon, worker) == 1 << 62)


def load_of(daemon: Daemon, worker: Worker) -> int:
    """Prompt tokens of all front ends."""
    rows = {row["instance_id"]: row["load"] for row in daemon.status()["instances"]}
    return int((rows[worker.instance_id] or {}).get("prompt_tokens", 0))
