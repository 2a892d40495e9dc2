"""SGLang resets a linker for a flush and after new weights alike, and does not state which."""

from __future__ import annotations

import logging
from typing import Literal

import pytest
from conftest import Engines
from sglang_engines import PAGE
from support.daemon import wait_until
from test_sglang_outputs import Make, Start, wait_for_stores

from kvserver.adapters.sglang.epochs import WeightEpochs
from kvserver.protocol import Durability

PRIVATE: dict[str, object] = {"kvserver.on_prefix_reset": "private"}


def test_each_reset_begins_a_private_epoch_and_the_first_one_warns(caplog: pytest.LogCaptureFixture) -> None:
    epochs = WeightEpochs("one", "private")
    seen = [(epochs.variant, epochs.durability, epochs.private)]
    with caplog.at_level(logging.WARNING, "kvserver"):
        for _ in range(2):
            epochs.reset()
            seen.append((epochs.variant, epochs.durability, epochs.private))
    assert seen[0] == ("", Durability.ANYWHERE, "")
    assert [durability for _, durability, _ in seen[1:]] == [Durability.PROCESS] * 2
    assert len({variant for variant, _, _ in seen}) == 3
    assert seen[1][2] == "epoch: private since prefix reset"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("on_reset", ["private", "keep"])
def test_two_engines_share_after_a_reset_only_where_it_means_nothing(on_reset: Literal["private", "keep"]) -> None:
    first, second = WeightEpochs("one", on_reset), WeightEpochs("two", on_reset)
    first.reset()
    second.reset()
    assert (first.variant == second.variant) == (on_reset == "keep")


@pytest.mark.long
def test_an_engine_shares_with_itself_only_after_a_flush_and_states_why(
    engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    private, other = engines.get("private", extra=PRIVATE), engines.get("other")
    daemon = start_daemon(private, other)
    texts = [prompt(1, 500), prompt(2, 500)]
    private.generate([texts[0]])
    wait_for_stores(daemon, 500 // PAGE)
    assert [instance["private"] for instance in daemon.status()["instances"]] == ["", ""]
    private.flush()
    assert private.generate([texts[0]])[0]["cached_tokens"] == 0, "stored before the reset"
    private.generate([texts[1]])
    wait_for_stores(daemon, 3 * (500 // PAGE))
    assert other.generate(texts)[1]["cached_tokens"] == 0
    wait_until(
        lambda: [i for i in daemon.status()["instances"] if i["private"] == "epoch: private since prefix reset"],
        10,
        "the reason in /status",
    )
