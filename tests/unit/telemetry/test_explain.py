"""What is remembered of requests: its bounds, whose an event is, and what follows of tokens."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import count
from typing import Any

import pytest

from kvserver.cache import LookupOutcome, MissReason
from kvserver.events import (
    ChunksEvicted,
    CopyBegan,
    CopyEnded,
    CopyRefused,
    InstanceDisconnected,
    LookupEnded,
    RequestEnded,
)
from kvserver.telemetry import Explain, Facts, advice, verdict
from kvserver.telemetry.explain import MOST_BYTES, MOST_EVICTED_BYTES
from kvserver.telemetry.explain_facts import MOST_RANKS

SECOND = 10**9
NAMESPACE = bytes(32)


class Engine:
    """Events of one instance at a clock that only the test moves."""

    def __init__(self, **options: Any) -> None:
        self.now = 100 * SECOND
        self.explain = Explain(clock_ns=lambda: self.now, **options)

    def lookup(
        self, request: str = "r", chunks: int = 4, hits: int = 0, engine: str = "e", prompt_tokens: int = 0,
        handed_over: int = 0, **more: Any,
    ) -> None:  # fmt: skip
        """`more`: of the outcome."""
        missed = ((MissReason.NEVER_STORED, chunks - hits),) if hits < chunks else ()
        self.explain.handle(
            LookupEnded(
                self.now + 5, engine, "m", request, self.now, bytes(32 * chunks),
                LookupOutcome(chunks, hits, **{"missed": missed, **more}), 256, NAMESPACE, prompt_tokens or 256 * chunks,
                "t" * 500,
                handed_over_tokens=handed_over,
            )
        )  # fmt: skip

    def load(self, request: str = "r", rank: int = 0, outcome: str = "done", chunks: int = 1) -> None:
        of = ("e", "m", rank, "load", request)
        self.explain.handle(CopyBegan(self.now + 50, *of))
        self.explain.handle(CopyEnded(self.now + 90, *of, self.now + 50, chunks, 4096, 30, outcome))

    def end(self, request: str = "r", engine: str = "e", **tokens: Any) -> None:
        self.explain.handle(RequestEnded(self.now, engine, "m", request, **tokens))

    def of(self, request: str = "r") -> Facts:
        (found,) = self.explain.find_requests(request, 10)
        return found


# ---- tokens by tier -------------------------------------------------------------------------------


def test_what_was_read_from_l2_is_no_hit_of_l1() -> None:
    engine = Engine()
    engine.lookup(chunks=4, hits=0, missed=((MissReason.IN_L2, 4),))
    engine.load(chunks=4)
    engine.end(prompt_tokens=1024, loaded_tokens=1023, filled_tokens=1023)
    found = engine.of()
    assert (found["outcome"], found["tokens"]["l1"], found["tokens"]["l2"], found["tokens"]["computed"]) == (
        "hit", 0, 1023, 1
    )  # fmt: skip
    assert (found["tokens"]["found"], found["tokens"]["avoidable"], found["missing"]) == (1024, 0, None)
    assert found["missed_tokens"] == {}


def test_the_time_of_an_eviction_is_not_that_of_a_chunk_that_was_read_from_l2() -> None:
    engine = Engine()
    key = bytes([7]) * 32
    engine.explain.handle(ChunksEvicted(engine.now, NAMESPACE, key))
    engine.now += SECOND
    engine.lookup(chunks=4, missed=((MissReason.IN_L2, 2), (MissReason.EVICTED, 2)), missing_key=key)
    engine.end(prompt_tokens=1024, loaded_tokens=512, filled_tokens=512)
    missing = engine.of()["missing"]
    assert missing is not None
    assert (missing["chunk"], missing["reason"], missing["evicted_seconds_before"]) == (2, "evicted", None)


def test_what_was_not_read_from_l2_in_time_is_still_missed() -> None:
    engine = Engine()
    engine.lookup(chunks=6, hits=1, missed=((MissReason.IN_L2, 3), (MissReason.NEVER_STORED, 2)))
    engine.end(prompt_tokens=1536, local_tokens=128, loaded_tokens=640, filled_tokens=512)
    found = engine.of()
    tokens = found["tokens"]
    assert (tokens["l0"], tokens["l1"], tokens["l2"], tokens["computed"]) == (128, 128, 512, 768)
    assert (found["outcome"], tokens["found"], tokens["avoidable"]) == ("partial", 768, 256)
    assert found["missing"] is not None
    assert (found["missing"]["chunk"], found["missing"]["reason"]) == (3, "in_l2")
    assert found["missed_tokens"] == {"in_l2": 256, "never_stored": 512}
    attributes = engine.explain.attributes("e", "r")
    assert (attributes["l1_tokens"], attributes["l2_tokens"]) == (128, 512)


# ---- bounds -----------------------------------------------------------------------------------


def test_a_hundred_thousand_requests_use_no_more_memory_than_the_stated_bound() -> None:
    engine = Engine()
    ids = count()

    def feed(requests: int) -> None:
        for _ in range(requests):
            request = f"cmpl-{next(ids):032}-0-01234567"
            engine.lookup(request, chunks=64, missing_key=bytes(bytearray(32)), unavailable="why" * 1000)
            engine.load(request)
            engine.end(request, prompt_tokens=1024)

    feed(85_000)
    tracemalloc.start()  # all that is remembered at the end comes after this
    try:
        feed(15_000)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    status = engine.explain.status()
    assert status.requests == status.most_requests == 8192
    assert status.bytes <= MOST_BYTES
    assert used <= status.bytes, "the counted bytes cover the used bytes"


def test_long_ids_and_many_ranks_count_and_the_oldest_are_forgotten() -> None:
    engine = Engine()
    for number in range(1500):
        request = f"{number:05}" + "x" * 500
        engine.lookup(request)
        for rank in range(MOST_RANKS):
            engine.load(request, rank)
    status = engine.explain.status()
    assert status.bytes <= MOST_BYTES
    assert 100 < status.requests < 1000
    assert engine.explain.find_requests("00000", 10) == []
    assert engine.of("01499")["unlisted_loads"] == 0


def test_evicted_keys_are_bounded_and_the_last_ones_kept() -> None:
    engine = Engine()
    key = bytes([7]) * 32
    for _ in range(1000):
        engine.explain.handle(ChunksEvicted(engine.now, NAMESPACE, bytes(32 * 256)))
    engine.explain.handle(ChunksEvicted(engine.now, NAMESPACE, bytes(32) + key))
    engine.now += 3 * SECOND
    engine.lookup(missed=((MissReason.EVICTED, 4),), missing_key=key)
    assert engine.explain.status().bytes <= MOST_EVICTED_BYTES + MOST_BYTES
    missing = engine.of()["missing"]
    assert missing is not None
    assert missing["evicted_seconds_before"] == pytest.approx(3, abs=0.1)


def test_eviction_in_another_namespace_or_after_the_lookup_does_not_explain_a_miss() -> None:
    engine = Engine()
    key = bytes([7]) * 32
    engine.explain.handle(ChunksEvicted(engine.now, bytes([1]) * 32, key))
    engine.explain.handle(ChunksEvicted(engine.now, NAMESPACE, bytes(1) + key + bytes(31)))
    engine.lookup(missed=((MissReason.EVICTED, 4),), missing_key=key)
    engine.explain.handle(ChunksEvicted(engine.now + SECOND, NAMESPACE, key))
    missing = engine.of()["missing"]
    assert missing is not None
    assert missing["evicted_seconds_before"] is None


def test_ranks_beyond_those_listed_are_counted() -> None:
    engine = Engine()
    engine.lookup(hits=4)
    for rank in range(MOST_RANKS + 3):
        engine.load(rank=rank)
    found = engine.of()
    assert len(found["loads"]) == MOST_RANKS
    assert found["unlisted_loads"] == 3


# ---- whose an event is ------------------------------------------------------------------------


def test_requests_of_two_engines_with_one_id_are_apart() -> None:
    engine = Engine()
    engine.lookup(engine="a")
    engine.lookup(engine="b", chunks=2)
    engine.end(engine="a", prompt_tokens=9)
    outcomes = {facts["instance_id"]: facts["outcome"] for facts in engine.explain.find_requests("r", 10)}
    assert outcomes == {"a": "miss", "b": "running"}
    engine.explain.handle(InstanceDisconnected(engine.now, "b", "m", died=True))
    outcomes = {facts["instance_id"]: facts["outcome"] for facts in engine.explain.find_requests("r", 10)}
    assert outcomes == {"a": "miss", "b": "instance_died"}


def test_load_that_ends_after_its_request_decides_its_outcome() -> None:
    engine = Engine()
    engine.lookup(hits=4)
    engine.end(prompt_tokens=1024, loaded_tokens=0)
    engine.load(outcome="cancelled")
    assert (engine.of()["outcome"], engine.of()["failure"]) == ("load_failed", "cancelled")


def test_a_failed_rank_stays_failed_when_a_later_load_is_done() -> None:
    engine = Engine()
    engine.lookup(hits=4)
    engine.explain.handle(CopyRefused(engine.now, "e", "m", 0, "load", "r", "late"))
    engine.load()
    assert engine.of()["failure"] == "late"


def test_stores_are_no_loads() -> None:
    engine = Engine()
    engine.lookup(hits=4)
    engine.explain.handle(CopyBegan(engine.now, "e", "m", 0, "store", "r"))
    engine.explain.handle(CopyRefused(engine.now, "e", "m", 0, "store", "r", "late"))
    assert (engine.of()["loads"], engine.of()["failure"]) == ([], "")


def test_times_of_a_load_are_split_into_wait_queue_and_copy() -> None:
    engine = Engine()
    engine.lookup(hits=4)
    engine.load()
    waits = engine.of()["waits"]
    assert waits["first_lookup_to_load_seconds"] == pytest.approx(50e-9)
    assert waits["load_seconds"] == pytest.approx(40e-9)
    assert (waits["load_queue_seconds"], waits["load_copy_seconds"]) == (pytest.approx(10e-9), pytest.approx(30e-9))


# ---- what follows of tokens -------------------------------------------------------------------

EVICTED = ((MissReason.EVICTED, 2),)
MIXED = ((MissReason.EVICTED, 1), (MissReason.NEVER_STORED, 1))


@pytest.mark.parametrize(
    ("hits", "missed", "local", "loaded", "outcome", "avoidable"),
    [
        (4, (), 0, 1023, "hit", 0),  # vLLM computes the last token
        (4, (), 1008, 0, "not_loaded", 15),
        (4, (), 1023, 0, "hit", 0),
        (2, EVICTED, 0, 512, "partial", 511),
        (2, MIXED, 0, 512, "partial", 256),
        (2, EVICTED, 768, 0, "partial", 255),  # the engine had a part of what L1 had not
        (2, EVICTED, 1023, 0, "hit", 0),
        (0, ((MissReason.NEVER_STORED, 4),), 0, 0, "miss", 0),
        (0, ((MissReason.EVICTED, 4),), 0, 0, "miss", 1023),
        (2, EVICTED, 0, 0, "not_loaded", 1023),
    ],
)
def test_outcome_and_avoidable_tokens_follow_from_hits_misses_and_loads(
    hits: int, missed: tuple[tuple[str, int], ...], local: int, loaded: int, outcome: str, avoidable: int
) -> None:
    engine = Engine()
    engine.lookup(hits=hits, missed=missed)
    engine.end(prompt_tokens=1024, local_tokens=local, loaded_tokens=loaded)
    found = engine.of()
    assert (found["outcome"], found["tokens"]["avoidable"]) == (outcome, avoidable)
    tokens = found["tokens"]
    assert tokens["l0"] is not None
    assert tokens["computed"] is not None
    assert tokens["l0"] + tokens["l1"] + tokens["l2"] + tokens["computed"] == tokens["prompt"] == 1024


@pytest.mark.parametrize("reason", MissReason)
@pytest.mark.parametrize("ended", [True, False])
def test_every_reason_has_a_sentence_and_what_would_save_tokens_an_advice(reason: MissReason, ended: bool) -> None:
    engine = Engine()
    if reason is MissReason.PARTIAL_CHUNK:
        engine.lookup(hits=4, prompt_tokens=1030)
    else:
        engine.lookup(missed=((reason, 4),))
    if ended:
        engine.end(prompt_tokens=1030)
    found = engine.of()
    assert found["missing"] is not None
    assert found["missing"]["reason"] == reason.value
    text = verdict(found)
    assert text.count("\n") == 0
    assert text.startswith("1,030 of 1,030 prompt tokens were computed: " if ended else "")
    assert advice(found) or reason is MissReason.PARTIAL_CHUNK, "6 tokens fill no block"


@pytest.mark.parametrize(
    ("code", "word"),
    [("lookup_timeout", "kvserver.lookup_timeout_ms"), ("x" * 600, "does not report why"), ("", "does not report why")],
)
def test_the_reason_why_nothing_was_loaded_is_stated_if_the_engine_knows(code: str, word: str) -> None:
    engine = Engine()
    engine.lookup(hits=4)
    engine.end(prompt_tokens=1024, not_loaded=code)
    found = engine.of()
    assert (found["outcome"], found["not_loaded"]) == ("not_loaded", code[:200])
    assert word in advice(found)[0]


@pytest.mark.parametrize(("hits", "local", "saved"), [(0, 0, 768), (2, 0, 256), (0, 512, 256), (3, 0, 0), (0, 768, 0)])
def test_a_handover_that_came_late_has_advice_unless_the_engine_had_the_tokens_itself(
    hits: int, local: int, saved: int
) -> None:
    engine = Engine()
    engine.lookup(hits=hits, handed_over=768)
    engine.end(prompt_tokens=1024, local_tokens=local, loaded_tokens=256 * hits)
    late = [text for text in advice(engine.of()) if text.startswith("Another engine handed this prompt over")]
    assert [f"At most {saved} of this request's tokens" in text for text in late] == [True] * bool(saved)


def test_the_worst_are_of_the_last_minutes_only() -> None:
    engine = Engine()
    engine.lookup("old", missed=((MissReason.EVICTED, 4),))
    engine.now += 301 * SECOND
    engine.lookup("new")
    assert [facts["request_id"] for facts in engine.explain.worst(300, 10)] == ["new"]
    assert [facts["request_id"] for facts in engine.explain.worst(302, 10)] == ["old", "new"]
