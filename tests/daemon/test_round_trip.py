"""Store, lookup, load: bytes in shared memory are the judge."""

from __future__ import annotations

import json

import pytest
from support.devices import on_each_device
from support.memory import Geometry, awkward
from support.registration import identity
from support.worker import make_keys

from kvserver.protocol import Clear, Cleared, Plane, Status, StatusReply, Stored
from kvserver.protocol.client import RequestFailed

pytestmark = on_each_device
WHOLE = Geometry(40, 16, sizes=(40 * 512,), planes=(Plane(0, 0, 512, 512),))


def test_what_was_stored_is_loaded_byte_for_byte_and_nothing_else_is_written(daemon, worker):
    keys = make_keys(3)
    source = worker.blocks_for(3, first=1)
    target = list(reversed(worker.blocks_for(3, first=30)))
    content = worker.memory.blocks(source)
    assert worker.store(keys, source) == Stored(stored=3, skipped=0)

    worker.memory.fill()
    expected = worker.memory.image_with(dict(zip(target, content, strict=True)))
    assert worker.lookup(keys) == 3
    assert worker.load(keys, target).chunks == 3
    assert worker.memory.image() == expected


@pytest.mark.parametrize("skip", [1, 2, 3])
def test_the_first_blocks_of_a_load_can_be_left_untouched(daemon, worker, skip):
    keys = make_keys(2)
    source = worker.blocks_for(2)
    content = worker.memory.blocks(source)
    worker.store(keys, source)

    target = worker.blocks_for(2, first=20)
    expected = worker.memory.image_with(dict(zip(target[skip:], content[skip:], strict=True)))
    worker.load(keys, target[skip:], skip=skip)
    assert worker.memory.image() == expected


def test_the_last_blocks_of_a_load_can_be_left_out(daemon, worker):
    keys = make_keys(2)
    source = worker.blocks_for(2)
    content = worker.memory.blocks(source)
    worker.store(keys, source)

    target = worker.blocks_for(2, first=20)[1:-2]
    expected = worker.memory.image_with(dict(zip(target, content[1:-2], strict=True)))
    worker.load(keys, target, skip=1)
    assert worker.memory.image() == expected


def test_one_chunk_in_the_middle_can_be_loaded_alone(daemon, worker):
    keys = make_keys(3)
    source = worker.blocks_for(3)
    worker.store(keys, source)
    target = worker.blocks_for(1, first=40)
    worker.load(keys[1:2], target)
    assert worker.memory.blocks(target) == worker.memory.blocks(source[4:8])


def test_a_lookup_right_after_the_stored_reply_always_hits(daemon, worker):
    for turn in range(300):
        keys = make_keys(1, seed=turn)
        worker.store(keys, worker.blocks_for(1))
        assert worker.lookup(keys) == 1, f"turn {turn}"


def test_lookup_counts_only_the_unbroken_prefix(daemon, worker):
    keys = make_keys(4)
    worker.store([keys[0], keys[1], keys[3]], worker.blocks_for(3))
    assert worker.lookup(keys) == 2
    assert worker.lookup(keys[3:]) == 1
    assert worker.lookup(make_keys(2)) == 0


def test_a_chunk_that_is_there_is_not_stored_again(daemon, worker):
    keys = make_keys(3)
    first = worker.memory.blocks(worker.blocks_for(1))
    worker.store(keys[:1], worker.blocks_for(1))
    assert worker.store(keys, worker.blocks_for(3, first=10)) == Stored(stored=2, skipped=1)
    target = worker.blocks_for(1, first=50)
    worker.load(keys[:1], target)
    assert worker.memory.blocks(target) == first


def test_stores_of_one_chunk_that_overlap_in_time_are_merged(make_daemon, make_worker):
    daemon = make_daemon(pauses=True)
    one, two = make_worker(daemon), make_worker(daemon)
    keys = make_keys(2)
    source = one.blocks_for(2)
    content = one.memory.blocks(source)
    with daemon.paused_copies():
        stores = []
        for worker in (one, two):
            stores.append(worker.begin_store(keys, source))
            worker.ask(Status(), StatusReply)  # the store has begun
    assert [store.reply() for store in stores] == [Stored(stored=2, skipped=0), Stored(stored=0, skipped=2)]
    two.load(keys, source)
    assert two.memory.blocks(source) == content


def test_two_engines_of_one_model_share_what_one_of_them_stored(daemon, make_worker):
    one, two = make_worker(daemon), make_worker(daemon)
    keys = make_keys(2)
    one.store(keys, one.blocks_for(2))
    assert two.lookup(keys) == 2
    two.load(keys, two.blocks_for(2, first=7))
    assert two.memory.blocks(two.blocks_for(2, first=7)) == one.memory.blocks(one.blocks_for(2))


def test_stored_chunks_outlive_the_engine_that_stored_them(daemon, make_worker):
    keys = make_keys(2)
    gone = make_worker(daemon)
    content = gone.memory.blocks(gone.blocks_for(2))
    gone.store(keys, gone.blocks_for(2))
    gone.unregister()
    fresh = make_worker(daemon)
    assert fresh.lookup(keys) == 2
    fresh.load(keys, fresh.blocks_for(2))
    assert fresh.memory.blocks(fresh.blocks_for(2)) == content


def test_engines_that_lay_the_same_blocks_out_differently_share_them(daemon, make_worker):
    """Strides, offsets and block counts do not change what a slot holds."""
    apart = Geometry(20, 16, sizes=(20 * 900 + 64,), planes=(Plane(0, 64, 900, 512),))
    one, two = make_worker(daemon, geometry=WHOLE), make_worker(daemon, geometry=apart)
    keys = make_keys(1)
    one.store(keys, one.blocks_for(1))
    expected = two.memory.image_with(dict(zip([9, 4, 7, 2], one.memory.blocks(one.blocks_for(1)), strict=True)))
    two.load(keys, [9, 4, 7, 2])
    assert two.memory.image() == expected


# ---- namespaces -------------------------------------------------------------------------------


def test_two_models_of_different_geometry_use_one_l1_for_the_same_keys(daemon, make_worker):
    large = make_worker(daemon, geometry=awkward(num_blocks=64, block_tokens=16))
    small = make_worker(daemon, geometry=awkward(num_blocks=48, block_tokens=32, scale=3))
    assert large.chunk_blocks != small.chunk_blocks
    keys = make_keys(5)
    for one in (large, small):
        assert one.store(keys, one.blocks_for(5)).stored == 5
    for one in (large, small):
        content = one.memory.blocks(one.blocks_for(5))
        target = one.blocks_for(5, first=25)
        one.load(keys, target)
        assert one.memory.blocks(target) == content
    assert daemon.status()["l1"]["chunks"] == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "test-model@4567"},
        {"overrides": '{"rope_theta": 1}'},
        {"dtype": "float16"},
        {"kv_dtype": "fp8"},
        {"quantization": "awq"},
        {"parallel": "tp=2,pp=1"},
        {"hash_algorithm": "xxhash"},
        {"private": "process-1"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_models_whose_identity_differs_share_nothing(daemon, make_worker, changes):
    one, two = make_worker(daemon), make_worker(daemon, identity=identity(**changes))
    keys = make_keys(1)
    one.store(keys, one.blocks_for(1))
    assert two.lookup(keys) == 0
    with pytest.raises(RequestFailed, match="not READY"):
        two.load(keys, two.blocks_for(1))
    assert one.lookup(keys) == 1
    namespaces = {instance["namespace"] for instance in daemon.status()["instances"]}
    assert len(namespaces) == 2


def test_models_whose_geometry_differs_share_nothing(daemon, make_worker):
    split = Geometry(40, 16, sizes=(40 * 512,), planes=(Plane(0, 0, 512, 256), Plane(0, 256, 512, 256)))
    one, two = make_worker(daemon, geometry=WHOLE), make_worker(daemon, geometry=split)
    keys = make_keys(1)
    one.store(keys, one.blocks_for(1))
    assert two.lookup(keys) == 0


def test_a_variant_is_a_namespace_of_its_own(daemon, worker):
    keys = make_keys(1)
    worker.store(keys, worker.blocks_for(1), variant="lora-a")
    assert worker.lookup(keys) == 0
    assert worker.lookup(keys, variant="lora-b") == 0
    assert worker.lookup(keys, variant="lora-a") == 1
    worker.store(keys, worker.blocks_for(1, first=20))
    target = worker.blocks_for(1, first=40)
    worker.load(keys, target, variant="lora-a")
    assert worker.memory.blocks(target) == worker.memory.blocks(worker.blocks_for(1))
    worker.load(keys, target)
    assert worker.memory.blocks(target) == worker.memory.blocks(worker.blocks_for(1, first=20))


# ---- ranks ------------------------------------------------------------------------------------


def test_a_chunk_of_two_ranks_is_found_only_when_both_have_stored_it(daemon, make_worker):
    same = {"instance_id": f"pair-{make_keys(1)[0].hex()[:8]}", "incarnation": "a", "world_size": 2}
    keys = make_keys(2)
    zero = make_worker(daemon, rank=0, **same)
    assert zero.registered.namespace == ""
    assert zero.lookup(keys) == 0
    refused = zero.error_of(zero.store_message(keys, zero.blocks_for(2)))
    assert (refused.code, refused.message[:12]) == ("not_ready", "1 of 2 ranks")

    one = make_worker(daemon, rank=1, geometry=awkward(num_blocks=64, scale=2), **same)
    assert one.registered.namespace != ""
    assert zero.lookup(keys) == 0
    zero.store(keys, zero.blocks_for(2))
    assert zero.lookup(keys) == 0
    one.store(keys[:1], one.blocks_for(1))
    assert zero.lookup(keys) == 1
    one.store(keys[1:], one.blocks_for(1, first=9))
    assert zero.lookup(keys) == 2

    target = zero.blocks_for(2, first=30)
    expected = zero.memory.blocks(zero.blocks_for(2)), one.memory.blocks([*one.blocks_for(1), *one.blocks_for(1, 9)])
    zero.load(keys, target)
    one.load(keys, target)
    assert (zero.memory.blocks(target), one.memory.blocks(target)) == expected


def test_the_reply_to_ranks_that_disagree_names_the_field(daemon, make_worker):
    same = {"instance_id": "disagree", "incarnation": "a", "world_size": 2}
    zero = make_worker(daemon, rank=0, **same)
    one = make_worker(daemon, rank=1, connect_now=False, **same)
    one.attach()
    for changes, words in [
        ({"counted": identity(dtype="float16")}, "rank 1 states dtype='float16', rank 0 states 'bfloat16'"),
        ({"model_name": "other"}, "rank 1 states model_name='other', rank 0 states 'test/model'"),
        ({"world_size": 3}, "rank 1 states world_size=3, rank 0 states 2"),
        ({"num_blocks": 63}, "rank 1 states num_blocks=63, rank 0 states 64"),
    ]:
        error = one.error_of(one.registration(**changes))
        assert (error.code, error.message) == ("ranks_disagree", words)
    assert one.connect().registered.namespace != ""
    zero.hang_up()
    one.hang_up()


def test_a_rank_may_come_back_after_its_connection_ended(daemon, make_worker):
    same = {"instance_id": "comes-back", "incarnation": "a", "world_size": 2}
    keys = make_keys(1)
    zero, one = make_worker(daemon, rank=0, **same), make_worker(daemon, rank=1, **same)
    for each in (zero, one):
        each.store(keys, each.blocks_for(1))
    one.hang_up()
    daemon.wait_for_accounting(attachments=1)
    assert zero.lookup(keys) == 0
    again = make_worker(daemon, rank=1, **same)
    assert zero.lookup(keys) == 1
    assert again.number != one.number
    assert one.error_of(one.store_message(keys, one.blocks_for(1))).code == "stale_registration"
    content = one.memory.blocks(one.blocks_for(1))
    again.load(keys, again.blocks_for(1, first=17))
    assert again.memory.blocks(again.blocks_for(1, first=17)) == content


def test_a_rank_that_comes_back_otherwise_takes_the_variants_along(daemon, make_worker):
    """Their KV has the geometry that the ranks had before."""
    same = {"instance_id": "comes-back-otherwise", "incarnation": "a", "world_size": 2}
    keys = make_keys(1)
    zero, one = make_worker(daemon, rank=0, **same), make_worker(daemon, rank=1, **same)
    for each in (zero, one):
        each.store(keys, each.blocks_for(1), variant="lora")
    assert zero.lookup(keys, variant="lora") == 1
    one.hang_up()
    daemon.wait_for_accounting(attachments=1)
    again = make_worker(daemon, rank=1, geometry=awkward(scale=2), **same)
    assert zero.lookup(keys, variant="lora") == 0
    for each in (zero, again):
        each.store(keys, each.blocks_for(1), variant="lora")
    content = again.memory.blocks(again.blocks_for(1))
    again.load(keys, again.blocks_for(1, first=17), variant="lora")
    assert again.memory.blocks(again.blocks_for(1, first=17)) == content


# ---- clear ------------------------------------------------------------------------------------


def test_clear_forgets_everything(daemon, make_worker):
    one, two = make_worker(daemon), make_worker(daemon, identity=identity(model="b"))
    keys = make_keys(3)
    for each in (one, two):
        each.store(keys, each.blocks_for(3))
    assert one.ask(Clear(), Cleared).chunks == 6
    assert one.lookup(keys) == two.lookup(keys) == 0
    daemon.wait_for_accounting(used_pages=0, pins=0)
    assert one.store(keys, one.blocks_for(3)).stored == 3


def test_clear_of_an_instance_leaves_other_models_alone(daemon, make_worker):
    one, two = make_worker(daemon), make_worker(daemon, identity=identity(model="b"))
    keys = make_keys(3)
    for each in (one, two):
        each.store(keys, each.blocks_for(3))
    one.store(keys[:2], one.blocks_for(2), variant="lora")
    assert two.ask(Clear(instance_id=one.instance_id, shared=True), Cleared).chunks == 5
    assert one.lookup(keys) == 0
    assert one.lookup(keys, variant="lora") == 0
    assert two.lookup(keys) == 3


def test_clear_over_http_reports_how_many_chunks_it_forgot(daemon, worker):
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    code, body = daemon.http("/cache/clear", "POST")
    assert (code, json.loads(body)["chunks"]) == (200, 3)
    assert worker.lookup(keys) == 0


def test_a_store_that_was_running_when_the_cache_was_cleared_publishes_nothing(make_daemon, make_worker):
    daemon = make_daemon(pauses=True)
    worker = make_worker(daemon)
    keys = make_keys(3)
    with daemon.paused_copies():
        store = worker.begin_store(keys, worker.blocks_for(3))
        worker.ask(Clear(), Cleared)  # which follows the store on its connection, so it finds it running
    store.reply()
    assert worker.lookup(keys) == 0
    daemon.wait_for_accounting(tickets=0, pins=0, used_pages=0)


def test_a_load_that_was_running_when_the_cache_was_cleared_is_whole(make_daemon, make_worker):
    daemon = make_daemon(pauses=True)
    worker = make_worker(daemon)
    keys = make_keys(3)
    content = worker.memory.blocks(worker.blocks_for(3))
    worker.store(keys, worker.blocks_for(3))
    target = worker.blocks_for(3, first=30)
    with daemon.paused_copies():
        load = worker.begin_load(keys, target)
        worker.ask(Clear(), Cleared)
        others = make_keys(3)
        store = worker.begin_store(others, worker.blocks_for(3, first=15))  # must not get the pages that are being read
        worker.ask(Status(), StatusReply)
    store.reply()
    load.reply()
    assert worker.memory.blocks(target) == content
    daemon.wait_for_accounting(tickets=0, pins=0)
    assert (worker.lookup(keys), worker.lookup(others)) == (0, 3)


# ---- when L1 is full --------------------------------------------------------------------------

CHUNK = Geometry(200, 16, sizes=(200 * 16384,), planes=(Plane(0, 0, 16384, 16384),))  # 64 KiB a chunk


@pytest.fixture
def small(make_daemon, make_worker):
    """A worker whose chunks use 64 KiB each, of an L1 that holds 16 of them."""
    return make_worker(make_daemon(l1_size="1MiB", lease_seconds=3600), geometry=CHUNK)


def test_the_chunk_that_was_used_longest_ago_is_evicted_first(small):
    keys = make_keys(16)
    for key in keys:
        small.store([key], small.blocks_for(1))
        small.memory.fill()
    for key in keys[:4]:  # used again: no longer the oldest
        small.load([key], small.blocks_for(1))
    small.store(make_keys(4), small.blocks_for(4))
    assert [small.lookup([key], request_id=key.hex()) for key in keys] == [1] * 4 + [0] * 4 + [1] * 8


def test_the_end_of_a_prefix_is_evicted_before_its_start(small):
    keys = make_keys(16)
    small.store(keys, small.blocks_for(16))
    small.store(make_keys(6), small.blocks_for(6))
    assert small.lookup(keys) == 10


def test_chunks_with_a_lease_stay_and_a_store_without_room_reports_no_space(small):
    keys = make_keys(16)
    small.store(keys, small.blocks_for(16))
    assert small.lookup(keys[:12], request_id="holder") == 12
    others = make_keys(6)
    assert small.store(others, small.blocks_for(6)) == Stored(stored=4, skipped=0, starved=2)
    assert small.lookup(keys, request_id="holder") == 12
    assert small.lookup(others, request_id="other") == 4
    assert small.store(make_keys(1), small.blocks_for(1)) == Stored(stored=0, skipped=0, starved=1)


def test_a_lease_ends_with_its_request_and_with_its_deadline(make_daemon, make_worker):
    daemon = make_daemon(l1_size="1MiB", lease_seconds=1.0)
    worker = make_worker(daemon, geometry=CHUNK)
    keys = make_keys(16)
    worker.store(keys, worker.blocks_for(16))
    worker.lookup(keys, request_id="never ends")
    assert worker.store(make_keys(1), worker.blocks_for(1)).starved == 1
    daemon.wait_for_accounting(leases=0)
    assert worker.store(make_keys(1), worker.blocks_for(1)).stored == 1


def test_a_lookup_without_hits_takes_no_lease(daemon, worker):
    worker.lookup(make_keys(3))
    assert daemon.accounting()["leases"] == 0


def test_lookups_of_one_request_hold_one_lease(daemon, worker):
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    for _ in range(5):
        worker.lookup(keys, request_id="again and again")
    assert daemon.accounting()["leases"] == 1


def test_a_lookup_is_answered_before_all_ranks_are_there(daemon, make_worker):
    zero = make_worker(daemon, world_size=2)
    assert zero.lookup(make_keys(1)) == 0
