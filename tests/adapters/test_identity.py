"""What must agree before KV is shared: each thing, changed alone, separates two engines."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from kvserver.adapters.vllm.identity import lora_fingerprint, model_fingerprint, model_identity
from kvserver.adapters.vllm.variants import Variants
from model_folder import write_model
from modelless import BLOCK, Engine, configure, prompt
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)


@pytest.fixture
def identity(tmp_path):
    """The identity of an engine with a fresh copy of the model at `tmp_path/name`."""

    def make(name: str = "model", incarnation: str = "one", **options):
        folder = tmp_path / name
        if not folder.exists():
            write_model(folder)
            os.utime(folder / "model.safetensors", ns=(10**18, 10**18))
        config, _ = configure(folder, "ipc:///nowhere", **options)
        return model_identity(config, incarnation)

    return make


def test_two_engines_of_one_model_have_one_identity(identity):
    assert identity() == identity(incarnation="two")


def test_copies_of_one_model_have_one_identity(identity):
    assert identity("a") == identity("b")


def set_cache(name, value):
    return lambda config, caches: setattr(config.cache_config, name, value)


def set_parallel(name):
    return lambda config, caches: setattr(config.parallel_config, name, 2)


def set_model(name, value):
    return lambda config, caches: setattr(config.model_config, name, value)


DIFFERENT = {
    "dtype": {"dtype": "float32"},
    "KV dtype": {"adjust": set_cache("cache_dtype", "fp8")},
    "quantization": {"adjust": set_model("quantization", "awq")},
    "tensor parallel size": {"adjust": set_parallel("tensor_parallel_size")},
    "pipeline parallel size": {"adjust": set_parallel("pipeline_parallel_size")},
    "overrides": {"hf_overrides": {"rms_norm_eps": 1e-3}},
    "rope": {"hf_overrides": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}},
    "hash algorithm": {"adjust": set_cache("prefix_caching_hash_algo", "sha256_cbor")},
    "speculation": {"drafts": 2},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_must_agree_changes_the_identity(identity, what):
    assert identity(**DIFFERENT[what]) != identity()


@pytest.mark.parametrize(
    "options",
    [
        {"hf_overrides": lambda config: config},
        {"adjust": set_cache("calculate_kv_scales", True)},
        {"adjust": lambda config, caches: setattr(config.load_config, "load_format", "dummy")},
    ],
    ids=["a function overrides", "KV scales made at run time", "random weights"],
)
def test_what_nobody_can_reproduce_is_shared_with_nobody(identity, options):
    one, two = identity(incarnation="one", **options), identity(incarnation="two", **options)
    assert one != two
    assert one == identity(incarnation="one", **options), "but by all ranks of one engine"


# ---- models -----------------------------------------------------------------------------------


def touch(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(2 * 10**18, 2 * 10**18))


def grow(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"other weights")
    os.utime(folder / "model.safetensors", ns=(10**18, 10**18))


def add_shard(folder: Path) -> None:
    (folder / "model-00002.safetensors").write_bytes(b"more")


def change_config(folder: Path) -> None:
    write_model(folder, rms_norm_eps=1e-6)
    os.utime(folder / "model.safetensors", ns=(10**18, 10**18))


@pytest.mark.parametrize("change", [touch, grow, add_shard, change_config])
def test_a_folder_whose_files_change_is_another_model(identity, tmp_path, change):
    before = identity()
    change(tmp_path / "model")
    assert identity().model != before.model


def test_other_files_in_the_folder_do_not_matter(identity, tmp_path):
    before = identity()
    (tmp_path / "model" / "README.md").write_text("A model.")
    assert identity() == before


def test_a_hub_model_is_its_resolved_commit():
    config = SimpleNamespace(_commit_hash="abc")
    assert model_fingerprint("org/name", config, "one") == model_fingerprint("org/name", config, "two")
    other = SimpleNamespace(_commit_hash="def")
    assert model_fingerprint("org/name", config, "one") != model_fingerprint("org/name", other, "one")
    assert model_fingerprint("org/name", config, "one") != model_fingerprint("org/other", config, "one")


def test_a_model_of_unknown_commit_is_shared_with_nobody():
    config = SimpleNamespace(_commit_hash=None)
    assert model_fingerprint("org/name", config, "one") != model_fingerprint("org/name", config, "two")


# ---- through the daemon -----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["KV dtype", "quantization", "overrides", "speculation"])
def test_engines_that_disagree_find_nothing_of_each_other(make_daemon, make_engine, what):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    assert make_engine(daemon, **DIFFERENT[what]).generate("warm", TOKENS).external == 0
    namespaces = {instance["namespace"] for instance in daemon.status()["instances"]}
    assert len(namespaces) == 2


def test_engines_whose_hashes_start_elsewhere_find_nothing_of_each_other(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    other = make_engine(daemon)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"\7" * 32)
    assert other.generate("warm", TOKENS).external == 0


def test_a_cache_salt_separates_requests(make_daemon, make_engine):
    daemon = make_daemon()
    cold, warm = make_engine(daemon), make_engine(daemon)
    for engine, salt, expected in [(cold, "a", 0), (warm, "b", 0), (warm, "a", 2 * CHUNK), (warm, None, 0)]:
        answer = engine.add(f"{salt}", TOKENS, cache_salt=salt)
        engine.run()
        assert answer.right
        assert answer.external == expected


# ---- LoRA -------------------------------------------------------------------------------------


def adapter(folder: Path, weights: bytes = b"lora", config: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    os.utime(folder / "adapter_model.safetensors", ns=(10**18, 10**18))
    return folder


def lora(folder: Path, name: str = "sql", number: int = 1) -> LoRARequest:
    return LoRARequest(name, number, str(folder))


def test_a_lora_is_its_files(tmp_path):
    one = lora_fingerprint(lora(adapter(tmp_path / "one")))
    assert one == lora_fingerprint(lora(adapter(tmp_path / "copy"), number=5))
    assert one != lora_fingerprint(lora(adapter(tmp_path / "longer", weights=b"other lora")))
    assert one != lora_fingerprint(lora(adapter(tmp_path / "ranked", config='{"r": 8}')))
    assert one != lora_fingerprint(lora(tmp_path / "one", name="chat"))


def ask(engine: Engine, name: str, request: LoRARequest | None) -> int:
    answer = engine.add(name, TOKENS, lora_request=request)
    engine.run()
    assert answer.right
    return answer.external


def test_a_lora_shares_with_the_same_files_only(make_daemon, make_engine, tmp_path):
    """vLLM hashes a LoRA's name and path, not its files."""
    daemon = make_daemon()
    folder = adapter(tmp_path / "one")
    cold = make_engine(daemon)
    assert ask(cold, "plain", None) == 0
    assert ask(cold, "lora", lora(folder)) == 0
    assert ask(make_engine(daemon), "warm", lora(folder)) == 2 * CHUNK
    assert ask(make_engine(daemon), "plain", None) == 2 * CHUNK
    adapter(folder, weights=b"trained further")
    assert ask(make_engine(daemon), "changed", lora(folder)) == 0


def test_the_daemon_says_how_long_chunks_are(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=BLOCK)
    make_engine(daemon).generate("cold", TOKENS)
    assert daemon.status()["instances"][0]["chunk_tokens"] == BLOCK
    assert make_engine(daemon).generate("warm", TOKENS).external == 8 * BLOCK


# ---- variants ---------------------------------------------------------------------------------


def test_a_variant_is_a_short_text_that_tells_chain_weights_and_lora_apart(monkeypatch, tmp_path):
    version = ""
    variants = Variants("life", lambda: version)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"\1" * 32)
    found = [variants.of(None), variants.of(lora(adapter(tmp_path / "one"))), Variants("life", lambda: "v1").of(None)]
    variants.weights_changed()
    found.append(variants.of(None))
    variants.weights_changed()
    found.append(variants.of(None))
    version = "v2"
    variants.weights_changed()
    found.append(variants.of(None))
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"\2" * 32)
    found.append(Variants("life", lambda: version).of(None))
    assert len(set(found)) == len(found)
    assert {len(text) for text in found} == {32, 65}  # a LoRA's stands behind the epoch's; every Store carries it
    assert Variants("another life", lambda: "v2").of(None) == found[-1]
