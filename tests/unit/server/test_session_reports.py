"""Reports of sessions are chosen before they are made, and what is described of a session shares its id."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.filling import filling
from support.kv_chunks import Prompt

from kvserver.cache import POLICIES, Cache, PagePool, SessionKey, one_group
from kvserver.events import ChunksDescribed, Event
from kvserver.server import SessionReports, Upkeep
from kvserver.server.sessions import MOST_SESSIONS

PAGE, NAMESPACE = 4096, b"n" * 32


def test_only_the_largest_and_latest_sessions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, made = Cache(PagePool(2000 * PAGE, PAGE), POLICIES["slru"]()), []
    monkeypatch.setattr("kvserver.cache.sessions._LEAST_CHUNKS", 100_000)
    for number in range(2 * MOST_SESSIONS):
        user, large = SessionKey(NAMESPACE, b"", f"{number}"), number % 3 == 0
        keys = b"".join((10 * number + place).to_bytes(32, "big") for place in range(2 + large))
        cache.lookup(NAMESPACE, keys, ("e", "r"), 1e9, user, now=1.0 + number)
        cache.finish_store(cache.plan_store(NAMESPACE, one_group(1), keys, PAGE, session=user), copied=True)
        cache.end_lease(("e", "r"))
    reports = SessionReports(cast(Upkeep, SimpleNamespace(cache=cache, clock=lambda: 1e3)))
    report = reports._report
    monkeypatch.setattr(reports, "_report", lambda *of: made.append(of) or report(*of))
    found = reports.all()
    assert (len(found.sessions), found.left_out, len(made)) == (MOST_SESSIONS, MOST_SESSIONS, MOST_SESSIONS)
    by_size = sorted(range(2 * MOST_SESSIONS), key=lambda number: (number % 3 != 0, -number))
    assert [int(one.session_id) for one in found.sessions] == by_size[:MOST_SESSIONS]


def test_all_descriptions_of_a_session_share_one_string(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Event] = []
    with filling() as f:
        publish = f.running.parts.bus.publish

        def record(event: Event, size: int = 0) -> Any:
            published.append(event)
            return publish(event, size)

        monkeypatch.setattr(f.running.parts.bus, "publish", record)
        prompt = Prompt(range(128), chunk_blocks=4, block=16)
        for _ in range(3):
            blocks = f.worker.blocks_for(len(prompt.keys))
            f.worker.store(prompt.keys, blocks, contents=prompt.contents(), session_id="agent of a long name")
    ids = [event.session_id for event in published if isinstance(event, ChunksDescribed)]
    assert ids == ["agent of a long name"] * 3
    assert len({id(each) for each in ids}) == 1
