"""Start and drive real SGLang engines from tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine_environment import ENVIRONMENT
from support.engine_driver import EngineDriver, Prompt

PAGE = 32
# A flush of the cache is how tests empty an engine's own cache. Tests expect hits, also on a busy machine.
# A busy machine copies slowly for a moment. That must not bound the loads of tests that compare what was loaded.
EXTRA = {
    "kvserver.load_share": 1000.0,
    "kvserver.load_wait_ms": 10_000.0,
    "kvserver.on_prefix_reset": "keep",
    "kvserver.lookup_poll_ms": 1000,
    "kvserver.lookup_timeout_ms": 1000,
}


class Engine(EngineDriver):
    """One SGLang engine: the process that drives it, its scheduler and detokenizer. `endpoint` None means no linker at all."""

    def __init__(
        self,
        model: Path,
        endpoint: str | None,
        log: Path,
        *,
        extra: dict[str, Any] | None = None,
        linker: tuple[str, str] = ("kvserver.adapters.sglang", "KVServerLinker"),
        environ: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        arguments: dict[str, Any] = {
            "model_path": str(model),
            "skip_tokenizer_init": True,
            "device": "cpu",
            "attention_backend": "torch_native",
            "dtype": "float32",
            "page_size": PAGE,
            "max_total_tokens": 8192,
            "max_running_requests": 8,
            "chunked_prefill_size": 2048,
            "disable_cuda_graph": True,
            "enable_cache_report": True,
            "log_level": "info",
        } | options
        if endpoint is not None:
            config = {
                "linker_module_path": linker[0],
                "linker": linker[1],
                "linker_extra_config": {"kvserver.endpoint": endpoint, **EXTRA, **(extra or {})},
            }
            arguments |= {
                "enable_unified_cache_external_linker": True,
                "unified_cache_external_linker_backend": "dynamic",
                "unified_cache_external_linker_config": config,
            }
        command = [sys.executable, str(Path(__file__).with_name("engine_main.py")), json.dumps(arguments)]
        super().__init__(command, log, {**ENVIRONMENT, **(environ or {})})

    def generate(
        self, prompts: list[Prompt], max_tokens: int = 16, salt: str | None = None, session: str | None = None
    ) -> list[dict[str, Any]]:
        answer = self.ask("generate", prompts=prompts, max_tokens=max_tokens, salt=salt, session=session)
        outputs: list[dict[str, Any]] = answer["outputs"]
        return outputs

    def flush(self) -> None:
        """Empty the engine's own cache, so that only the daemon can give hits."""
        assert self.ask("flush")["ok"]
