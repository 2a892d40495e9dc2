"""One exception in a scheduler pass took all its stores, reports and events with it, and left tables that missed a step's blocks."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from made_up_model import prompt
from modelless import Engine
from support.daemon import wait_until

from kvserver.adapters.common.announcer import Announcer
from kvserver.adapters.common.introduction import Introduction
from kvserver.adapters.common.notices import Notices
from kvserver.adapters.common.speed import PrefillSpeed
from kvserver.protocol import DescribeScheduler, EndRequest, ReportBlockAllocations

CHUNK = 64
GOOD = prompt(1, 3 * CHUNK + 10)
BAD = prompt(2, 3 * CHUNK + 10)


class Fault(Exception):
    """Of the test."""


def alter(engine: Engine, change) -> None:
    """Let the connector see `change(output)` for each scheduler output."""
    build = engine.connector.build_connector_meta
    engine.connector.build_connector_meta = lambda output: build(change(output))


class RaisingTables:
    def __init__(self, tables, bad: str) -> None:
        self.tables, self.bad = tables, bad

    def get_block_ids(self, name: str):
        if name == self.bad:
            raise Fault
        return self.tables.get_block_ids(name)


def test_fault_of_one_request_leaves_the_others_of_its_step_stored(make_daemon, make_tap, make_engine):
    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint, may_fail=True)

    def change(output):
        return dataclasses.replace(
            output, kv_connector_block_state=RaisingTables(output.kv_connector_block_state, "bad")
        )

    alter(engine, change)
    answers = [engine.add("bad", BAD), engine.add("good", GOOD)]
    engine.run()
    assert all(answer.right for answer in answers)
    other = make_engine(tap.endpoint)
    assert other.generate("good again", GOOD).external == 3 * CHUNK
    assert other.generate("bad again", BAD).external == 0
    wait_until(lambda: tap.of(ReportBlockAllocations) and tap.of(DescribeScheduler))
    assert list(engine.errors()) == ["stores of a request: Fault"]


@pytest.mark.parametrize(
    ("part", "method"),
    [(Notices, "send_blocks"), (Introduction, "send"), (Announcer, "request_events"), (PrefillSpeed, "planned")],
)
def test_each_part_of_a_pass_is_done_whatever_another_raises(
    make_daemon, make_tap, make_engine, monkeypatch, part, method
):
    def fault(*args, **kwargs):
        raise Fault

    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint, may_fail=True)
    with monkeypatch.context() as patch:
        patch.setattr(part, method, fault)
        engine.generate("good", GOOD)
    wait_until(lambda: [end.request_id for end in tap.of(EndRequest)] == ["good"])
    assert bool(tap.of(ReportBlockAllocations)) == (part is not Notices)
    assert bool(tap.of(DescribeScheduler)) == (part is not Introduction)
    assert len(engine.errors()) == 1
    assert make_engine(tap.endpoint).generate("again", GOOD).external == 3 * CHUNK


class Unreadable(list):
    def __iter__(self):
        raise Fault


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_request_whose_blocks_were_not_followed_is_stored_no_further(make_daemon, make_engine, asynchronous):
    """Before vLLM 0.29 blocks come as differences: without one of them all later ones are at wrong places."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, may_fail=True, asynchronous=asynchronous)
    faults = []

    def change(output):
        output = dataclasses.replace(output, kv_connector_block_state=None)
        cached = output.scheduled_cached_reqs
        if not faults and "bad" in cached.req_ids and cached.new_block_ids[cached.req_ids.index("bad")]:
            faults.append("once")
            cached = copy.copy(cached)
            cached.new_block_ids = list(cached.new_block_ids)
            cached.new_block_ids[cached.req_ids.index("bad")] = (Unreadable(),)
            output = dataclasses.replace(output, scheduled_cached_reqs=cached)
        return output

    alter(engine, change)
    bad, good = engine.add("bad", BAD, count=2 * CHUNK), engine.add("good", GOOD, count=2 * CHUNK)
    engine.run()
    assert faults
    other = make_engine(daemon)
    assert other.generate("bad again", BAD + bad.tokens).external == 3 * CHUNK, "what was stored before it"
    assert other.generate("good again", GOOD + good.tokens).external == 5 * CHUNK


def test_fault_in_one_part_of_a_ranks_report_does_not_skip_its_other_parts(make_daemon, make_engine, monkeypatch):
    """The ends of stores, after a word about quarantine that failed."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, may_fail=True)
    update = engine.connector.update_connector_output

    def with_a_fault(output):
        if output.kv_connector_worker_meta is not None:
            output.kv_connector_worker_meta.quarantined.append((99, [1 << 40]))
        update(output)

    monkeypatch.setattr(engine.connector, "update_connector_output", with_a_fault)
    engine.generate("good", GOOD, seconds=5)  # half of what it would wait for the store's end
    assert list(engine.errors()) == ["quarantine: IndexError"]
