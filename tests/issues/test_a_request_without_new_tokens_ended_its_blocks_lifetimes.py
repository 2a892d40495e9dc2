"""A report that names a request's blocks and nothing of their content, as of a running request without new tokens, ended the lifetimes of
its full blocks as evictions."""

from __future__ import annotations

import pytest
from support.block_lifetimes import Engine, hold, release

from kvserver.telemetry import BlockLifecycle

TOKENS = range(8)  # two blocks


@pytest.fixture
def engine() -> Engine:
    return Engine(BlockLifecycle(1.0))


def test_full_blocks_stay_where_nothing_new_is_reported_of_them(engine: Engine) -> None:
    engine.holds(1, hold("a", [5, 6], [50, 60]))
    engine.holds(2, hold("a", [5, 6]))
    assert engine.counts() == {"allocations": 2, "active_blocks": 2, "tracked_blocks": 2}
    engine.holds(9, hold("b", [5], [50]))
    assert engine.metric("shared_accesses") == 1, "its content is known as before"


def test_full_blocks_of_an_engine_that_sends_tokens_stay_without_new_tokens(engine: Engine) -> None:
    engine.holds(1, hold("a", [5, 6], tokens=TOKENS))
    engine.holds(2, hold("a", [5, 6]))
    engine.holds(3, hold("a", [5, 6, 7]))  # room for the next token, which is not computed yet
    engine.holds(4, hold("a", [7], tokens=[1, 2, 3, 4], first=2))
    assert engine.counts() == {"allocations": 3, "active_blocks": 3, "tracked_blocks": 3}
    engine.holds(5, hold("b", [5, 6, 7], tokens=[*TOKENS, 1, 2, 3, 4]))
    assert engine.metric("shared_accesses") == 3


def test_block_shared_by_two_requests_keeps_its_lifetime(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]), hold("b", [5], [50]))
    engine.holds(2, hold("b", [5]), hold("a", [5]))
    assert engine.counts() == {"allocations": 1, "shared_accesses": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_block_released_and_owned_again_has_another_lifetime(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]))
    engine.holds(2, release("a", [5]))
    engine.holds(3, hold("a", [5]))
    assert engine.counts() == {"allocations": 2, "evictions": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_new_content_in_a_block_that_was_not_let_go_is_another_lifetime(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]))
    engine.holds(2, hold("a", [5], [51]))
    assert engine.metric("evictions") == 1
