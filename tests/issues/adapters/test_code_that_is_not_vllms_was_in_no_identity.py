"""Two versions of one plugin had equal identities: an engine found the KV that another one's model code had made, and answered wrong.
So it was with all code that is not vLLM's own: models, attention, quantization, KV dtypes, remote code of another repository.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from identities import different
from made_up_model import prompt
from modelless import configure
from their_code import PLUGINS, install
from vllm.config import SpeculativeConfig
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _LazyRegisteredModel

from kvserver.adapters.vllm.identity import Identity, config_identity

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)
ARCHITECTURE = "TheirForCausalLM"
Find = Callable[..., Identity]


@pytest.fixture
def identity(model_folder: Path) -> Find:
    """The identity of an engine whose configuration was adjusted so."""

    def find(adjust: Callable[[Any, Any], None] = lambda config, caches: None) -> Identity:
        config, caches = configure(model_folder, "ipc:///nowhere", adjust=adjust)
        return config_identity(config, caches)

    return find


def test_engines_with_two_versions_of_a_plugin_share_nothing_and_equal_ones_do(
    make_daemon, make_engine, monkeypatch, tmp_path
):
    daemon = make_daemon(chunk_tokens=CHUNK)
    plugins = [("1.0", "SCALE = 1"), ("1.1", "SCALE = 1"), ("1.1", "SCALE = 2"), ("1.0", "SCALE = 1")]
    for number, (version, source) in enumerate(plugins):
        with monkeypatch.context() as patch:
            install(patch, tmp_path / str(number), "their_plugin", {"their_plugin.py": source}, version, PLUGINS)
            found = make_engine(daemon).generate(str(number), TOKENS).external
        assert found == (2 * CHUNK if number == 3 else 0), f"{version}: {source}"
    assert {instance["private"] for instance in daemon.status()["instances"]} == {""}


def test_only_plugins_that_vllm_loads_count(identity, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_PLUGINS", "kvserver")
    plain = identity()
    install(monkeypatch, tmp_path, "their_plugin", {"their_plugin.py": ""}, "1.0", PLUGINS)
    assert different(identity(), plain) == set()
    monkeypatch.setenv("VLLM_PLUGINS", "their_plugin")
    assert different(identity(), plain) >= {"plugin their_plugin", "code of their_plugin"}


def test_of_a_plugin_without_sources_its_version_counts(identity, monkeypatch, tmp_path):
    found = []
    for version in ("1.0", "1.1"):
        with monkeypatch.context() as patch:
            install(patch, tmp_path / version, "their_plugin", {}, version, PLUGINS)
            found.append(identity())
    assert different(*found) == {"plugin their_plugin", "code of their_plugin"}
    assert [each.private for each in found] == ["", ""]


def registered_by_name(patch: Any, config: Any) -> None:
    patch.setitem(ModelRegistry.models, ARCHITECTURE, _LazyRegisteredModel("theirs.model", "Model"))
    config.model_config.hf_config.architectures = [ARCHITECTURE]


def registered_as_a_class(patch: Any, config: Any) -> None:
    model = importlib.import_module("theirs.model").Model
    patch.setitem(ModelRegistry.models, ARCHITECTURE, SimpleNamespace(model_cls=model))
    config.model_config.hf_config.architectures = [ARCHITECTURE]


def replaced(patch: Any, config: Any) -> None:
    """One of vLLM's own architectures."""
    patch.setitem(ModelRegistry.models, "LlamaForCausalLM", _LazyRegisteredModel("theirs.model", "Model"))


def drafts(patch: Any, config: Any) -> None:
    patch.setitem(ModelRegistry.models, ARCHITECTURE, _LazyRegisteredModel("theirs.model", "Model"))
    config.speculative_config = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    draft = copy.deepcopy(config.model_config)
    draft.hf_config.architectures = [ARCHITECTURE]
    config.speculative_config.draft_model_config = draft


def quantized(patch: Any, config: Any) -> None:
    methods = "vllm.model_executor.layers.quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG"
    patch.setattr(methods, {"theirs": importlib.import_module("theirs.model").Model})
    config.model_config.quantization = "theirs"


def of_a_kv_dtype(patch: Any, config: Any) -> None:
    handlers = {"theirs": importlib.import_module("theirs.model").Model()}
    patch.setattr("vllm.config.cache._KV_CACHE_DTYPE_HANDLERS", handlers, raising=False)  # 0.33 and later
    config.cache_config.cache_dtype = "theirs"


def of_an_operation(patch: Any, config: Any) -> None:
    operations = {"RMSNorm": importlib.import_module("theirs.model").Model}
    patch.setattr("vllm.model_executor.custom_op.op_registry_oot", operations)


def of_attention(patch: Any, config: Any) -> None:
    layer = SimpleNamespace(get_attn_backend=lambda: importlib.import_module("theirs.model").Model)
    config.compilation_config.static_forward_context["layers.0"] = layer


def of_a_layer(patch: Any, config: Any) -> None:
    config.compilation_config.static_forward_context["layers.0"] = importlib.import_module("theirs.model").Model()


def of_the_worker(patch: Any, config: Any) -> None:
    config.parallel_config.worker_cls = "theirs.model.Model"


def of_the_workers_extension(patch: Any, config: Any) -> None:
    config.parallel_config.worker_extension_cls = "theirs.model.Model"


def of_the_platform(patch: Any, config: Any) -> None:
    patch.setattr("vllm.platforms.current_platform", importlib.import_module("theirs.model").Model())


WAYS = [
    registered_by_name, registered_as_a_class, replaced, drafts, quantized, of_a_kv_dtype, of_an_operation, of_attention,
    of_a_layer, of_the_worker, of_the_workers_extension, of_the_platform,
]  # fmt: skip


def forget(name: str) -> None:
    for each in [each for each in sys.modules if each.split(".")[0] == name]:
        del sys.modules[each]


@pytest.fixture
def of_theirs(identity: Find, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Find:
    """The identity of an engine that uses their code in this way, where this is what is in the file beside the model."""

    def find(way: Callable[[Any, Any], None], beside: str = "") -> Identity:
        files = {"theirs/__init__.py": "", "theirs/model.py": "class Model: pass", "theirs/ops/beside.py": beside}
        with monkeypatch.context() as patch:
            install(patch, tmp_path / str(len(list(tmp_path.iterdir()))), "theirs", files)
            found = identity(lambda config, caches: way(patch, config))
        forget("theirs")
        return found

    return find


@pytest.mark.parametrize("way", WAYS)
def test_code_counts_wherever_vllm_takes_it_from_with_all_that_is_in_its_package(of_theirs, way):
    one, again, other = of_theirs(way), of_theirs(way), of_theirs(way, "SCALE = 2")
    assert different(one, again) == set()
    assert different(one, other) == {"code of theirs"}
    assert one.private == other.private == ""


def test_a_kind_of_kv_cache_that_others_wrote_counts(identity, monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "theirs", {"theirs.py": ""})

    def kept_so(config: Any, caches: Any) -> None:
        (group,) = caches.kv_cache_groups
        theirs = type("TheirSpec", (type(group.kv_cache_spec),), {"__module__": "theirs"})
        spec = object.__new__(theirs)
        spec.__dict__.update(group.kv_cache_spec.__dict__)
        caches.kv_cache_groups[:] = [dataclasses.replace(group, kv_cache_spec=spec)]

    assert "code of theirs" in identity(kept_so).counted


@pytest.mark.parametrize("way", [registered_by_name, of_the_workers_extension])
def test_code_that_cannot_be_read_makes_the_engine_private(identity, monkeypatch, way):
    assert identity(lambda config, caches: way(monkeypatch, config)).private.startswith("code of theirs: ")


def test_a_class_of_a_module_without_a_file_makes_the_engine_private(identity, monkeypatch):
    def typed_in(config: Any, caches: Any) -> None:
        model = type("Model", (), {"__module__": "typed_in"})
        monkeypatch.setitem(sys.modules, "typed_in", ModuleType("typed_in"))
        monkeypatch.setitem(ModelRegistry.models, ARCHITECTURE, SimpleNamespace(model_cls=model))
        config.model_config.hf_config.architectures = [ARCHITECTURE]

    assert identity(typed_in).private.startswith("code of typed_in: ")


def remote(**auto_map: Any) -> Callable[[Any, Any], None]:
    def adjust(config: Any, caches: Any) -> None:
        config.model_config.trust_remote_code = True
        config.model_config.hf_config.architectures = [ARCHITECTURE]  # vLLM has no such model
        config.model_config.hf_config.auto_map = auto_map

    return adjust


ELSEWHERE = "their-org/their.code--modeling.Model"


def loaded(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """As transformers loads it."""
    name = "transformers_modules.their_hyphen_org.their_dot_code.abc.modeling"
    folder.mkdir()
    (folder / "modeling.py").write_text(source)
    module = ModuleType(name)
    module.__file__ = str(folder / "modeling.py")
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("value", [ELSEWHERE, [None, ELSEWHERE]], ids=["one class", "several"])
def test_remote_code_of_another_repository_is_what_was_loaded_of_it(identity, monkeypatch, tmp_path, value):
    found = []
    for number, source in enumerate(("SCALE = 1", "SCALE = 1", "SCALE = 2")):
        with monkeypatch.context() as patch:
            loaded(patch, tmp_path / str(number), source)
            found.append(identity(remote(AutoModelForCausalLM=value)))
    assert different(found[0], found[1]) == set()
    assert different(found[0], found[2]) == {"code of their-org/their.code"}
    assert {each.private for each in found} == {""}


def test_remote_code_of_another_repository_that_cannot_be_read_makes_the_engine_private(identity):
    assert identity(remote(AutoModelForCausalLM=ELSEWHERE)).private.startswith("code of their-org/their.code: ")


def of_vllms_own(config: Any, caches: Any) -> None:
    remote(AutoModelForCausalLM=ELSEWHERE)(config, caches)
    config.model_config.hf_config.architectures = ["LlamaForCausalLM"]


def without_trust(config: Any, caches: Any) -> None:
    remote(AutoModelForCausalLM=ELSEWHERE)(config, caches)
    config.model_config.trust_remote_code = False


@pytest.mark.parametrize(
    "adjust",
    [of_vllms_own, without_trust, remote(AutoTokenizer=ELSEWHERE), remote(AutoModelForCausalLM="modeling.Model")],
    ids=["vLLM has the model", "it is not trusted", "a tokenizer", "the model's own repository"],
)
def test_remote_code_that_is_not_used_or_lies_beside_the_weights_keeps_an_engine_shared(identity, adjust):
    assert "their-org" not in str(identity(adjust))


def test_an_engine_with_vllms_own_code_alone_has_no_such_field(identity):
    found = identity()
    assert [name for name in found.counted if name.startswith(("code of", "plugin"))] == []
    assert found.private == ""
