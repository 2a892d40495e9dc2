"""Sessions of SGLang's requests: a store names its session, a lookup does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Engines
from modelless import PAGE, Stage
from support.daemon import Daemon
from test_sglang_outputs import Make, Start, cached, wait_for_stores

PROMPT = list(range(10, 10 + 15 * PAGE))


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon(l1_size="64MiB")
    yield daemon.start()
    daemon.close()


@pytest.fixture
def stage(model: Path, daemon: Daemon) -> Iterator[Stage]:
    stage = Stage(str(model), daemon.endpoint)
    stage.wait_for_daemon(daemon)
    yield stage
    stage.close()


def sessions_of(daemon: Daemon) -> list[tuple[str, str, int]]:
    """Name, salt and tokens."""
    found = json.loads(daemon.http("/sessions")[1])["sessions"]
    return [(one["session_id"], one["salt_digest"], one["tokens"]) for one in found]


def test_a_store_of_sglangs_tree_names_its_session(stage: Stage, daemon: Daemon) -> None:
    stage.compute(PROMPT[: 4 * PAGE], session_id="agent")
    stage.wait_for_stores()
    stage.compute(PROMPT, session_id="agent")
    stage.compute(list(range(900, 900 + 2 * PAGE)))
    stage.wait_for_stores()
    assert sessions_of(daemon) == [("agent", "", len(PROMPT))]


def test_a_sessions_name_that_is_too_long_counts_as_none(stage: Stage, daemon: Daemon) -> None:
    stage.compute(PROMPT, session_id="a" * 257)
    stage.wait_for_stores()
    assert daemon.status()["l1"]["chunks"] == len(PROMPT) // PAGE
    assert sessions_of(daemon) == []


def test_what_a_lookup_found_is_no_longer_the_sessions_alone(stage: Stage, daemon: Daemon) -> None:
    """The lookup may be of any session, so the end of this one must not cost others a hit."""
    stage.compute(PROMPT, session_id="agent")
    stage.wait_for_stores()
    stage.forget()
    assert stage.hit(stage.request([*PROMPT[: 10 * PAGE], 1])) == 10 * PAGE
    assert sessions_of(daemon) == [("agent", "", 5 * PAGE)]


def test_chunks_belong_to_the_tenant_of_sglangs_configuration(model: Path, daemon: Daemon) -> None:
    daemon.terminate()
    daemon.flags["share"] = "tenant:a=0.5"
    daemon.start()
    stage = Stage(str(model), daemon.endpoint, extra={"kvserver.tenant": "a"})
    try:
        stage.wait_for_daemon(daemon)
        stage.compute(PROMPT)
        stage.wait_for_stores()
        assert daemon.status()["l1"]["tenants"]["a"]["chunks"] == len(PROMPT) // PAGE
        stage.forget()
        assert stage.hit(stage.request([*PROMPT, 1])) == len(PROMPT)
    finally:
        stage.close()


def test_status_states_that_lookups_carry_no_session_and_no_stats_are_reported(stage: Stage, daemon: Daemon) -> None:
    (one,) = daemon.status()["instances"]
    assert one["unreported"] == ["blocks", "requests", "sessions", "stats"]
    assert one["load"] is None


def test_a_session_of_a_request_over_sglangs_api_is_listed_and_deleted(
    engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    engine = engines.get("first")
    daemon = start_daemon(engine)
    text, other = prompt(1, 700), prompt(2, 300)
    cold = engine.generate([text], 1, session="agent-7")[0]
    engine.generate([other], 1, salt="salted", session="agent-7")
    stored = len(text) // PAGE + len(other) // PAGE
    wait_for_stores(daemon, stored)
    assert sessions_of(daemon) == [("agent-7", "", stored * PAGE)]
    deleted = json.loads(daemon.http("/sessions/agent-7", "DELETE")[1])
    assert (deleted["outcome"], deleted["tokens"]) == ("accepted", stored * PAGE)
    engine.flush()
    warm = engine.generate([text], 1)[0]
    assert warm["cached_tokens"] == cached(len(text)), "what is deleted leaves when space is needed"
    assert warm["tokens"] == cold["tokens"]
