"""SGLang resets a linker for a flush and after new weights alike, and does not state which."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal
from unittest.mock import MagicMock

import pytest
import tiny_models
import torch
from conftest import Engines
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager
from sglang_engines import PAGE
from support.daemon import wait_until
from test_sglang_outputs import Make, Start, wait_for_stores

from kvserver.adapters.sglang.epochs import WeightEpochs
from kvserver.adapters.sglang.updates import follow_updates
from kvserver.protocol import Durability

HOOKED = ("_observe_weight_load", "begin_weight_update", "end_weight_update", "check_weights")
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


# Public methods of SGLang's manager. What restores weights needs --enable-memory-saver, which is not served.
CHANGE_WEIGHTS = {
    "begin_weight_update", "end_weight_update", "update_weights_from_disk", "update_weights_from_distributed",
    "update_weights_from_ipc", "update_weights_from_tensor", "check_weights",
}  # fmt: skip
LEAVE_WEIGHTS = {
    "destroy_weights_update_group", "flush_cache_after_weight_update", "get_weights_by_name", "init_weights_update_group",
    "record_weight_version_after_update", "release_memory_occupation", "resume_memory_occupation", "save_remote_model",
    "save_sharded_model",
}  # fmt: skip


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    """SGLang's own manager, over runners that do nothing."""
    for name in HOOKED:
        monkeypatch.setattr(Manager, name, getattr(Manager, name))  # restored after the test
    monkeypatch.setattr(torch.distributed, "barrier", lambda group=None: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    runner = MagicMock()
    for update in ("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"):
        getattr(runner.weight_updater, update).return_value = (True, "")
    runner.weight_updater.load_weights_from_distributed.return_value = (True, "")
    runner.check_weights.return_value = None
    made = object.__new__(Manager)
    made.tp_worker, made.draft_worker, made.tp_cpu_group, made._session = MagicMock(), None, None, None
    made.tp_worker.weight_update_runners.return_value = [("target", runner)]
    made.scheduler, made.metrics_collector, made.flush_cache = MagicMock(), None, lambda **_: True
    return made


def message(**fields: object) -> MagicMock:
    return MagicMock(selector="all", flush_cache=False, **fields)


def test_each_public_method_of_sglangs_manager_is_known_to_change_weights_or_not() -> None:
    public = {name for name, member in vars(Manager).items() if callable(member) and not name.startswith("_")}
    assert public == CHANGE_WEIGHTS | LEAVE_WEIGHTS


@pytest.mark.parametrize("name", sorted(CHANGE_WEIGHTS))
def test_every_method_that_changes_weights_is_followed_from_its_beginning(manager: Manager, name: str) -> None:
    seen: list[str] = []
    assert follow_updates(lambda: seen.append("begins")) is None
    if "_from_tensor" in name or "_from_distributed" in name or name == "end_weight_update":
        assert manager.begin_weight_update(message()).success
    runners = manager.tp_worker.weight_update_runners
    found = runners()
    runners.side_effect = lambda: seen.append("runners") or found
    seen.clear()
    getattr(manager, name)(message(action="reset_tensors"))
    assert seen[:2] == ["begins", "runners"], "before the weights change"


def test_weights_that_another_machine_writes_begin_an_epoch_before_and_after(manager: Manager) -> None:
    """No method is called for the writes themselves, and SGLang flushes nothing."""
    epochs = WeightEpochs("one", "keep")
    variants = [epochs.variant]
    assert follow_updates(epochs.weights_updated) is None
    assert manager.begin_weight_update(message()).success
    variants.append(epochs.variant)
    assert manager.end_weight_update(message()).success
    variants.append(epochs.variant)
    assert len(set(variants)) == 3


@pytest.mark.parametrize("action", ["snapshot", "compare", "checksum"])
def test_a_check_that_only_reads_weights_begins_no_epoch(manager: Manager, action: str) -> None:
    seen: list[str] = []
    assert follow_updates(lambda: seen.append("begins")) is None
    assert manager.check_weights(message(action=action)).success
    assert seen == []


@pytest.mark.parametrize("name", HOOKED)
def test_an_sglang_without_one_of_the_methods_is_not_followed_and_left_alone(
    manager: Manager, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Manager, name)
    before = dict(vars(Manager))
    assert name in (follow_updates(lambda: None) or "")
    assert dict(vars(Manager)) == before


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
