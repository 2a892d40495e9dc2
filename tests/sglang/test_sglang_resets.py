"""SGLang resets a linker for a flush and after new weights alike, and does not state which."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pytest
import tiny_models
from conftest import Engines
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang_engines import PAGE
from support.daemon import wait_until
from test_sglang_outputs import Make, Start, wait_for_stores

from kvserver.adapters.sglang.epochs import WeightEpochs
from kvserver.adapters.sglang.updates import follow_updates
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
def test_an_update_of_the_weights_begins_a_private_epoch_whatever_a_reset_means(
    on_reset: Literal["private", "keep"],
) -> None:
    epochs = WeightEpochs("one", on_reset)
    epochs.weights_updated()
    assert epochs.private == "epoch: private since new weights"
    assert epochs.durability is Durability.PROCESS
    assert epochs.variant != ""


def test_every_update_of_sglangs_weights_is_followed_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerWeightUpdaterManager, "_observe_weight_load", lambda self, source: f"from {source}")
    seen: list[str] = []
    assert follow_updates(lambda: seen.append("begins")) is None
    assert SchedulerWeightUpdaterManager._observe_weight_load(None, "disk") == "from disk"
    assert seen == ["begins"]
    monkeypatch.delattr(SchedulerWeightUpdaterManager, "_observe_weight_load")
    assert "cannot be followed" in (follow_updates(lambda: None) or "")


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


@pytest.mark.long
def test_kv_of_weights_that_were_updated_without_a_flush_is_not_found_by_others(
    engines: Engines, start_daemon: Start, prompt: Make, tmp_path: Path
) -> None:
    updated, other = engines.get("updated"), engines.get("other")
    daemon = start_daemon(updated, other)
    text = prompt(70, 700)
    weights = tiny_models.llama(tmp_path / "weights", dtype="float32", seed=1)
    assert "True" in updated.ask("update", model=str(weights))["answer"]
    with_new_weights = updated.generate([text])[0]["tokens"]
    wait_for_stores(daemon, len(text) // PAGE)
    found = other.generate([text])[0]
    assert found["cached_tokens"] == 0
    assert found["tokens"] != with_new_weights
    engines.end("updated")
