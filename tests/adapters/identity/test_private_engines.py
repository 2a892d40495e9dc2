"""What makes an engine private, with the reason, and which names of weights stand for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from identities import different, multimodal
from model_folder import write_model
from vllm.config import LoRAConfig, VllmConfig

from kvserver.adapters.vllm.identity import Identity
from kvserver.adapters.vllm.support import vllm_version


def a_function(config: Any) -> Any:
    return config


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"hf_overrides": a_function}, "model_config.hf_overrides cannot be compared: a builtins.function"),
        ({"load_format": "dummy"}, "weights: load_format dummy"),
        ({"load_format": "tensorizer"}, "weights: load_format tensorizer"),
        ({"model_weights": "s3://bucket/model"}, "weights: they are not in the model's folder"),
        ({"additional_config": {"hook": object()}}, "additional_config cannot be compared: a builtins.object"),
        (
            {"adjust": multimodal(mm_processor_cache_gb=0), "enable_prefix_caching": False},
            "multimodal items are named by a counter",
        ),
        ({"adjust": lambda config: setattr(config.cache_config, "calculate_kv_scales", True)}, "calculate_kv_scales"),
    ],
    ids=["a function overrides", "dummy", "tensorizer", "s3", "an object", "counted images", "KV scales of the run"],
)
def test_what_cannot_be_reproduced_makes_the_engine_private_and_is_named(identify, arguments, reason):
    assert identify(**arguments).private.startswith(reason)


def test_an_engine_with_loras_on_a_cpu_is_private_where_vllm_mixes_requests_up(identify):
    """vLLM before 0.33 computes a request without a LoRA with that of another one in its step (findings/)."""
    private = identify(adjust=lambda config: setattr(config, "lora_config", LoRAConfig(max_lora_rank=8))).private
    assert private.startswith("LoRA on CPUs") == (vllm_version() < (0, 33))


@pytest.mark.parametrize("where", [{"load_format": "dummy"}, {"model_weights": "s3://bucket/model"}])
def test_weights_without_files_may_have_a_name(identify, where):
    named, again, other = (identify(model_version=version, **where) for version in ("v1", "v1", "v2"))
    assert named == again
    assert named.private == other.private == ""
    assert different(named, other) == {"weights"}


def test_the_uri_of_weights_counts_though_they_have_a_name(identify):
    one, other = (identify("v1", model_weights=f"s3://bucket/{name}") for name in "ab")
    assert different(one, other) == {"model_config.model_weights"}


def test_a_name_does_not_stand_for_files_that_are_there(identify, tmp_path):
    one, other = (identify("v1", model=str(write_model(tmp_path / str(seed), seed=seed))) for seed in (1, 2))
    assert different(one, other) == {"weights"}


def test_a_folder_without_weights_is_private(identify, tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert "no weight files" in identify(model=str(folder)).private


def hub(name: str = "org/name", commit: str | None = "abc") -> Callable[[VllmConfig], None]:
    def adjust(config: VllmConfig) -> None:
        config.model_config.model = name
        config.model_config.hf_config._commit_hash = commit

    return adjust


def test_a_hub_model_is_its_resolved_commit(identify):
    one, again, moved, other = (
        identify(adjust=hub(*names)) for names in ((), (), ("org/name", "def"), ("org/other", "abc"))
    )
    assert (one, one.private) == (again, "")
    assert different(one, moved) == different(one, other) == {"weights"}
    assert "commit of the model is not known" in identify(adjust=hub(commit=None)).private


def test_a_draft_model_of_its_own_counts_by_its_weights(identify, tmp_path):
    def drafted(seed: int) -> Identity:
        folder = write_model(tmp_path / str(seed), seed=seed, num_hidden_layers=1)
        return identify(speculative_config={"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2})

    assert different(drafted(1), drafted(2)) == {"draft weights"}
    assert drafted(1).private == ""
