"""A daemon explains why a request's prompt was computed: for each reason and outcome, with what differs."""

from __future__ import annotations

import time

import pytest
from support.daemon import wait_until
from support.explained import CHUNK, MakeDaemon, MakeWorker, explained, stored
from support.registration import identity
from support.worker import make_keys

from kvserver.protocol import Clear, Cleared, Counted, Retrieved, Stored


def test_all_that_was_found_and_loaded_is_a_hit(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys = stored(worker, 4)
    assert worker.lookup(keys, "r", tokens=4 * CHUNK + 9) == 4
    assert worker.load(keys[1:], worker.blocks_for(3), request_id="r") == Retrieved(chunks=3)
    worker.end_request("r", prompt_tokens=4 * CHUNK + 9, local_tokens=CHUNK, loaded_tokens=3 * CHUNK, loads=1)
    found = explained(daemon, "r", outcome="hit")
    assert found["tokens"] == {
        "prompt": 4 * CHUNK + 9, "looked_up": 4 * CHUNK, "found": 4 * CHUNK,
        "l0": CHUNK, "l1": 3 * CHUNK, "l2": 0, "computed": 9, "avoidable": 0,
    }  # fmt: skip
    (load,) = found["loads"]
    assert (load["rank"], load["loads"], load["outcome"], load["bytes"]) == (0, 1, "done", 3 * worker.chunk_bytes)
    assert load["seconds"] == pytest.approx(load["queue_seconds"] + load["copy_seconds"])
    assert load["seconds"] >= load["copy_seconds"] > 0
    assert found["waits"]["lookups"] == 1
    assert found["waits"]["first_lookup_to_load_seconds"] > 0
    assert found["namespace"]
    assert worker.registered is not None
    assert worker.registered.namespace.startswith(found["namespace"])


def test_an_evicted_chunk_is_explained_by_when_and_what_would_have_kept_it(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon(l1_size="1MiB")
    worker = make_worker(daemon)
    keys = stored(worker, 8)

    def evictions() -> int:
        worker.store(make_keys(4), worker.blocks_for(4))
        return int(daemon.status()["l1"]["evictions"])

    wait_until(lambda: evictions() >= 3, what="chunks are evicted")
    left = worker.lookup(keys, "late", tokens=8 * CHUNK)
    assert left < 8
    worker.end_request("late", prompt_tokens=8 * CHUNK, loaded_tokens=0)
    found = explained(daemon, "late", outcome="not_loaded" if left else "miss")
    missing = found["missing"]
    assert (missing["chunk"], missing["token"], missing["reason"]) == (left, left * CHUNK, "evicted")
    assert 0 <= missing["evicted_seconds_before"] < 60
    assert found["missed_tokens"] == {"evicted": (8 - left) * CHUNK}
    assert found["tokens"]["avoidable"] == found["tokens"]["computed"] - 1 == 8 * CHUNK - 1
    assert "--l1-size" in found["advice"][-1]


def test_a_chunk_on_its_way_is_filling(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon(pauses=True)
    worker = make_worker(daemon)
    keys = make_keys(2)
    with daemon.paused_copies():
        store = worker.begin_store(keys, worker.blocks_for(2))
        for _ in range(2):  # a lookup that may wait for the store is over when the request waits or asks again
            assert worker.lookup(keys, "early", tokens=2 * CHUNK) == 0
        found = explained(daemon, "early", outcome="running")
        assert found["missing"] == {"chunk": 0, "token": 0, "reason": "filling", "evicted_seconds_before": None}
        assert found["missed_tokens"] == {"filling": 2 * CHUNK}
        assert "on its way" in found["verdict"]
    assert store.reply() == Stored(stored=2, skipped=0)
    assert worker.lookup(keys, "early", tokens=2 * CHUNK) == 2, "the request waited, and asks again"
    found = explained(daemon, "early", missing=None)
    assert found["waits"]["lookups"] == 3


def test_another_namespace_names_the_fields_that_differ_and_no_secret(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    secrets = [(Counted("config.salt", digest=text, value=""),) for text in ("salt-of-a", "salt-of-b")]
    worker = make_worker(daemon, identity=identity() + secrets[0], instance_id="has-it")
    keys = stored(worker, 3)
    other = make_worker(daemon, identity=identity(dtype="float16") + secrets[1], layout="HND", instance_id="asks")
    assert other.lookup(keys, "r", tokens=3 * CHUNK) == 0
    other.end_request("r", prompt_tokens=3 * CHUNK)
    found = explained(daemon, "r", outcome="miss")
    assert found["missing"]["reason"] == "other_namespace"
    differs = found["differs"]
    assert differs["known"]
    assert differs["instances"] == ["has-it"]
    shown = {field["name"]: (field["here"], field["there"]) for field in differs["fields"]}
    assert shown.keys() == {"config.salt", "dtype", "layout"}
    assert shown["dtype"] == ("float16", "bfloat16")
    assert shown["config.salt"][0] != shown["config.salt"][1]
    assert "dtype is float16 here and bfloat16 there" in found["verdict"]
    assert found["tokens"]["avoidable"] == 3 * CHUNK - 1
    body = daemon.http("/explain")[1] + daemon.http("/explain?request_id=r")[1]
    assert "salt-of" not in body


@pytest.mark.parametrize(
    ("here", "there", "field"),
    [
        ("0a/aa", "0a/bb", "LoRA"),
        ("0a", "0b", "weights epoch"),
        ("0a/aa", "0a", "LoRA"),
    ],
)
def test_a_variant_that_differs_is_named(
    make_daemon: MakeDaemon, make_worker: MakeWorker, here: str, there: str, field: str
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys = make_keys(1)
    worker.store(keys, worker.blocks_for(1), variant=there)
    assert worker.lookup(keys, "r", variant=here) == 0
    found = explained(daemon, "r")
    assert [f["name"] for f in found["differs"]["fields"]] == [field]


def test_the_namespace_of_a_disconnected_engine_is_remembered(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    first = make_worker(daemon)
    keys = stored(first, 1)
    first.unregister()
    second = make_worker(daemon, identity=identity(kv_dtype="fp8"))
    assert second.lookup(keys, "r") == 0
    assert [f["name"] for f in explained(daemon, "r")["differs"]["fields"]] == ["kv_dtype"]


def test_miss_of_an_instance_with_missing_ranks_is_explained_by_the_ranks(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon, world_size=2, instance_id="half")
    assert worker.lookup(make_keys(2), "r") == 0
    found = explained(daemon, "r")
    assert (found["missing"]["reason"], found["missed_tokens"]) == ("unavailable", {"unavailable": 2 * CHUNK})
    assert found["unavailable"] == "1 of 2 ranks of 'half' are registered"
    assert found["unavailable"] in found["verdict"]


def test_a_new_prompt_was_never_stored_and_nothing_of_it_could_be_avoided(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    known = stored(worker, 2)
    assert worker.lookup([*known, *make_keys(2)], "r", tokens=4 * CHUNK) == 2
    assert worker.load(known, worker.blocks_for(2), request_id="r") == Retrieved(chunks=2)
    worker.end_request("r", prompt_tokens=4 * CHUNK, loaded_tokens=2 * CHUNK, loads=1)
    found = explained(daemon, "r", outcome="partial")
    assert (found["missing"]["chunk"], found["missing"]["reason"]) == (2, "never_stored")
    assert (found["tokens"]["computed"], found["tokens"]["avoidable"]) == (2 * CHUNK, 0)
    assert found["verdict"].startswith("128 of 256 prompt tokens were computed: chunk 2 on was never stored")


def test_tokens_behind_the_last_whole_chunk_are_missed_as_partial_chunk(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys = stored(worker, 1)
    assert worker.lookup(keys, "longer", tokens=CHUNK + 40) == 1
    found = explained(daemon, "longer")
    assert (found["missing"]["chunk"], found["missing"]["token"]) == (1, CHUNK)
    assert found["missed_tokens"] == {"partial_chunk": 40}
    worker.end_request("short", prompt_tokens=40)
    found = explained(daemon, "short", outcome="no_lookup")
    assert (found["missing"]["reason"], found["missed_tokens"]) == ("partial_chunk", {"partial_chunk": 40})
    assert found["waits"]["lookups"] == 0


def test_a_load_that_was_refused_is_a_failed_load_with_its_code(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys = stored(worker, 2)
    assert worker.lookup(keys, "r", tokens=2 * CHUNK) == 2
    worker.ask(Clear(), Cleared)
    assert worker.error_of(worker.load_message(keys, worker.blocks_for(2), request_id="r")).code == "not_found"
    worker.end_request("r", prompt_tokens=2 * CHUNK, loads=1, failed_loads=1)
    tokens = {
        "prompt": 2 * CHUNK, "looked_up": 2 * CHUNK, "found": 2 * CHUNK, "l0": 0, "l1": 0, "l2": 0,
        "computed": 2 * CHUNK, "avoidable": 2 * CHUNK - 1,  # vLLM computes the last token in any case
    }  # fmt: skip
    found = explained(daemon, "r", outcome="load_failed", tokens=tokens)
    assert found["failure"] == "not_found"
    assert [load["outcome"] for load in found["loads"]] == ["not_found"]
    assert "--lease-seconds" in found["advice"][0]


def test_a_load_that_was_late_is_a_failed_load_of_that_rank(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    names = {"instance_id": "two", "incarnation": "one", "world_size": 2}
    ranks = [make_worker(daemon, rank=rank, **names) for rank in range(2)]
    keys = make_keys(1)
    for rank in ranks:
        rank.store(keys, rank.blocks_for(1))
    assert ranks[0].lookup(keys, "r") == 1
    assert ranks[0].load(keys, ranks[0].blocks_for(1), request_id="r") == Retrieved(chunks=1)
    late = ranks[1].load_message(keys, ranks[1].blocks_for(1), request_id="r", deadline_ns=time.monotonic_ns())
    assert ranks[1].error_of(late).code == "late"
    found = explained(daemon, "r", outcome="load_failed")
    assert [(load["rank"], load["outcome"]) for load in found["loads"]] == [(0, "done"), (1, "late")]
    assert "on rank 1 (late)" in found["verdict"]


def test_request_that_did_not_load_its_hit_is_explained_as_not_loaded(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys = stored(worker, 2)
    assert worker.lookup(keys, "r", tokens=2 * CHUNK + 5) == 2
    worker.end_request("r", prompt_tokens=2 * CHUNK + 5, local_tokens=CHUNK)
    found = explained(daemon, "r", outcome="not_loaded")
    assert found["tokens"]["avoidable"] == CHUNK
    assert worker.lookup(keys, "own", tokens=2 * CHUNK + 5) == 2
    worker.end_request("own", prompt_tokens=2 * CHUNK + 5, local_tokens=2 * CHUNK)
    assert explained(daemon, "own", outcome="hit")["tokens"]["avoidable"] == 0


def test_an_older_engine_that_reports_no_tokens_is_explained_by_its_lookup(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys = stored(worker, 2)
    assert worker.lookup(keys, "old") == 2
    worker.end_request("old")
    found = explained(daemon, "old", outcome="found")
    assert (found["tokens"]["l0"], found["tokens"]["computed"]) == (None, None)
    assert worker.lookup(keys, "named") == 2
    worker.load(keys, worker.blocks_for(2), request_id="named")
    worker.end_request("named")
    assert explained(daemon, "named", outcome="hit")["tokens"]["l1"] == 2 * CHUNK


def test_a_request_whose_engine_died_does_not_stay_running(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    dies, leaves = make_worker(daemon), make_worker(daemon)
    for worker in (dies, leaves):
        worker.lookup(make_keys(1), f"of-{worker is dies}")
    assert explained(daemon, "of-True")["outcome"] == "running"
    dies.hang_up()
    explained(daemon, "of-True", outcome="instance_died")
    leaves.unregister()
    explained(daemon, "of-False", outcome="instance_left")
