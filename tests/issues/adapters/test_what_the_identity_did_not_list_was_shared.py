"""The identity was a list of known fields, so engines that differed in anything else shared KV.

The worst: weights of equal size and mtime; two real engines served each other's tokens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from made_up_model import prompt
from model_folder import write_lora, write_model
from vllm.config import MultiModalConfig
from vllm.lora.request import LoRARequest

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 1024,
    "factor": 4.0,
}


def configured(**parts: dict[str, Any]) -> dict[str, Any]:
    """Options of an engine whose effective configuration has these fields: part -> field -> value."""

    def adjust(config: Any, caches: Any) -> None:
        for part, fields in parts.items():
            for name, value in fields.items():
                setattr(getattr(config, part), name, value)

    return {"adjust": adjust}


def images(**options: Any) -> dict[str, Any]:
    return configured(model_config={"multimodal_config": MultiModalConfig(**options)})


UNLIKE = {
    "weights at two places of object storage": [
        configured(model_config={"model_weights": f"s3://bucket/{name}"}) for name in "ab"
    ],
    "tensorizer's weights": [
        configured(load_config={"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": name}})
        for name in "ab"
    ],
    "the length of a context under LongRoPE": [
        {"hf_overrides": {"rope_parameters": LONGROPE}, "max_model_len": length} for length in (1000, 2000)
    ],
    "arguments of the multimodal processor": [images(mm_processor_kwargs={"num_crops": crops}) for crops in (4, 16)],
    "an unknown field": [configured(cache_config={"of_a_later_version": value}) for value in (1, 2)],
    "a kernel": [configured(attention_config={"indexer_kv_dtype": dtype}) for dtype in ("auto", "fp8")],
    "a variable of vLLM": [{}, {"environment": ("VLLM_MLA_DISABLE", "1")}],
}


@pytest.mark.parametrize("what", UNLIKE)
def test_engines_that_differ_share_nothing(make_daemon, make_engine, monkeypatch, what):
    daemon = make_daemon()
    for number, options in enumerate(UNLIKE[what]):
        options = dict(options)
        monkeypatch.setenv(*options.pop("environment", ("UNRELATED", "1")))
        assert make_engine(daemon, **options).generate(str(number), TOKENS).external == 0


def test_weights_of_equal_size_and_mtime_are_not_taken_for_each_other(make_daemon, make_engine, tmp_path):
    daemon = make_daemon()
    folders = [write_model(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    files = [(folder / "model.safetensors").stat() for folder in folders]
    assert files[0].st_size == files[1].st_size
    assert files[0].st_mtime_ns == files[1].st_mtime_ns
    for folder in folders:
        assert make_engine(daemon, folder).generate(folder.name, TOKENS).external == 0


def test_weights_with_new_mtimes_at_another_place_are_still_shared(make_daemon, make_engine, tmp_path):
    daemon = make_daemon()
    make_engine(daemon, write_model(tmp_path / "one")).generate("cold", TOKENS)
    copy = write_model(tmp_path / "a pod's mount")
    os.utime(copy / "model.safetensors")
    assert make_engine(daemon, copy).generate("warm", TOKENS).external == 2 * CHUNK


def adapter(folder: Path, seed: int) -> LoRARequest:
    return LoRARequest("sql", 1, str(write_lora(folder, seed=seed)))


def test_loras_of_equal_size_and_mtime_are_not_taken_for_each_other(make_daemon, make_engine, tmp_path):
    daemon = make_daemon()
    for seed in (1, 2):
        lora = adapter(tmp_path / "lora", seed)
        assert make_engine(daemon).generate(str(seed), TOKENS, lora_request=lora).external == 0


def test_a_lora_that_the_hub_may_have_replaced_is_shared_with_no_other_engine(make_daemon, make_engine):
    daemon = make_daemon()
    for name in ("one", "two"):
        lora = LoRARequest("sql", 1, "org/some-lora")
        assert make_engine(daemon).generate(name, TOKENS, lora_request=lora).external == 0


def test_a_lora_whose_files_were_replaced_is_served_without_cache(make_daemon, make_engine, tmp_path):
    """vLLM may have read them again, after an eviction or in place; its own blocks are of the old ones either way."""
    daemon = make_daemon()
    engine = make_engine(daemon, extra={"kvserver.on_prefix_reset": "keep"})
    lora = adapter(tmp_path / "lora", 1)
    engine.generate("old", TOKENS, lora_request=lora)
    stored = daemon.status()["l1"]["chunks"]
    assert stored == 2
    adapter(tmp_path / "lora", 2)
    assert engine.scheduler.reset_prefix_cache()
    for request in (
        lora,
        LoRARequest("sql", 1, lora.lora_path, load_inplace=True),
        LoRARequest("sql", 2, lora.lora_path),
    ):
        assert engine.generate("new", TOKENS, lora_request=request).external == 0
    assert daemon.status()["l1"]["chunks"] == stored
    assert engine.connector.scheduler.counters["replaced_lora_requests"] >= 3
    assert engine.generate("elsewhere", TOKENS, lora_request=adapter(tmp_path / "a new path", 2)).external == 0
    assert daemon.status()["l1"]["chunks"] == stored + 2
    assert make_engine(daemon).generate("old", TOKENS, lora_request=adapter(tmp_path / "lora", 1)).external == 2 * CHUNK


def test_what_is_computed_after_a_loras_files_were_replaced_is_not_stored(make_daemon, make_engine, tmp_path):
    """The request began with the old ones, and vLLM may read the new ones in any step."""
    daemon = make_daemon()
    engine = make_engine(daemon, max_tokens_per_step=CHUNK)
    answer = engine.add("long", prompt(2, 24 * CHUNK), lora_request=adapter(tmp_path / "lora", 1))
    engine.run(until=lambda: len(engine.stores) >= 1)
    adapter(tmp_path / "lora", 2)
    engine.run()
    assert answer.right
    assert 1 <= daemon.status()["l1"]["chunks"] < 24
