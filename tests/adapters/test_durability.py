"""Which KV outlives its engine, and which may leave its machine: what the engine states, and what a folder of L2 gets of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from made_up_model import prompt
from model_folder import write_lora, write_model
from modelless import configure
from support.daemon import Daemon, wait_until
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvserver.adapters.vllm.identity import chain_durability, config_identity, with_weights
from kvserver.adapters.vllm.variants import Variants
from kvserver.protocol import Durability

PROCESS, MACHINE, ANYWHERE = Durability
CHUNK = 64


@pytest.fixture(autouse=True)
def chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine with vLLM's default settings has it."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "vllm-none-hash", raising=False)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", get_hash_fn_by_name("sha256")("vllm-none-hash"), raising=False)


# ---- the chain of hashes ------------------------------------------------------------------------


def test_a_chain_from_a_known_start_is_found_again() -> None:
    assert chain_durability("sha256") is ANYWHERE


def test_a_chain_from_pythonhashseed_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")  # as up to vLLM 0.28
    assert chain_durability("sha256") is PROCESS
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert chain_durability("sha256") is PROCESS, "the engine's start was made from something else"
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", get_hash_fn_by_name("sha256")("7"))
    assert chain_durability("sha256") is ANYWHERE


def test_a_random_chain_ends_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", os.urandom(32))
    assert chain_durability("sha256") is PROCESS


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_keys_of_xxhash_end_with_their_process(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert chain_durability(algorithm) is PROCESS


# ---- variants -----------------------------------------------------------------------------------


def request(lora: LoRARequest | None = None, images: bool = False) -> Any:
    images_of = ["an image"] if images else []
    return SimpleNamespace(lora_request=lora, mm_features=images_of, prompt_embeds=None, prompt_is_token_ids=None)


def made(version: Callable[[], str] = lambda: "", private: str = "", **options: Any) -> Variants:
    return Variants("incarnation", version, private, hash_algorithm="sha256", **options)


def durability(variants: Variants, *args: Any, **options: Any) -> Durability:
    found = variants.of(request(*args, **options))
    assert found is not None
    return found.durability


def test_the_weights_of_the_start_are_found_anywhere() -> None:
    assert durability(made()) is ANYWHERE


def test_weights_that_changed_in_place_end_with_their_process_unless_they_have_a_name() -> None:
    version = ""
    variants = made(lambda: version)
    variants.weights_changed("a test")
    assert durability(variants) is PROCESS
    version = "step-7"
    variants.weights_changed("a test")
    assert durability(variants) is ANYWHERE
    variants.weights_changed("a test")
    assert durability(variants) is PROCESS, "the same name once more does not name these weights"
    assert durability(made(private="weights are transferred")) is PROCESS


def test_images_count_by_names_that_are_trusted_only() -> None:
    assert durability(made(), images=True) is PROCESS
    assert durability(made(trusts_uuids=True), images=True) is ANYWHERE


def test_a_lora_leaves_its_machine_only_by_every_byte_of_its_files(tmp_path: Path) -> None:
    lora = LoRARequest("sql", 1, str(write_lora(tmp_path / "lora")))
    assert durability(made(), lora) is MACHINE
    whole = made(whole_digests=True)
    wait_until(lambda: whole.of(request(lora)) is not None)
    assert durability(whole, lora) is ANYWHERE
    assert durability(made(whole_digests=True), LoRARequest("sql", 1, "org/of-the-hub")) is PROCESS


# ---- the registration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "whole", "leaves"), [("", False, False), ("v1", False, True), ("", True, True), ("v1", True, True)]
)
def test_files_leave_the_machine_by_a_name_or_by_every_byte(
    model_folder: Path, version: str, whole: bool, leaves: bool
) -> None:
    config, caches = configure(model_folder, "ipc:///nowhere")
    found = with_weights(config_identity(config, caches), config, version, whole)
    assert not found.private
    assert (not found.machine_only) is leaves


def test_a_commit_of_the_hub_leaves_the_machine(model_folder: Path) -> None:
    config, caches = configure(model_folder, "ipc:///nowhere")
    found = config_identity(config, caches)
    config.model_config.model = "org/model"
    config.model_config.hf_config._commit_hash = "0123abcd"
    found = with_weights(found, config)
    assert (found.private, found.machine_only) == ("", "")


@pytest.mark.parametrize("row", ["vllm", "device", "weights", "model_config.dtype", "cache_config.cache_dtype"])
@pytest.mark.parametrize("whole", [False, True])
def test_what_wrote_the_kv_is_in_its_name(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, tmp_path: Path, row: str, whole: bool
) -> None:
    def identity(folder: Path = model_folder, cache_dtype: str = "auto", **options: Any) -> dict[str, str]:
        config, caches = configure(folder, "ipc:///nowhere", **options)
        config.cache_config.cache_dtype = cache_dtype
        return with_weights(config_identity(config, caches), config, whole_digests=whole).counted

    plain = identity()
    assert plain == identity()
    match row:
        case "vllm":
            monkeypatch.setattr(vllm, "__version__", "0.99.0")
            other = identity()
        case "device":
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
            other = identity()
        case "weights":
            other = identity(write_model(tmp_path / "other", seed=1))
        case "model_config.dtype":
            other = identity(dtype="float16")
        case _:
            other = identity(cache_dtype="fp8")
    assert row in {name for name in plain.keys() | other.keys() if plain.get(name) != other.get(name)}


# ---- what reaches a disk ------------------------------------------------------------------------


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon], tmp_path: Path) -> Daemon:
    found = make_daemon(l2=f"file://{tmp_path}/l2?size=64MiB")
    found.wait_for_tiers()
    return found


def written(daemon: Daemon, objects: int) -> None:
    """So many objects are on the disk, and no more: those of before would have been written first."""

    wait_until(lambda: daemon.tier()["written_objects"] >= objects and not daemon.tier()["queue_objects"])
    assert (daemon.tier()["written_objects"], daemon.tier()["objects"]) == (objects, objects)


def test_an_engine_whose_weights_change_fifty_times_writes_nothing(daemon: Daemon, make_engine: Any) -> None:
    engine = make_engine(daemon)
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    for epoch in range(1, 51):
        engine.weights = epoch
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        answer = engine.add(f"epoch {epoch}", prompt(1, 2 * CHUNK + 10))
        engine.run()
        assert answer.right
    assert daemon.status()["totals"]["stored_bytes"] > 0
    other = make_engine(daemon)
    assert other.add("plain", prompt(2, 3 * CHUNK + 10)).count
    other.run()
    written(daemon, 3)


def test_a_random_chain_writes_nothing(daemon: Daemon, make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(daemon)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", os.urandom(32))
    answer = engine.add("r", prompt(1, 2 * CHUNK + 10))
    engine.run()
    assert answer.right
    assert daemon.status()["totals"]["stored_bytes"] > 0
    other = make_engine(daemon)
    other.add("plain", prompt(2, 3 * CHUNK + 10))
    other.run()
    written(daemon, 3)
