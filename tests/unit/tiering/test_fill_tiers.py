"""Which tiers a fill looks into: those that machines share by a probe, and none that the engine may not use."""

from __future__ import annotations

import time
from functools import partial

from support.filling import filling, requests_of
from support.worker import make_keys

from kvserver.protocol import Durability, LookupReply
from kvserver.snapshots import instances_status


def test_what_another_daemon_wrote_to_a_shared_tier_is_found_at_the_first_lookup() -> None:
    with filling() as f:
        keys = make_keys(6)
        content = f.only_in_l2(keys)
        f.tier.shared, f.tier.known = True, set()
        assert f.lookup(keys).fill_chunks == 6, "what the tier has is not known"
        assert not f.gets()
        assert f.fill(keys) == 6
        assert f.loaded(keys) == content
        assert [kind for kind, _ in f.tier.began if kind == "probe"] == ["probe"]
        f.worker.end_request()
        f.audit()


def test_a_shared_tier_without_the_prompt_costs_one_probe() -> None:
    with filling() as f:
        f.tier.shared, f.tier.known = True, set()
        keys = make_keys(6)
        assert f.fill(keys) == 0
        assert [kind for kind, _ in f.tier.began] == ["probe"]
        assert requests_of(f).fills == 0
        f.audit()


def test_a_probe_that_hangs_ends_with_the_fills_time() -> None:
    with filling() as f:
        f.tier.shared, f.tier.known, f.tier.stopped, f.tier.hangs = True, set(), True, True
        keys = make_keys(6)
        began = time.monotonic()
        assert f.fill(keys, wait_ms=300) == 0
        assert 0.25 <= time.monotonic() - began < 5
        other = make_keys(2)
        f.store(other)
        assert f.lookup(other).hit_chunks == 2
        f.tier.hangs = False
        f.tier.release()
        f.audit()


def test_a_tier_that_failed_is_not_asked() -> None:
    with filling() as f:
        f.tier.shared, f.tier.known = True, set()
        f.tier.state, f.tier.failure = "unavailable", "it does not answer"
        keys = make_keys(2)
        assert f.lookup(keys).fill_chunks == 0
        assert f.fill(keys) == 0
        assert not f.tier.began


def test_tier_is_not_asked_for_kv_that_only_one_process_or_machine_can_find() -> None:
    with filling() as f:
        keys = make_keys(3)
        f.only_in_l2(keys)
        f.worker.durability = Durability.PROCESS
        f.tier.shared = True
        assert f.lookup(keys) == LookupReply(0)
        assert f.fill(keys) == 0
        f.worker.durability = Durability.MACHINE
        assert f.lookup(keys) == LookupReply(0), "machines share this tier"
        assert f.fill(keys) == 0
        assert {kind for kind, _ in f.tier.began} == {"put"}
        f.tier.shared = False
        assert f.fill(keys) == 3


def test_an_engine_that_must_stay_on_its_machine_reads_from_no_tier_of_many() -> None:
    with filling(connect_now=False) as f:
        f.worker.attach()
        f.worker.register(machine_only="samples of its files name them")
        keys = make_keys(3)
        f.only_in_l2(keys)
        f.tier.shared = True
        assert f.fill(keys) == 0
        assert {kind for kind, _ in f.tier.began} == {"put"}
        f.tier.shared = False
        assert f.fill(keys) == 3
        (status,) = f.running.call(partial(instances_status, f.running.parts))
        assert status.machine_only == "samples of its files name them"
