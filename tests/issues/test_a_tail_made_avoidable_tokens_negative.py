"""Where a hit went on inside a chunk that was never stored, as in the next turn of every chat, its single blocks were subtracted from
the request's avoidable tokens twice: `kvserver explain`, its page, spans and the order of the worst requests had -32 of them."""

from __future__ import annotations

import re

import pytest
from support.explained import CHUNK, MakeDaemon, MakeWorker, explained, page
from support.worker import Worker, make_keys

from kvserver.cache import LookupOutcome, MissReason
from kvserver.cli.explain import text
from kvserver.events import LookupEnded, RequestEnded
from kvserver.protocol import LookupReply, LookupTail, ObjectGroup
from kvserver.telemetry import Explain

BLOCK = 16


def next_turn(worker: Worker, request_id: str) -> None:
    """Two chunks and two blocks of four chunks and 40 tokens are found and loaded."""
    chunks, tail, other = make_keys(4), make_keys(2), make_keys(2)
    worker.store(chunks[:2], range(1, 1 + 2 * worker.chunk_blocks))
    worker.store(tail, [40, 41], group=1, first_chunk=2 * worker.chunk_blocks, after=chunks[1])
    prompt = 4 * CHUNK + 40
    worker.ask(worker.lookup_message(chunks, request_id, tail_keys=b"".join(other), tokens=prompt), LookupReply)
    named = LookupTail(worker.instance_id, worker.incarnation, request_id, b"".join([*tail, *other]))
    assert worker.ask(named, LookupReply).tail_blocks == 2
    had = 2 * CHUNK + 2 * BLOCK
    worker.end_request(request_id, prompt_tokens=prompt, local_tokens=0, loaded_tokens=had, l2_tokens=0, loads=1)


def test_nothing_was_avoidable_of_a_chats_next_turn(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon, groups=(ObjectGroup("full", (0,), BLOCK),), tails=True)
    next_turn(worker, "turn-2")
    found = explained(daemon, "turn-2", outcome="partial")
    assert (found["tokens"]["found"], found["tokens"]["avoidable"]) == (2 * CHUNK + 2 * BLOCK, 0)
    assert not re.search(r"\s-\d", text({"requests": [found]})), "no number is negative"
    assert worker.lookup(make_keys(1), "new", tokens=CHUNK) == 0
    worker.end_request("new", prompt_tokens=CHUNK)
    explained(daemon, "new", outcome="miss")
    worst = page(daemon)[1]["requests"]
    assert [request["request_id"] for request in worst] == ["turn-2", "new"], "more computed tokens come first"


@pytest.mark.parametrize(("reason", "avoidable"), [(MissReason.NEVER_STORED, 0), (MissReason.EVICTED, 480)])
def test_a_span_has_the_missed_tokens_that_no_block_covers(reason: MissReason, avoidable: int) -> None:
    explain = Explain()
    outcome = LookupOutcome(4, 2, ((reason, 2),), tail_blocks=2, tail_tokens=32)
    of = ("engine", "model", "request")
    explain.handle(LookupEnded(1, *of, 0, bytes(128), outcome, 256, bytes(32), 1064, block_tokens=16))
    explain.handle(RequestEnded(2, *of, prompt_tokens=1064, loaded_tokens=544))
    attributes = explain.attributes("engine", "request")
    assert (attributes["avoidable_tokens"], attributes["computed_tokens"]) == (avoidable, 520)


def test_blocks_that_were_found_behind_a_fill_are_part_of_the_hit() -> None:
    """They were missing in what was found: 32 tokens of a prompt counted as loaded and as missed."""
    explain = Explain()
    outcome = LookupOutcome(4, 0, ((MissReason.IN_L2, 4),))
    of = ("engine", "model", "request")
    explain.handle(LookupEnded(1, *of, 0, bytes(128), outcome, 256, bytes(32), 1064, block_tokens=16))
    explain.handle(RequestEnded(2, *of, prompt_tokens=1064, loaded_tokens=1056, filled_tokens=1024))
    (found,) = explain.find_requests("request", 1)
    assert (found["tokens"]["found"], found["missed_tokens"]) == (1056, {"partial_chunk": 8})
