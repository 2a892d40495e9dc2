"""Before 0.31 vLLM hashes a LoRA's name without its path: where a name moved to a new path, vLLM found blocks of the old files, and
they were stored as the new ones'.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up_model import prompt
from model_folder import write_lora
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)


def at(folder: Path, seed: int) -> LoRARequest:
    return LoRARequest("sql", 1, str(write_lora(folder, seed=seed)))


@pytest.mark.parametrize(("version", "stored"), [("0.30.0", 2), ("0.31.0", 4)])
def test_a_lora_at_a_new_path_is_another_one_only_where_vllm_hashes_its_path(
    make_daemon, make_engine, monkeypatch, tmp_path, version, stored
):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, extra={"kvserver.on_prefix_reset": "keep"})
    monkeypatch.setattr("vllm.__version__", version)
    engine.generate("old", TOKENS, lora_request=at(tmp_path / "old", 1))
    assert engine.scheduler.reset_prefix_cache()
    assert engine.generate("new", TOKENS, lora_request=at(tmp_path / "new", 2)).external == 0
    assert daemon.status()["l1"]["chunks"] == stored


def test_a_lora_that_was_at_another_path_too_is_stored_under_neither(make_daemon, make_engine, monkeypatch, tmp_path):
    """vLLM's own blocks have the name only, so requests with the old path find blocks of the new one's files."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon)
    monkeypatch.setattr("vllm.__version__", "0.30.0")
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", lambda of: [of.lora_request.lora_name])
    old, new = at(tmp_path / "old", 1), at(tmp_path / "new", 2)
    engine.generate("old", TOKENS, lora_request=old)
    more = prompt(2, 2 * CHUNK + 10)
    engine.generate("new", more, lora_request=new)
    assert engine.generate("old again", [*more, *prompt(3, 2 * CHUNK)], lora_request=old).local > 0
    assert daemon.status()["l1"]["chunks"] == 2
