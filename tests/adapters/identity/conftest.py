"""Fixtures of identities: of engines that were started with some arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from identities import CONNECTOR, Identify
from model_folder import write_model
from modelless import configure
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from kvserver.adapters.vllm.identity import Identity, config_identity, with_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("identity"))


@pytest.fixture(scope="module")
def caches(folder: Path) -> Any:
    return configure(folder, "ipc:///nowhere")[1]


@pytest.fixture(scope="module")
def start(folder: Path) -> Callable[..., VllmConfig]:
    """The effective configuration that vLLM makes of these arguments."""

    def make(**arguments: Any) -> VllmConfig:
        common = {"model": str(folder), "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 2048}
        transfer = {**CONNECTOR, "kv_role": "kv_both"}
        return EngineArgs(**{**common, "kv_transfer_config": transfer, **arguments}).create_engine_config()

    return make


@pytest.fixture(scope="module")
def identify(start: Callable[..., VllmConfig], caches: Any) -> Identify:
    """The identity of an engine that was started with these arguments."""

    def make(model_version: str = "", adjust: Callable[[VllmConfig], None] = lambda config: None, **arguments: Any):
        config = start(**arguments)
        adjust(config)
        return with_weights(config_identity(config, caches), config, model_version)

    return make


@pytest.fixture(scope="module")
def plain(identify: Identify) -> Identity:
    return identify()
