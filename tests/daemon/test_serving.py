"""The operator's switch: `--serving`, `POST /config/serving`, and what a daemon shows of it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from support.commands import run
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

from kvserver._native import State
from kvserver.protocol import REGISTERED, SERVING_OFF, AwaitFill, LookupReply, LookupTail, ObjectGroup, Stored
from kvserver.protocol.client import Client

FULL = ObjectGroup("full", (0,), 16)
TAIL = 1  # the number of the group of single blocks


def switch(daemon: Daemon, query: str, token: str = "") -> tuple[int, dict[str, Any]]:
    """`query`: behind `POST /config/serving`."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"http://127.0.0.1:{daemon.http_port}/config/serving{query}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST", headers=headers), timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture
def switched(daemon: Daemon) -> Iterator[Daemon]:
    """A daemon that serves, also for the next test."""
    yield daemon
    assert switch(daemon, "?value=on")[0] == 200


def test_serving_off_finds_and_stores_nothing_until_serving_is_on_again(switched: Daemon, worker: Worker) -> None:
    keys, more = make_keys(3), make_keys(2)
    assert worker.store(keys, worker.blocks_for(3)).stored == 3
    errors = switched.status()["totals"]["errors"]
    assert switch(switched, "?value=off") == (200, {"serving": "off", "before": "on"})
    assert worker.lookup(keys) == 0
    declined = worker.begin_store(more, worker.blocks_for(2, first=20))
    assert declined.reply() == Stored(stored=0, skipped=0, declined=2)
    assert declined.state is State.PENDING, "an engine that saw FAILED before the reply would count a failed store"
    assert switched.status()["l1"]["chunks"] == 3, "L1 keeps what it has, and nothing else"
    assert switch(switched, "?value=on")[1] == {"serving": "on", "before": "off"}
    assert worker.lookup(keys) == 3
    assert worker.store(more, worker.blocks_for(2, first=20)).stored == 2
    assert switched.status()["totals"]["errors"] == errors, "a store that is not taken is no error"


def test_stores_off_takes_no_store_and_loads_what_is_there(switched: Daemon, worker: Worker) -> None:
    keys = make_keys(2)
    worker.store(keys, worker.blocks_for(2))
    switch(switched, "?value=stores-off")
    assert worker.lookup(keys) == 2
    assert worker.load(keys, worker.blocks_for(2, first=20)).chunks == 2
    assert worker.store(make_keys(1), worker.blocks_for(1)).declined == 1


def test_a_chunk_that_one_rank_stored_before_the_switch_is_whole_once_the_other_has(switched, make_worker) -> None:
    first, second = (make_worker(switched, instance_id="e", incarnation="1", rank=n, world_size=2) for n in range(2))
    keys = make_keys(1)
    assert first.store(keys, first.blocks_for(1)).stored == 1
    switch(switched, "?value=stores-off")
    assert second.store(keys, second.blocks_for(1)).declined == 1
    assert first.lookup(keys) == 0
    switch(switched, "?value=on")
    assert first.store(keys, first.blocks_for(1)).skipped == 1
    assert second.store(keys, second.blocks_for(1)).stored == 1
    assert first.lookup(keys) == 1


def test_a_lookup_that_was_answered_before_the_switch_may_still_load(switched: Daemon, worker: Worker) -> None:
    keys = make_keys(2)
    worker.store(keys, worker.blocks_for(2))
    assert worker.lookup(keys) == 2
    switch(switched, "?value=off")
    assert switched.accounting()["leases"] == 1
    assert worker.load(keys, worker.blocks_for(2, first=20)).chunks == 2


def test_the_second_half_of_a_lookup_and_a_fill_find_nothing_after_the_switch(switched, make_worker) -> None:
    worker = make_worker(switched, groups=(FULL,), tails=True)
    chunk, blocks = make_keys(1), make_keys(2)
    worker.store(chunk, range(1, 5))
    worker.store(blocks, [20, 21], group=TAIL, first_chunk=4, after=chunk[0])
    request = worker.lookup_message([*chunk, *make_keys(1)])
    tail = LookupTail(request.instance_id, request.incarnation, request.request_id, b"".join(blocks))
    assert worker.ask(request, LookupReply).wants_tail
    assert worker.ask(tail, LookupReply).tail_blocks == 2
    assert worker.ask(request, LookupReply).wants_tail
    switch(switched, "?value=off")
    assert worker.ask(tail, LookupReply) == LookupReply(0)
    assert worker.ask(AwaitFill(request, 1000), LookupReply) == LookupReply(0)


def test_every_page_and_command_names_the_present_mode(switched: Daemon, worker: Worker) -> None:
    where = ["--http-port", str(switched.http_port)]
    assert "SERVING" not in run("status", *where).stdout
    assert switched.metric("kvserver_serving", serving="on") == 1
    switch(switched, "?value=off")
    assert switched.status()["serving"] == "off"
    assert "SERVING is OFF: no lookup finds a chunk" in run("status", *where).stdout
    top = run("top", "--once", *where).stdout
    assert "SERVING    is OFF" in top
    assert "  NO CACHE  " in top
    assert [switched.metric("kvserver_serving", serving=mode) for mode in ("on", "stores-off", "off")] == [0, 0, 1]
    row = json.loads(switched.http("/config")[1])["serving"]
    assert (row["value"], row["source"], row["source_name"]) == ("off", "request", "POST /config/serving")
    assert switched.http("/readyz")[0] == 200, "it does what its operator wants: a probe must not restart it"
    assert "serving was switched from on to off" in switched.log


def test_a_request_that_found_nothing_is_explained_by_the_switch(switched: Daemon, worker: Worker) -> None:
    switch(switched, "?value=off")
    worker.lookup(make_keys(1), "switched-off")
    worker.end_request("switched-off")
    command = ["explain", "switched-off", "--http-port", str(switched.http_port)]
    wait_until(lambda: "serving is off" in run(*command).stdout, what="the reason of the miss")
    assert "value=on ends that" in run(*command).stdout
    assert "ranks are registered" not in run(*command).stdout
    missed = [one["requests"]["missed_tokens"] for one in switched.status()["instances"]]
    assert [one["unavailable"] for one in missed] == [64]


def test_a_registered_engine_learns_by_hello_that_serving_is_off(switched: Daemon, worker: Worker) -> None:
    with Client(switched.endpoint) as client:

        def state(incarnation: str = worker.incarnation) -> tuple[str, str]:
            reply = client.hello("test", worker.instance_id, incarnation)
            return reply.standing, reply.standing_text

        assert state() == (REGISTERED, "")
        switch(switched, "?value=off")
        assert state() == (SERVING_OFF, "serving is off (POST /config/serving)")
        assert state("another")[0] == "duplicate_instance"
        switch(switched, "?value=stores-off")
        assert state() == (REGISTERED, ""), "it loads"


def test_a_restart_has_the_mode_of_the_settings_and_the_switch_needs_the_token(make_daemon, tmp_path) -> None:
    file, token = tmp_path / "token", "0123456789abcdef"
    file.write_text(token)
    file.chmod(0o600)
    daemon = make_daemon(serving="stores-off", http_token_file=file)
    assert switch(daemon, "?value=on")[0] == 401
    assert switch(daemon, "?value=on", token) == (200, {"serving": "on", "before": "stores-off"})
    daemon.terminate()
    daemon.start()
    assert switch(daemon, "?value=on", token)[1]["before"] == "stores-off"


@pytest.mark.parametrize("query", ["", "?value=", "?value=OFF", "?mode=off", "?value=off&value=on", "?value=off&x=1"])
def test_a_bad_value_changes_nothing(switched: Daemon, query: str) -> None:
    code, answer = switch(switched, query)
    assert (code, answer["error"]) == (400, "bad_parameter")
    assert "on, stores-off, off" in answer["message"]
    assert switched.status()["serving"] == "on"


def test_a_store_that_has_begun_ends_as_usual(make_daemon, make_worker) -> None:
    daemon = make_daemon(pauses=True)
    worker = make_worker(daemon)
    keys = make_keys(1)
    with daemon.paused_copies():
        store = worker.begin_store(keys, worker.blocks_for(1))
        daemon.wait_for_a_copy()
        switch(daemon, "?value=off")
    assert store.reply() == Stored(stored=1, skipped=0)
    switch(daemon, "?value=on")
    assert worker.lookup(keys) == 1
