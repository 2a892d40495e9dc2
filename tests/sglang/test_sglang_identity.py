"""Facts that SGLang's engines must agree on before they share KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import tiny_models
import torch
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.server_args import ServerArgs

from kvserver.adapters.sglang.harmless import HARMLESS
from kvserver.adapters.sglang.identity import SGLangIdentity, arguments_identity, with_model
from kvserver.adapters.sglang.settings import SGLangSettings
from kvserver.adapters.sglang.support import unsupported

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("model"), layers=1)


def identity(folder: Path, settings: SGLangSettings = SGLangSettings(), **options: Any) -> SGLangIdentity:  # noqa: B008
    arguments = ServerArgs(model_path=str(folder), device="cpu", page_size=32, **options)
    return with_model(arguments_identity(arguments, CPU), arguments, settings)


def test_each_listed_argument_exists() -> None:
    assert HARMLESS.keys() - namespace_of(ServerArgs).keys() == set()


def test_every_argument_counts_that_is_not_listed(folder: Path) -> None:
    found = identity(folder)
    assert namespace_of(ServerArgs).keys() - HARMLESS.keys() - found.counted.keys() == set()
    assert found.private == ""
    assert "samples of the files" in found.machine_only


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "float16"}, {"kv_cache_dtype": "fp8_e4m3"}, {"quantization": "fp8"}, {"attention_backend": "torch_native"},
        {"json_model_override_args": '{"rope_theta": 1.0}'}, {"enable_torch_compile": True}, {"tp_size": 2}, {"weight_version": "2"},
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_that_may_change_kv_changes_the_identity(folder: Path, changed: dict[str, Any]) -> None:
    assert identity(folder, **changed).counted != identity(folder).counted


@pytest.mark.parametrize(
    "changed",
    [
        {"port": 40_000}, {"max_running_requests": 3}, {"disable_overlap_schedule": True}, {"log_level": "debug"},
        {"served_model_name": "other"}, {"chunked_prefill_size": 512}, {"random_seed": 7}, {"disable_cuda_graph": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_harmless_argument_leaves_the_identity_alone(folder: Path, changed: dict[str, Any]) -> None:
    assert identity(folder, **changed).counted == identity(folder).counted


def test_copies_of_a_model_agree_and_other_weights_or_configurations_do_not(folder: Path, tmp_path: Path) -> None:
    copy = tiny_models.llama(tmp_path / "copy", layers=1)
    other = tiny_models.llama(tmp_path / "other", layers=1, seed=1)
    config = tiny_models.llama(tmp_path / "config", layers=1)
    text = json.loads((config / "config.json").read_text())
    (config / "config.json").write_text(json.dumps(text | {"rope_theta": 5000.0}))
    counted = identity(folder).counted
    assert identity(copy).counted == counted
    assert {name for name, digest in identity(other).counted.items() if counted[name] != digest} == {"weights"}
    assert {name for name, digest in identity(config).counted.items() if counted[name] != digest} == {"config.json"}


def test_weights_without_files_make_the_engine_private_unless_they_are_named(folder: Path) -> None:
    assert "load_format dummy" in identity(folder, load_format="dummy").private
    assert identity(folder, SGLangSettings(model_version="v1"), load_format="dummy").private == ""


def with_lora(folder: Path, lora: Path) -> ServerArgs:
    arguments = ServerArgs(model_path=str(folder), device="cpu", page_size=32, enable_lora=True)
    arguments.lora_paths = [LoRARef(LoRARef.deterministic_id("a", str(lora)), "a", str(lora), False)]
    return arguments


def test_the_content_of_loras_and_of_a_draft_counts(folder: Path, tmp_path: Path) -> None:
    """Keys have their names and paths only."""
    lora, draft = tmp_path / "lora", tmp_path / "draft"

    def counted() -> dict[str, str]:
        arguments = with_lora(folder, lora)
        arguments.speculative_draft_model_path = str(draft)
        found = with_model(arguments_identity(arguments, CPU), arguments, SGLangSettings())
        assert found.private == ""
        return found.counted

    tiny_models.lora(lora, layers=1)
    tiny_models.eagle(draft)
    before = counted()
    assert counted() == before
    tiny_models.lora(lora, layers=1, seed=7)
    after = counted()
    assert {name for name in before if before[name] != after[name]} == {"LoRA a"}
    tiny_models.eagle(draft, seed=9)
    assert {name for name in before if counted()[name] != after[name]} == {"draft"}


def with_draft(folder: Path, draft: str) -> ServerArgs:
    arguments = ServerArgs(model_path=str(folder), device="cpu", page_size=32)
    arguments.speculative_draft_model_path = draft
    return arguments


def of(arguments: ServerArgs, settings: SGLangSettings = SGLangSettings()) -> SGLangIdentity:  # noqa: B008
    return with_model(arguments_identity(arguments, CPU), arguments, settings)


def snapshot(cache: Path, name: str, commit: str) -> Path:
    """An empty snapshot of a repository, as the cache of Hugging Face has it."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return repository / "snapshots" / commit


@pytest.mark.parametrize("kind", ["lora", "draft"])
def test_a_lora_or_a_draft_in_the_cache_of_hugging_face_is_named_by_its_commit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = []
    for commit in ("a" * 40, "b" * 40):
        if kind == "lora":
            tiny_models.lora(snapshot(tmp_path, "org/one", commit), layers=1)
            arguments = with_lora(folder, Path("org/one"))
        else:
            tiny_models.eagle(snapshot(tmp_path, "org/one", commit))
            arguments = with_draft(folder, "org/one")
        found.append(of(arguments, SGLangSettings(model_version="v1")))
    assert [(one.private, one.machine_only) for one in found] == [("", "")] * 2
    name = "LoRA a" if kind == "lora" else "draft"
    assert {field for field in found[0].counted if found[0].counted[field] != found[1].counted[field]} == {name}
    arguments.download_dir = str(tmp_path / "elsewhere")
    assert "--download-dir" in of(arguments, SGLangSettings(model_version="v1")).private


@pytest.mark.parametrize("kind", ["lora", "draft"])
def test_samples_of_a_lora_or_a_draft_are_compared_on_one_machine_only(folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "lora":
        arguments = with_lora(folder, tiny_models.lora(tmp_path, layers=1))
    else:
        arguments = with_draft(folder, str(tiny_models.eagle(tmp_path)))
    named = of(arguments, SGLangSettings(model_version="v1"))
    assert named.machine_only.startswith("LoRA a: samples" if kind == "lora" else "draft: samples")
    assert of(arguments, SGLangSettings(model_version="v1", weights_digest="whole")).machine_only == ""


def test_the_configuration_of_a_draft_counts(folder: Path, tmp_path: Path) -> None:
    config = tiny_models.eagle(tmp_path) / "config.json"
    arguments = with_draft(folder, str(tmp_path))
    before = of(arguments).counted
    text = json.loads(config.read_text())
    config.write_text(json.dumps(text | {"rope_theta": 5000.0}))
    after = of(arguments).counted
    assert {name for name in after if before.get(name) != after[name]} == {"draft config.json"}
    config.write_text(json.dumps(text | {"auto_map": {"AutoModel": "modeling.Model"}}))
    assert of(arguments).private == ""
    arguments.trust_remote_code = True
    assert "--trust-remote-code" in of(arguments).private


def test_a_lora_without_files_makes_the_engine_private(folder: Path, tmp_path: Path) -> None:
    arguments = with_lora(folder, tmp_path / "missing")
    assert "LoRA a" in with_model(arguments_identity(arguments, CPU), arguments, SGLangSettings()).private


def test_code_in_the_models_folder_makes_the_engine_private_where_it_runs(tmp_path: Path) -> None:
    config = tiny_models.llama(tmp_path, layers=1) / "config.json"
    assert identity(tmp_path, trust_remote_code=True).private == ""
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": {"AutoModel": "modeling.Model"}}))
    assert identity(tmp_path).private == ""
    assert "--trust-remote-code" in identity(tmp_path, trust_remote_code=True).private


def test_names_of_content_that_is_not_compared_make_the_engine_private(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scales.json").write_text("{}")
    named = identity(folder, quantization_param_path=str(tmp_path / "scales.json"))
    assert "--quantization-param-path" in named.private
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "mine")
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE" in identity(folder).private


def test_a_variable_of_sglang_changes_the_identity(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(folder).counted
    monkeypatch.setenv("SGLANG_SOMETHING_NEW", "1")
    assert identity(folder).counted != before


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"enable_memory_saver": True}, "--enable-memory-saver"), ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm"), ({"pp_size": 2}, "--pp-size 2"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"), ({"page_size": 1}, "--page-size 1"),
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_is_not_served_names_its_flag(folder: Path, options: dict[str, Any], flag: str) -> None:
    arguments = ServerArgs(**{"model_path": str(folder), "device": "cpu", "page_size": 32, **options})
    assert (unsupported(arguments, arguments.page_size, set()) or "").startswith(flag)
    assert unsupported(ServerArgs(model_path=str(folder), device="cpu", page_size=32), 32, set()) is None


@pytest.mark.parametrize("options", [{"speculative_algorithm": "EAGLE"}, {"enable_lora": True}], ids=str)
def test_drafts_whose_tokens_are_in_the_keys_and_loras_are_served(folder: Path, options: dict[str, Any]) -> None:
    assert unsupported(ServerArgs(model_path=str(folder), device="cpu", page_size=32, **options), 32, set()) is None


def test_a_model_with_images_is_not_served(tmp_path: Path) -> None:
    config = tiny_models.llama(tmp_path, layers=1) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vision_config": {}}))
    arguments = ServerArgs(model_path=str(tmp_path), device="cpu", page_size=32)
    assert "vision_config" in (unsupported(arguments, 32, set()) or "")


def test_a_multimodal_architecture_is_not_served_whatever_its_configuration_lacks(tmp_path: Path) -> None:
    config = tiny_models.llama(tmp_path, layers=1) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["Phi4MMForCausalLM"]}))
    arguments = ServerArgs(model_path=str(tmp_path), device="cpu", page_size=32)
    assert "Phi4MMForCausalLM" in (unsupported(arguments, 32, set()) or "")
