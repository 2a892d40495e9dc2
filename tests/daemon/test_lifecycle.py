"""What a daemon reports of lifetimes in L0 and L1, of misses and of savings: real messages in, `/metrics` and `/status` out."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence

import pytest
from support.block_lifetimes import SECOND, accessed, allocated, cleared, evicted, owned, present, released
from support.daemon import wait_until
from support.memory import awkward
from support.server import L1_BYTES, PAGE_BYTES, running_server
from support.worker import Worker, ids, make_keys, packed

from kvserver._native import CpuDevice, HostRegion
from kvserver.cache import MissReason
from kvserver.copy import Devices
from kvserver.events import L1Cleared
from kvserver.protocol import (
    MARK,
    Error,
    ExactRecords,
    Owned,
    Released,
    ReportedBlocks,
)


def samples(daemon, worker: Worker) -> dict[str, float]:
    """Samples of the worker's instance by name; of labels but its own, `name{label="value"}`."""
    code, text = daemon.http("/metrics")
    assert code == 200
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        of = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if of.pop("instance_id", None) == worker.instance_id:
            assert of.pop("model_name") == worker.model_name
            rest = ",".join(f'{label}="{text}"' for label, text in of.items())
            found[name + (f"{{{rest}}}" if rest else "")] = float(value)
    return found


class Pool:
    """What the block pool of one worker's instance did, as it is reported, and when."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.now = time.monotonic_ns()

    def report(self, *records: Sequence[int], seconds: float = 0.0, full: bool = False) -> int:
        """What the pool did, so many seconds after what was before. The message's number."""
        self.now += int(seconds * SECOND)
        raw = ids(itertools.chain(*records))
        return self.worker.report(ExactRecords(raw, MARK.pack(0, self.now) if records else b"", full=full))

    def reported(self, *records: Owned | Released, seconds: float = 0.0, full: bool = False) -> int:
        self.now += int(seconds * SECOND)
        return self.worker.report(ReportedBlocks(self.now, 16, list(records), full=full))

    def refused(self, number: int) -> str:
        answer = self.worker.reply_to(number, 5)
        assert isinstance(answer, Error)
        return answer.code


@pytest.fixture
def all_sampled(make_daemon):
    return make_daemon(metrics_sample_rate=1.0)


# ---- L0 ---------------------------------------------------------------------------------------


def test_a_block_lifetime_is_reported_with_its_times(all_sampled, make_worker):
    worker = make_worker(all_sampled)
    pool = Pool(worker)
    pool.report(full=True)
    pool.report(allocated(3))
    pool.report(released(3), seconds=2)
    pool.report(accessed(3), seconds=4)
    pool.report(released(3), seconds=1)
    pool.report(evicted(3), seconds=5)
    wait_until(lambda: samples(all_sampled, worker).get("kvserver_l0_evictions_total") == 1)
    found = samples(all_sampled, worker)
    histograms = {"lifetime": 12, "idle_before_evict": 5, "since_last_access": 6, "reuse_gap": 6}
    for name, seconds in histograms.items():
        assert found[f"kvserver_l0_block_{name}_seconds_count"] == 1
        assert found[f"kvserver_l0_block_{name}_seconds_sum"] == pytest.approx(seconds)
    assert found["kvserver_l0_reuses_total"] == found["kvserver_l0_allocations_total"] == 1
    (instance,) = all_sampled.status()["instances"]
    assert instance["l0_source"] == instance["l0"]["source"] == "exact"
    for name in ("allocations", "reuses", "evictions", "recycled", "cleared", "lost", "records", "report_gaps"):
        assert instance["l0"][name] == found[f"kvserver_l0_{name}_total"], name
    for name in ("active_blocks", "released_blocks", "tracked_blocks", "unsure"):
        assert instance["l0"][name] == found[f"kvserver_l0_{name}"], name


def test_a_block_id_beyond_the_engines_blocks_is_refused(all_sampled, make_worker):
    worker = make_worker(all_sampled, geometry=awkward(64))
    pool = Pool(worker)
    assert pool.refused(pool.report(allocated(64), full=True)) == "bad_records"
    pool.report(allocated(63), full=True)
    wait_until(lambda: samples(all_sampled, worker).get("kvserver_l0_allocations_total") == 1)


def test_a_gap_ends_lifetimes_as_lost_and_requests_the_full_state(all_sampled, make_worker):
    worker = make_worker(all_sampled)
    pool = Pool(worker)
    pool.report(allocated(1), allocated(2), full=True)
    worker.end_message()  # is lost
    assert pool.refused(pool.report(evicted(1))) == "report_gap"
    wait_until(lambda: samples(all_sampled, worker).get("kvserver_l0_lost_total") == 2)
    found = samples(all_sampled, worker)
    assert (found["kvserver_l0_evictions_total"], found["kvserver_l0_report_gaps_total"]) == (0, 1)
    assert (found["kvserver_l0_unsure"], found["kvserver_l0_active_blocks"]) == (1, 0)
    pool.report(present(2), owned(2), full=True)
    wait_until(lambda: samples(all_sampled, worker)["kvserver_l0_unsure"] == 0)
    assert samples(all_sampled, worker)["kvserver_l0_active_blocks"] == 1
    pool.report(released(2), evicted(2), seconds=1)
    wait_until(lambda: samples(all_sampled, worker)["kvserver_l0_evictions_total"] == 1)
    assert "kvserver_l0_block_lifetime_seconds_count" not in {
        name for name, value in samples(all_sampled, worker).items() if value
    }, "it is not known when that lifetime began"


def test_an_engine_that_reports_has_owners_and_contents(all_sampled, make_worker):
    worker = make_worker(all_sampled)
    pool = Pool(worker)
    first, second = bytes(range(8)), bytes(range(8, 16))
    pool.reported(full=True)
    pool.reported(Owned("a", 0, 0, packed([1, 2]), 2, contents=first))  # block 2 is partial
    pool.reported(Owned("b", 0, 0, packed([1]), 1, contents=first))  # a co-owner
    pool.reported(Owned("a", 0, 1, packed([2]), 1, contents=second))  # it fills
    pool.reported(Released("a", packed([2]), 1), seconds=1)
    worker.end_request("a")
    worker.end_request("b")
    pool.reported(Owned("c", 0, 0, packed([1]), 1, contents=second), seconds=3)  # other content
    wait_until(lambda: samples(all_sampled, worker).get("kvserver_l0_evictions_total") == 1)
    found = samples(all_sampled, worker)
    assert found["kvserver_l0_allocations_total"] == 3
    assert found["kvserver_l0_shared_accesses_total"] == 1
    assert (found["kvserver_l0_active_blocks"], found["kvserver_l0_released_blocks"]) == (1, 1)
    assert all_sampled.status()["instances"][0]["l0_source"] == "reported"


def test_report_of_owners_by_an_exact_instance_is_refused(all_sampled, make_worker):
    worker = make_worker(all_sampled)
    pool = Pool(worker)
    pool.report(allocated(1), full=True)
    refused = pool.reported(Owned("a", 0, 0, packed([1]), 1), full=True)
    assert pool.refused(refused) == "bad_records"
    (instance,) = all_sampled.status()["instances"]
    assert (instance["l0_source"], instance["l0"]["refused_reports"]) == ("exact", 1)


@pytest.mark.parametrize(
    "record",
    [
        Owned("a", 0, 0, packed([1, 2]), 3),
        Owned("a", 0, 0, b"\xff\xff\xff", 1),
        Owned("a", 0, 0, packed([64]), 1),
        Owned("a", 0, 0, packed([1]), 1, contents=bytes(16)),
        Owned("a", 0, 0, packed([1]), 1, contents=bytes(7)),
        Owned("a", 0, 0, packed([1]), 1, tokens=bytes(4 * 17)),
    ],
)
def test_reported_blocks_that_make_no_sense_are_refused(all_sampled, make_worker, record):
    worker = make_worker(all_sampled, geometry=awkward(64))
    pool = Pool(worker)
    assert pool.refused(pool.reported(record, full=True)) == "bad_records"
    worker.round_trip()


def test_a_few_bytes_cannot_make_the_loop_unpack_a_million_blocks(all_sampled, make_worker):
    worker = make_worker(all_sampled)
    pool = Pool(worker)
    run = Owned("a", 0, 0, packed(range(1, 1 << 20)), (1 << 20) - 1)
    assert len(run.block_ids) < 20
    answer = worker.reply_to(pool.reported(*[run] * 1000, full=True), 5)
    assert isinstance(answer, Error)
    assert "at most 65536; split it" in answer.message
    worker.round_trip()


def test_a_killed_engine_does_not_disturb_another_with_the_same_blocks_and_requests(all_sampled, make_worker):
    pools = [Pool(make_worker(all_sampled)), Pool(make_worker(all_sampled))]
    for pool in pools:
        pool.report(full=True)
        pool.report(allocated(1), allocated(2))
    dies, stays = pools
    wait_until(lambda: samples(all_sampled, stays.worker).get("kvserver_l0_active_blocks") == 2)
    dies.worker.end_request("same request")
    dies.worker.hang_up()
    wait_until(lambda: samples(all_sampled, dies.worker)["kvserver_l0_lost_total"] == 2)
    assert samples(all_sampled, dies.worker)["kvserver_l0_tracked_blocks"] == 0
    stays.report(released(1), evicted(1), seconds=7)
    wait_until(lambda: samples(all_sampled, stays.worker)["kvserver_l0_evictions_total"] == 1)
    found = samples(all_sampled, stays.worker)
    assert (found["kvserver_l0_active_blocks"], found["kvserver_l0_lost_total"]) == (1, 0)
    assert found["kvserver_l0_block_lifetime_seconds_sum"] == pytest.approx(7)


def test_a_cleared_engine_ends_its_lifetimes_without_evictions(all_sampled, make_worker):
    worker = make_worker(all_sampled)
    pool = Pool(worker)
    pool.report(allocated(1), released(1), cleared(), full=True)
    wait_until(lambda: samples(all_sampled, worker).get("kvserver_l0_cleared_total") == 1)
    found = samples(all_sampled, worker)
    assert (found["kvserver_l0_evictions_total"], found["kvserver_l0_tracked_blocks"]) == (0, 0)


# ---- L1, misses, savings ----------------------------------------------------------------------


def missed(daemon, worker: Worker) -> dict[str, int]:
    found = next(i for i in daemon.status()["instances"] if i["instance_id"] == worker.instance_id)
    return {reason: tokens for reason, tokens in found["requests"]["missed_tokens"].items() if tokens}


def test_missed_tokens_are_counted_by_what_became_of_the_first_missing_chunk(make_daemon, make_worker):
    daemon = make_daemon(l1_size="1MiB")
    worker, stranger = make_worker(daemon), make_worker(daemon)
    tokens = worker.chunk_blocks * 16
    worker.lookup(make_keys(3, "never"))
    assert missed(daemon, worker) == {"never_stored": 3 * tokens}
    keys = make_keys(2, "kept")
    worker.store(keys, worker.blocks_for(2))
    worker.lookup(keys, variant="elsewhere")
    assert missed(daemon, worker)["other_namespace"] == 2 * tokens
    worker.lookup([*keys, *make_keys(1, "more")], tokens=3 * tokens + 5)
    assert missed(daemon, worker)["never_stored"] == 4 * tokens
    assert missed(daemon, worker)["partial_chunk"] == 5
    assert missed(daemon, stranger) == {}


def test_tokens_of_an_evicted_chunk_are_missed_as_evicted(make_daemon, make_worker):
    daemon = make_daemon(l1_size="1MiB", metrics_sample_rate=1.0)
    worker = make_worker(daemon)
    old = make_keys(1, "old")
    worker.store(old, worker.blocks_for(1))
    wait_until(
        lambda: worker.store(make_keys(1), worker.blocks_for(1)) and daemon.status()["l1"]["evictions"],
        what="an eviction",
    )
    assert worker.lookup(old) == 0
    assert missed(daemon, worker) == {"evicted": worker.chunk_blocks * 16}
    l1 = daemon.status()["l1"]
    assert l1["evicted_bytes"] >= worker.chunk_bytes
    wait_until(lambda: samples(daemon, worker).get("kvserver_l1_chunk_residency_seconds_count") == l1["evictions"])
    found = samples(daemon, worker)
    assert found["kvserver_l1_chunk_idle_before_evict_seconds_count"] == l1["evictions"]
    assert found['kvserver_lookup_missed_tokens_total{reason="evicted"}'] == worker.chunk_blocks * 16
    assert {f'kvserver_lookup_missed_tokens_total{{reason="{reason.value}"}}' for reason in MissReason} <= found.keys()


def test_a_chunk_on_its_way_counts_as_filling_and_half_an_instance_as_unavailable(make_daemon, make_worker):
    daemon = make_daemon(pauses=True)
    worker = make_worker(daemon)
    keys = make_keys(1)
    with daemon.paused_copies():
        store = worker.begin_store(keys, worker.blocks_for(1))
        wait_until(lambda: daemon.status()["l1"]["chunks"] == 1)
        assert worker.lookup(keys) == 0
        worker.end_request()  # it does not wait for the store
        wait_until(lambda: missed(daemon, worker) == {"filling": worker.chunk_blocks * 16})
    store.reply()
    half = make_worker(daemon, world_size=2)
    assert half.lookup(keys) == 0
    assert missed(daemon, half) == {"unavailable": worker.chunk_blocks * 16}


def test_a_load_saves_tokens_and_seconds_by_the_engines_speed(make_daemon, make_worker):
    daemon = make_daemon(metrics_sample_rate=1.0)
    worker = make_worker(daemon)
    keys, blocks = make_keys(3), worker.blocks_for(3)
    worker.store(keys, blocks)
    worker.store(keys, blocks)
    worker.load(keys, blocks)
    tokens = 3 * worker.chunk_blocks * 16
    assert samples(daemon, worker)["kvserver_saved_prefill_tokens_total"] == tokens
    assert samples(daemon, worker)["kvserver_saved_prefill_seconds_total"] == 0
    worker.end_request(prefill_tokens_per_second=1000.0)
    worker.load(keys, blocks)
    wait_until(lambda: samples(daemon, worker).get("kvserver_l1_hit_age_seconds_count") == 6)
    found = samples(daemon, worker)
    assert found["kvserver_saved_prefill_tokens_total"] == 2 * tokens
    assert found["kvserver_saved_prefill_seconds_total"] == pytest.approx(tokens / 1000)
    assert found["kvserver_l1_chunk_reuse_gap_seconds_count"] == 6
    assert found["kvserver_l1_stores_avoided_chunks_total"] == 3
    assert found["kvserver_l1_stored_chunks_total"] == 3


def test_the_counters_of_a_disconnected_engine_are_still_shown_and_go_on_when_it_returns(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon, instance_id="comes-back")
    worker.round_trip()
    before = samples(daemon, worker)["kvserver_store_bytes_total"]
    assert before > 0
    worker.close()
    wait_until(lambda: daemon.status()["departed"])
    assert daemon.status()["instances"] == []
    assert samples(daemon, worker)["kvserver_store_bytes_total"] == before
    again = make_worker(daemon, instance_id="comes-back")
    again.store(make_keys(1, "new"), again.blocks_for(1))
    assert samples(daemon, again)["kvserver_store_bytes_total"] > before
    assert daemon.status()["departed"] == []
    assert daemon.status()["totals"]["stored_bytes"] == samples(daemon, again)["kvserver_store_bytes_total"]


# ---- the bus ----------------------------------------------------------------------------------


def test_status_shows_the_bus(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    worker.round_trip()
    worker.error_of(worker.registration())
    events = daemon.status()["events"]
    assert events["published_types"]["LookupEnded"] > 0
    assert events["published_types"]["ErrorSent"] == 1
    assert events["dropped"] == 0
    assert [row["name"] for row in events["subscribers"]] == ["l0", "l1", "what_if", "kv_events", "explain", "ages"]


def die(event: object) -> None:
    raise SystemExit("no more")


def test_readyz_fails_when_the_event_thread_has_died():
    with running_server(Devices(CpuDevice(HostRegion(L1_BYTES), PAGE_BYTES, 1))) as (parts, _, pages, _):
        assert pages.not_ready() is None
        parts.observability.what_if.handle = die
        pages.ask(lambda: parts.bus.publish(L1Cleared(time.monotonic_ns(), b"")))
        assert "event thread" in wait_until(pages.not_ready)
        assert pages.snapshot()[0].ready is False
