"""vLLM and SGLang compute the same model with different kernels, so they never share KV, also where keys are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import tiny_models
import torch
from sglang.srt.server_args import ServerArgs
from support.daemon import Daemon
from support.worker import Worker, make_keys

from kvserver.adapters.sglang.identity import arguments_identity, with_model
from kvserver.adapters.sglang.settings import SGLangSettings
from kvserver.protocol import Counted


def test_an_engine_that_differs_from_sglang_in_its_name_only_finds_nothing_of_its_kv(
    daemon: Daemon, make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    arguments = ServerArgs(model_path=str(tiny_models.llama(tmp_path / "model", layers=1)), device="cpu", page_size=16)
    counted = with_model(arguments_identity(arguments, torch.device("cpu")), arguments, SGLangSettings()).fields()
    as_vllm = tuple(
        msgspec.structs.replace(field, name="vllm") if field.name == "sglang" else field for field in counted
    )
    assert as_vllm != counted
    keys = make_keys(3)
    sglang, second, vllm = (make_worker(daemon, identity=fields) for fields in (counted, counted, as_vllm))
    sglang.store(keys, sglang.blocks_for(3))
    assert second.lookup(keys) == 3
    assert vllm.lookup(keys) == 0


def test_sglangs_identity_has_its_own_name() -> None:
    arguments = ServerArgs(model_path="m", device="cpu")
    names = {field.name for field in arguments_identity(arguments, torch.device("cpu")).fields()}
    assert "sglang" in names
    assert "vllm" not in names
    assert Counted("sglang", "") != Counted("vllm", "")
