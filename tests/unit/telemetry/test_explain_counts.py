"""Counts of an explanation, of random requests: no part is negative or larger than its whole, and the parts of a prompt add up."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from kvserver.cache import LookupOutcome, MissReason
from kvserver.events import CopyBegan, CopyEnded, LookupEnded, RequestEnded
from kvserver.telemetry import Explain, Facts, advice, verdict

CHUNK, BLOCK = 64, 16
MISSED = [reason for reason in MissReason if reason is not MissReason.PARTIAL_CHUNK]
ADVISED = re.compile(r"At most ([\d,]+) of this request's tokens")


@st.composite
def outcomes(draw: st.DrawFn) -> LookupOutcome:
    """With a tail: of the first missing chunk, or behind the last chunk. A window or a state ends a hit before full attention's."""
    chunks = draw(st.integers(0, 6))
    hit = draw(st.integers(0, chunks))
    missed: list[tuple[MissReason, int]] = []
    while left := chunks - hit - sum(count for _, count in missed):
        missed.append((draw(st.sampled_from(MISSED)), draw(st.integers(1, left))))
    merged = {reason: sum(count for same, count in missed if same is reason) for reason, _ in missed}
    blocks = draw(st.integers(0, CHUNK // BLOCK - 1))
    full = draw(st.integers(hit, chunks))
    return LookupOutcome(
        chunks, hit, tuple(merged.items()), full_chunks=full, tail_blocks=blocks, tail_tokens=blocks * BLOCK
    )


@st.composite
def requests(draw: st.DrawFn) -> list[LookupEnded | CopyBegan | CopyEnded | RequestEnded]:
    """Lookups, loads of ranks, and an end with any tokens that an engine may report: it may be preempted, or wrong about its prompt."""
    of = ("e", "m")
    name = draw(st.sampled_from("abc"))
    events: list[LookupEnded | CopyBegan | CopyEnded | RequestEnded] = []
    time, prompt = 10, draw(st.integers(0, 7 * CHUNK))
    for _ in range(draw(st.integers(0, 2))):
        time += 10
        outcome = draw(outcomes())
        tokens = draw(st.sampled_from([0, prompt, outcome.chunks * CHUNK + draw(st.integers(0, CHUNK - 1))]))
        keys = bytes(32 * outcome.chunks)
        events.append(
            LookupEnded(time + 1, *of, name, time, keys, outcome, CHUNK, b"n" * 32, tokens, block_tokens=BLOCK)
        )
    for rank in draw(st.lists(st.integers(0, 2), max_size=3)):
        time += 10
        copy, took = (*of, rank, "load", name), draw(st.integers(0, 9))
        done = draw(st.sampled_from(["done", "late"]))
        events.append(CopyBegan(time, *copy))
        events.append(
            CopyEnded(time + took, *copy, time, draw(st.integers(0, 8)), 4096, draw(st.integers(0, 20)), done)
        )
    if draw(st.booleans()):
        reported = draw(st.sampled_from([0, prompt, draw(st.integers(0, 7 * CHUNK))]))
        local = draw(st.integers(0, reported))
        loaded = draw(st.integers(0, reported - local))
        filled = draw(st.integers(0, loaded))
        ended = RequestEnded(time + 10, *of, name, False, reported, local, loaded, 1, 0, filled_tokens=filled)
        events.insert(draw(st.integers(0, len(events))), ended)
    return events


def check(facts: Facts) -> None:
    tokens, missed = facts["tokens"], facts["missed_tokens"]
    l0, l1, l2, computed, prompt = (tokens[name] for name in ("l0", "l1", "l2", "computed", "prompt"))
    assert prompt is not None
    assert 0 <= tokens["found"] <= tokens["looked_up"] <= prompt
    for part in (l0, l1, l2, computed):
        assert part is None or 0 <= part <= prompt
    if computed is not None:
        assert (l0 or 0) + (l1 or 0) + (l2 or 0) + computed == prompt
    most = prompt if computed is None else computed
    assert 0 <= tokens["avoidable"] <= most
    assert all(0 < count <= prompt for count in missed.values())
    if facts["waits"]["lookups"]:
        assert tokens["found"] + sum(missed.values()) == prompt
    missing = facts["missing"]
    assert (missing is not None) == bool(missed)
    assert missing is None or (missing["token"] == tokens["found"] and missing["reason"] == next(iter(missed)))
    for load in facts["loads"]:
        assert 0 <= load["copy_seconds"] <= load["seconds"]
        assert 0 <= load["queue_seconds"] <= load["seconds"]
    assert (facts["waits"]["first_lookup_to_load_seconds"] or 0) >= 0
    assert "-" not in re.findall(r"^[^:]*", verdict(facts))[0], "no number is negative"
    for text in advice(facts):
        assert all(0 < int(n.replace(",", "")) <= max(0, most - 1) for n in ADVISED.findall(text)), text


@given(st.lists(requests(), min_size=1, max_size=4))
@examples(400)
def test_no_count_is_negative_or_larger_than_its_whole(
    walk: list[list[LookupEnded | CopyBegan | CopyEnded | RequestEnded]],
) -> None:
    explain = Explain(clock_ns=lambda: 10**9)
    for events in walk:
        for event in events:
            explain.handle(event)
    worst = explain.worst(60, 100)
    for facts in worst:
        check(facts)
    badness = [(facts["tokens"]["avoidable"], facts["tokens"]["computed"] or 0) for facts in worst]
    assert all(before >= after for before, after in pairwise(badness))
    for facts in worst:
        shown = explain.attributes("e", facts["request_id"])
        assert all(value >= 0 for name, value in shown.items() if name.endswith("_tokens") and isinstance(value, int))
