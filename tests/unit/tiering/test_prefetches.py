"""Prefetches over a tier whose reads a test holds up: how they end, and that requests come first."""

from __future__ import annotations

import pytest
from support.daemon import wait_until
from support.filling import FULL, WINDOW, Filling, filling, store_hybrid
from support.memory import two_groups
from support.server import L1_BYTES
from support.worker import make_keys

from kvserver.protocol import Durability
from kvserver.server import PinReport, PinRequest, PrefetchReports
from kvserver.tiering import MOST_PREFETCHES


def prepared(f: Filling, count: int = 4) -> list[bytes]:
    """Keys of chunks that the tier has and L1 lacks; the engine is described."""
    keys = make_keys(count)
    f.only_in_l2(keys)
    describe(f)
    return keys


def describe(f: Filling, durability: Durability = Durability.ANYWHERE) -> None:
    f.worker.send(f.worker.description(durability=durability))
    f.lookup(make_keys(1), "behind it")
    f.worker.end_request("behind it")


def reports(f: Filling) -> PrefetchReports:
    return PrefetchReports(f.running.parts.upkeep)


def prefetch(f: Filling, keys: list[bytes], seconds: float = 600) -> PinReport:
    def begin() -> PinReport:
        (instance,) = f.running.parts.instances.by_id.values()
        request = PinRequest(instance.described_prefix, instance.model_name, b"".join(keys), 1, (0,), seconds)
        return reports(f).begin(request)

    return f.running.call(begin)


def shown(f: Filling) -> list[PinReport]:
    return f.running.call(lambda: reports(f).all().prefetches)


def delete(f: Filling, id: str) -> PinReport:
    return f.running.call(lambda: reports(f).delete(id))


def ready(f: Filling) -> PinReport:
    """The one prefetch, once it reads nothing more."""
    return wait_until(lambda: next((each for each in shown(f) if each.ready_in_seconds == 0), None), what="all is read")


def test_a_prompt_is_in_l1_before_its_request_with_the_bytes_that_were_stored() -> None:
    with filling() as f:
        keys = make_keys(4)
        content = f.only_in_l2(keys)
        describe(f)
        begun = prefetch(f, keys)
        assert (begun.outcome, begun.tokens, begun.ready_in_seconds) == ("accepted", 4 * tokens(f), None), begun
        found = ready(f)
        assert (found.outcome, found.tokens, found.tiers) == ("accepted", 4 * tokens(f), ["l1"])
        reply = f.lookup(keys)
        assert (reply.hit_chunks, reply.fill_chunks) == (4, 0)
        assert f.loaded(keys) == content
        f.worker.end_request()
        f.audit()
        assert delete(f, found.id).outcome == "accepted"
        assert delete(f, found.id).outcome == "missing"
        f.audit()


def tokens(f: Filling) -> int:
    (instance,) = f.running.parts.instances.by_id.values()
    return instance.any_worker().spec.chunk_tokens


def test_a_known_rate_gives_the_time_until_it_is_ready() -> None:
    with filling() as f:
        keys = prepared(f)
        f.read_within(0.05, keys)
        f.worker.end_request("slow")
        f.forget_l1()
        f.tier.stopped = True
        begun = prefetch(f, keys)
        assert begun.ready_in_seconds is not None
        assert begun.ready_in_seconds > 0
        f.tier.release()
        ready(f)


def test_a_prompt_of_which_l2_has_the_beginning_is_clipped() -> None:
    with filling() as f:
        keys = prepared(f)
        found = prefetch(f, [*keys, *make_keys(2)])
        assert (found.outcome, found.tokens, found.reason) == (
            "clipped", 4 * tokens(f), "not_cached: 2 chunks at its end are not there",
        )  # fmt: skip
        ready(f)


def test_a_prompt_that_nothing_has_is_missing_and_keeps_no_prefetch() -> None:
    with filling() as f:
        prepared(f)
        for keys in (make_keys(4), []):
            assert prefetch(f, keys).outcome == "missing"
        assert shown(f) == []
        f.audit()


@pytest.mark.parametrize(("durability", "shared"), [(Durability.PROCESS, False), (Durability.MACHINE, True)])
def test_a_tier_is_not_read_for_keys_that_may_mean_other_kv_in_it(durability: Durability, shared: bool) -> None:
    with filling() as f:
        keys = prepared(f)
        f.tier.shared = shared
        describe(f, durability)
        assert prefetch(f, keys).outcome == "missing"
        assert f.gets() == []


def test_windows_come_with_the_boundary_that_needs_them() -> None:
    with filling(geometry=two_groups(), groups=(FULL, WINDOW)) as f:
        keys = make_keys(12)
        store_hybrid(f, keys, [4, 10])
        describe(f)
        assert prefetch(f, keys).tokens == 10 * tokens(f)
        ready(f)
        assert f.lookup(keys).hit_chunks == 10
        f.worker.end_request()
        f.audit()


@pytest.mark.parametrize("how", ["delete", "clear", "expiry", "weights", "engine"])
def test_an_end_during_the_reads_frees_all_that_was_reserved(how: str) -> None:
    with filling() as f:
        keys = prepared(f)
        f.tier.stopped = True
        begun = prefetch(f, keys, seconds=0.01 if how == "expiry" else 600)
        if how != "expiry":
            wait_until(lambda: len(f.tier.waiting) == 4)
        match how:
            case "delete":
                assert delete(f, begun.id).outcome == "accepted"
            case "clear":
                f.running.server.call(lambda: f.running.parts.upkeep.clear(b"", lambda *_: None))
            case "weights":
                f.worker.send(f.worker.description(variant="other"))
            case "engine":
                f.worker.close()
        wait_until(lambda: not shown(f), what="it has ended")
        f.tier.release()
        f.audit()
        assert f.bytes() == 0


def test_a_deleted_prefetch_leaves_its_chunks_to_eviction() -> None:
    with filling(l1_bytes=L1_BYTES) as f:
        keys = prepared(f)
        begun = prefetch(f, keys)
        ready(f)
        _press(f)
        assert f.lookup(keys, "kept").hit_chunks == 4
        f.worker.end_request("kept")
        delete(f, begun.id)
        _press(f)
        assert f.lookup(keys, "gone").hit_chunks == 0
        f.audit()


def _press(f: Filling) -> None:
    space = f.running.parts.cache.space
    before = f.running.call(lambda: space.evicted_chunks)
    while f.running.call(lambda: space.evicted_chunks) < before + 60:
        f.store(make_keys(15))


def test_prefetches_use_half_of_the_bound_and_are_clipped_beyond_it() -> None:
    with filling(l1_bytes=L1_BYTES) as f:
        chunks = 30
        keys = prepared(f, chunks)
        begun = prefetch(f, keys)
        bound = L1_BYTES * 3 // 4
        assert begun.outcome == "clipped", begun
        assert begun.reason.startswith("no_room: ")
        assert 0 < begun.bytes <= bound // 2
        assert begun.bytes + begun.bytes // (begun.tokens // tokens(f)) > bound // 2, "one chunk more would fit"
        ready(f)
        assert prefetch(f, keys[::-1]).reason.startswith("no_room: ")
        assert f.bytes() <= bound // 2
        f.audit()


def test_a_request_that_needs_the_room_of_a_prefetch_gets_it() -> None:
    with filling(l1_bytes=L1_BYTES) as f:
        keys, others = prepared(f, 30), prepared(f, 30)
        prefetch(f, keys)
        size = ready(f).bytes
        assert size > 0
        within = L1_BYTES * 3 // 4 // (size // (shown(f)[0].tokens // tokens(f)))
        wanted = others[: min(30, within)]
        assert f.fill(wanted, wait_ms=10_000) == len(wanted)
        assert shown(f) == [], "its room was needed"
        f.worker.end_request()
        f.audit()


def test_a_request_that_fits_beside_a_prefetch_leaves_it() -> None:
    with filling() as f:
        keys, others = prepared(f), prepared(f)
        prefetch(f, keys)
        ready(f)
        assert f.fill(others) == len(others)
        assert len(shown(f)) == 1
        f.worker.end_request()
        f.audit()


def test_a_shared_tier_is_asked_first() -> None:
    with filling() as f:
        keys = prepared(f)
        f.tier.shared, f.tier.known, f.tier.stopped = True, set(), True
        begun = prefetch(f, keys)
        assert (begun.outcome, begun.reason.partition(":")[0]) == ("deferred", "asking")
        nothing = prefetch(f, make_keys(3))
        assert nothing.outcome == "deferred"
        f.tier.release()
        found = ready(f)
        wait_until(lambda: [each.id for each in shown(f)] == [begun.id], what="one found nothing")
        assert (found.outcome, found.id) == ("accepted", begun.id)
        assert f.lookup(keys).hit_chunks == 4
        f.worker.end_request()
        f.audit()


def test_only_so_many_prefetches_are_live() -> None:
    with filling() as f:
        keys = prepared(f, 1)
        for _ in range(MOST_PREFETCHES):
            assert prefetch(f, keys).outcome == "accepted"
        assert prefetch(f, keys).reason.startswith("too_many: ")
        delete(f, shown(f)[0].id)
        assert prefetch(f, keys).outcome == "accepted"


def test_a_daemon_that_stops_while_it_reads_waits_for_no_prefetch() -> None:
    with filling() as f:
        keys = prepared(f)
        f.tier.stopped = True
        prefetch(f, keys)
        wait_until(lambda: len(f.tier.waiting) == 4)
        f.running.call(f.running.parts.storage.end_fills)
        assert shown(f) == [] or shown(f)[0].ready_in_seconds == 0
        f.tier.release()
        f.audit()
