"""The text that goes with every key: weights epoch, LoRA, and whether a request shares with other engines at all."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_model import prompt
from model_folder import write_lora
from modelless import Engine
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils

from kvserver.adapters.vllm.identity import lora_fingerprint
from kvserver.adapters.vllm.variants import Variants

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)


def lora(folder: Path, name: str = "sql", number: int = 1, **options: Any) -> LoRARequest:
    return LoRARequest(name, number, str(folder), **options)


def request(lora_request: LoRARequest | None = None, mm_features: Any = ()) -> Any:
    return SimpleNamespace(
        lora_request=lora_request, mm_features=list(mm_features), prompt_embeds=None, prompt_is_token_ids=None
    )


def test_a_lora_is_its_files(tmp_path):
    one = lora_fingerprint(lora(write_lora(tmp_path / "one")))
    assert one == lora_fingerprint(lora(write_lora(tmp_path / "copy"), number=5))
    os.utime(tmp_path / "copy" / "adapter_model.safetensors")
    assert one == lora_fingerprint(lora(tmp_path / "copy"))
    write_lora(tmp_path / "one" / "checkpoint-500", seed=2)
    assert one == lora_fingerprint(lora(tmp_path / "one")), "vLLM reads no folders in it"
    assert one != lora_fingerprint(lora(write_lora(tmp_path / "other", seed=1)))
    assert one != lora_fingerprint(lora(write_lora(tmp_path / "ranked", config='{"r": 8}')))
    assert one != lora_fingerprint(lora(tmp_path / "one", name="chat"))
    assert one != lora_fingerprint(lora(tmp_path / "one", is_3d_lora_weight=True))
    elsewhere = SimpleNamespace(lora_path=str(tmp_path / "one"), tensorizer_config_dict={"tensorizer_uri": "s3://x"})
    assert lora_fingerprint(elsewhere) is None, "up to vLLM 0.30 its weights may be tensorizer's"


def ask(engine: Engine, name: str, request: LoRARequest | None) -> int:
    answer = engine.add(name, TOKENS, lora_request=request)
    engine.run()
    assert answer.right
    return answer.external


def test_a_lora_shares_with_the_same_files_only(make_daemon, make_engine, tmp_path):
    """vLLM hashes a LoRA's name and path, not its files."""
    daemon = make_daemon()
    folder = write_lora(tmp_path / "one")
    cold = make_engine(daemon)
    assert ask(cold, "plain", None) == 0
    assert ask(cold, "lora", lora(folder)) == 0
    assert ask(make_engine(daemon), "warm", lora(folder)) == 2 * CHUNK
    assert ask(make_engine(daemon), "plain", None) == 2 * CHUNK
    write_lora(folder, seed=1)
    assert ask(make_engine(daemon), "changed", lora(folder)) == 0


def test_a_variant_is_a_short_text_that_distinguishes_chain_weights_and_lora(monkeypatch, tmp_path):
    version = ""
    variants = Variants("incarnation", lambda: version)
    tuned = request(lora(write_lora(tmp_path / "one")))
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"\1" * 32)
    found = [variants.of(request()), variants.of(tuned), Variants("incarnation", lambda: "v1").of(request())]
    variants.weights_changed("test")
    found.append(variants.of(request()))
    variants.weights_changed("test")
    found.append(variants.of(request()))
    version = "v2"
    variants.weights_changed("test")
    found.append(variants.of(request()))
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"\2" * 32)
    found.append(Variants("incarnation", lambda: version).of(request()))
    assert len(set(found)) == len(found)
    assert {len(variant.text) for variant in found if variant} == {30, 61}  # a LoRA's follows the epoch's
    assert Variants("another incarnation", lambda: "v2").of(request()) == found[-1]


@pytest.mark.parametrize("trusts", [False, True])
def test_a_prompt_with_images_is_shared_only_where_their_names_are_trusted(trusts):
    one, again, other = (Variants(incarnation, lambda: "", trusts_uuids=trusts) for incarnation in ("a", "a", "b"))
    image = request(mm_features=["an image"])
    assert one.of(image) == again.of(image)
    assert (one.of(image) == other.of(image)) is trusts
    assert (one.of(image) == one.of(request())) is trusts


def test_a_lora_of_the_hub_is_shared_with_no_other_engine():
    tuned = request(LoRARequest("sql", 1, "org/some-lora"))
    one, again, other = (Variants(incarnation, lambda: "").of(tuned) for incarnation in ("a", "a", "b"))
    assert one == again != other
    second = Variants("a", lambda: "").of(request(LoRARequest("sql", 1, "org/another")))
    assert second != one
