"""With `kvserver.weights_digest=whole` every byte of a LoRA was read in the scheduler's thread, before its first request: a second for
each gigabyte, in which no request of the engine made a step."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_folder import write_lora
from support.daemon import wait_until
from vllm.lora.request import LoRARequest

from kvserver.adapters.vllm import loras as module
from kvserver.adapters.vllm.identity import lora_fingerprint
from kvserver.adapters.vllm.variants import Variants


@pytest.fixture
def slow_files(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The files of LoRAs are read once it is set."""
    go_on = threading.Event()

    def read(*of: Any) -> str | None:
        if not go_on.wait(20):
            raise OSError("the files are too slow")
        return lora_fingerprint(*of)

    monkeypatch.setattr(module, "lora_fingerprint", read)
    return go_on


def request(lora: LoRARequest | None) -> Any:
    return SimpleNamespace(lora_request=lora, mm_features=[], prompt_embeds=None, prompt_is_token_ids=None)


def test_requests_of_a_lora_run_without_cache_until_its_files_are_read(
    tmp_path: Path, slow_files: threading.Event
) -> None:
    variants = Variants("incarnation", lambda: "", whole_digests=True, hash_algorithm="sha256")
    one, other = (LoRARequest(name, 1, str(write_lora(tmp_path / name, seed=seed))) for seed, name in enumerate("ab"))
    assert variants.of(request(one)) is None
    assert variants.of(request(other)) is None
    assert variants.of(request(None)) is not None, "others go on"
    slow_files.set()
    wait_until(lambda: variants.of(request(one)) is not None)
    wait_until(lambda: variants.of(request(other)) is not None)
    again = Variants("incarnation", lambda: "", whole_digests=True, hash_algorithm="sha256")
    wait_until(lambda: again.of(request(one)) is not None)
    assert again.of(request(one)) == variants.of(request(one))


def test_files_that_are_replaced_before_they_were_read_are_never_those_of_the_lora(
    tmp_path: Path, slow_files: threading.Event
) -> None:
    variants = Variants("incarnation", lambda: "", whole_digests=True, hash_algorithm="sha256")
    lora = LoRARequest("sql", 1, str(write_lora(tmp_path / "sql")))
    assert variants.of(request(lora)) is None
    write_lora(tmp_path / "sql", seed=1)
    other = LoRARequest("other", 2, str(write_lora(tmp_path / "other")))
    assert variants.of(request(other)) is None
    slow_files.set()
    wait_until(lambda: variants.of(request(other)) is not None)
    assert variants.of(request(lora)) is None
