"""The page at `/` in a real Chromium: what it shows is what the daemon counts, whoever names engines and models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from support.browser import Browser
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """After every test the browser's log has no violation of the page's policy, and no error."""
    yield chromium
    assert not [line for line in chromium.log() if "ERR_CONNECTION_REFUSED" not in line and "401" not in line]


def prompt(worker: Worker, request: str = "r") -> None:
    """One of 1000 tokens: the engine had 250, 600 were loaded."""
    worker.end_request(request, prompt_tokens=1000, local_tokens=250, loaded_tokens=600)


def test_it_shows_the_hit_rate_live(
    browser: Browser, make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon(history_seconds=60)
    browser.open(daemon)
    browser.wait_for_text("#on-answer", "no engine is connected")
    worker = make_worker(daemon)
    worker.round_trip()
    worker.lookup(make_keys(1))
    prompt(worker)
    browser.wait_for_text("#on-answer", "Yes: one engine is connected and uses the cache.")
    browser.wait_for_text("[data-figure=hit-rate]", "50.0%")
    assert browser.text("[data-figure=not-computed]") == "85.0%"
    prompt(worker, "another")
    browser.wait_for_text("[data-figure=prompt-tokens]", "2,000")
