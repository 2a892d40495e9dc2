"""Of a model that is a package only `__init__.py` was read for `max_model_len`, so the length counted for none of them, and engines of models
that compute with it shared KV.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from identities import different
from modelless import configure
from their_code import install
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _LazyRegisteredModel

from kvserver.adapters.vllm import context_length
from kvserver.adapters.vllm.identity import config_identity

Counts = Callable[..., bool]
ARCHITECTURE = "TheirForCausalLM"


@pytest.fixture
def counts(model_folder: Path) -> Counts:
    """Whether the length of a context counts for the engine of a model."""

    def find(architecture: str = "LlamaForCausalLM") -> bool:
        def adjust(config: Any, caches: Any) -> None:
            config.model_config.hf_config.architectures = [architecture]

        context_length.names_it.cache_clear()
        found = [
            config_identity(*configure(model_folder, "ipc:///nowhere", adjust=adjust, max_model_len=length))
            for length in (1000, 2000)
        ]
        return different(*found) == {"model_config.max_model_len"}

    return find


@pytest.mark.parametrize(
    "architecture",
    [
        "DeepseekV4ForCausalLM", "Glm5NextForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM",
        "InklingForCausalLM", "KimiK3ForConditionalGeneration", "MiniMaxM3SparseForCausalLM",
    ],
)  # fmt: skip
def test_context_length_counts_for_a_package_that_reads_it_in_any_file(counts, architecture):
    assert counts(architecture)


def test_context_length_does_not_count_for_models_that_do_not_name_it(counts):
    assert not counts("LlamaForCausalLM")
    assert not counts("Qwen3ForCausalLM")


def of_vllm(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, files: dict[str, str]) -> None:
    """A package or module of vLLM's own, with these files."""
    install(monkeypatch, folder, name, {f"vllm/models/{path}": text for path, text in files.items()})
    monkeypatch.setattr("vllm.models.__path__", [str(folder / "vllm" / "models")])
    monkeypatch.setitem(ModelRegistry.models, ARCHITECTURE, _LazyRegisteredModel(f"vllm.models.{name}", "Model"))


READS = "def scale(config): return config.max_model_len"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"theirs/__init__.py": "", "theirs/nvidia/ops/rope.py": READS}, True),
        ({"theirs/__init__.py": "", "theirs/nvidia/ops/rope.py": ""}, False),
        ({"theirs.py": READS}, True),
        ({"theirs.py": ""}, False),
        ({"another.py": READS}, True),
    ],
    ids=["deep in a package", "a package that does not", "a module", "a module that does not", "no sources"],
)
def test_context_length_counts_where_a_file_of_the_model_names_it_or_is_unreadable(
    counts, monkeypatch, tmp_path, files, expected
):
    of_vllm(monkeypatch, tmp_path, "theirs", files)
    assert counts(ARCHITECTURE) == expected


def test_context_length_counts_where_an_imported_model_names_it(counts, monkeypatch, tmp_path):
    of_vllm(
        monkeypatch,
        tmp_path,
        "theirs",
        {"theirs.py": "from vllm.models.base.model import Base", "base/model.py": READS},
    )
    assert not counts(ARCHITECTURE), "vllm.models.base is no model"
    base = _LazyRegisteredModel("vllm.models.base", "Base")
    monkeypatch.setitem(ModelRegistry.models, "BaseForCausalLM", base)
    assert counts(ARCHITECTURE)


def test_context_length_counts_for_all_models_where_a_rotary_embedding_names_it(counts, monkeypatch, tmp_path):
    """But for LongRoPE's, which a model's configuration chooses by name."""
    files = {"their_rotary/__init__.py": "", "their_rotary/phi3_long_rope_scaled_rope.py": READS}
    install(monkeypatch, tmp_path, "their_rotary", files)
    monkeypatch.setattr(context_length, "ROTARY", "their_rotary")
    assert not counts()
    install(monkeypatch, tmp_path, "other_rotary", {"other_rotary/__init__.py": "", "other_rotary/another.py": READS})
    monkeypatch.setattr(context_length, "ROTARY", "other_rotary")
    assert counts()
