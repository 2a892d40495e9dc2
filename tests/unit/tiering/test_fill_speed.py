"""Reading or computing: what the engine computes sooner than its tier is read is not read."""

from __future__ import annotations

from support.daemon import wait_until
from support.filling import Filling, filling, requests_of
from support.worker import Worker, make_keys

from kvserver.l2 import TierOutcome
from kvserver.protocol import LookupReply


def slow_and_forgotten(f: Filling, seconds: float = 0.3) -> list[bytes]:
    """Chunks in a tier whose reads are known to take that long."""
    keys = make_keys(6)
    f.only_in_l2(keys)
    f.read_within(seconds, keys)
    f.worker.end_request("slow")
    f.forget_l1()
    return keys


def test_prompt_that_is_computed_sooner_is_not_read_from_l2() -> None:
    with filling() as f:
        keys = slow_and_forgotten(f)
        f.worker.end_request("before", prefill_tokens_per_second=1e6)
        wait_until(lambda: requests_of(f).ended_requests == 2)
        assert f.lookup(keys) == LookupReply(0)
        requests = requests_of(f)
        assert (requests.fills_not_begun, requests.missed_tokens["slow_l2"]) == (1, 6 * 64)
        assert f.fill(keys) == 0, "nor where the engine awaits it all the same"
        assert requests_of(f).fills_not_begun == 2
        assert len(f.gets()) == 6
        f.worker.end_request("later", prefill_tokens_per_second=10)
        wait_until(lambda: requests_of(f).ended_requests == 3)
        assert f.lookup(keys).fill_chunks == 6
        assert f.fill(keys) == 6
        f.audit()


def test_an_engine_of_unknown_speed_reads() -> None:
    with filling() as f:
        assert f.lookup(slow_and_forgotten(f)).fill_chunks == 6


def test_an_engine_that_has_just_started_is_as_fast_as_the_last_one_of_its_namespace() -> None:
    with filling() as f:
        keys = slow_and_forgotten(f)
        f.worker.end_request("before", prefill_tokens_per_second=1e6)
        wait_until(lambda: requests_of(f).ended_requests == 2)
        with Worker(f.running.endpoint) as restarted, Worker(f.running.endpoint, layout="other") as other:
            assert restarted.ask(restarted.lookup_message(keys), LookupReply) == LookupReply(0)
            blocks = other.blocks_for(6)
            other.store(keys, blocks)
            wait_until(lambda: len(f.tier.objects) == 12)
            f.forget_l1()
            assert other.ask(other.lookup_message(keys), LookupReply).fill_chunks == 6


def test_shared_tier_that_is_too_slow_is_not_asked() -> None:
    with filling() as f:
        keys = slow_and_forgotten(f)
        f.tier.shared, f.tier.known = True, set()
        f.worker.end_request("before", prefill_tokens_per_second=1e6)
        wait_until(lambda: requests_of(f).ended_requests == 2)
        assert f.lookup(keys) == LookupReply(0)
        f.worker.end_request("later", prefill_tokens_per_second=10)
        wait_until(lambda: requests_of(f).ended_requests == 3)
        assert f.lookup(keys).fill_chunks == 6


def test_fills_that_took_longer_than_expected_are_counted() -> None:
    with filling() as f:
        keys = slow_and_forgotten(f, seconds=0.0)
        before = requests_of(f).fills_slower
        f.read_within(1.5, keys, "again")  # the slowest of machines has read them in less, the first time
        assert requests_of(f).fills_slower == before + 1


def test_reads_that_fail_show_no_rate() -> None:
    with filling() as f:
        keys = make_keys(3)
        f.only_in_l2(keys)
        f.tier.fail = dict.fromkeys(keys, TierOutcome.CORRUPT)
        assert f.fill(keys) == 0
        (tier,) = f.running.call(f.running.parts.storage.spill.status)
        assert tier.read_bytes_per_second == 0
        assert f.fill(keys) == 3
        (tier,) = f.running.call(f.running.parts.storage.spill.status)
        assert tier.read_bytes_per_second > 0


def test_queued_reads_count_for_the_expected_time_of_later_fills() -> None:
    with filling() as f:
        keys = make_keys(6)
        f.only_in_l2(keys)
        size = sum(len(raw) for _, raw in f.tier.objects.values()) // 6

        def queued() -> int:
            return f.running.call(lambda: f.running.parts.storage.rates.queued_bytes)

        f.tier.stopped, f.tier.kept_waiting = True, {keys[5]}
        number = f.begin(keys)
        wait_until(lambda: len(f.tier.waiting) == 6)
        assert queued() == 6 * size
        f.tier.release()
        wait_until(lambda: len(f.tier.waiting) == 1)
        wait_until(lambda: queued() == size)
        f.worker.end_request()
        f.reply(number)
        assert queued() == 0
        f.audit()
