"""Start and drive real SGLang engines from tests."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from engine_environment import ENVIRONMENT

Prompt = list[int]
PAGE = 32
START_SECONDS = 600
ANSWER_SECONDS = 400
NICE = ["nice", "-n", "10"]  # engines yield to the daemon
# A flush of the cache is how tests empty an engine's own cache. Tests expect hits, also on a busy machine.
# A busy machine copies slowly for a moment. That must not bound the loads of tests that compare what was loaded.
EXTRA = {
    "kvserver.load_share": 1000.0,
    "kvserver.load_wait_ms": 10_000.0,
    "kvserver.on_prefix_reset": "keep",
    "kvserver.lookup_poll_ms": 1000,
    "kvserver.lookup_timeout_ms": 1000,
}


class EngineEnded(AssertionError):
    """The engine's process has ended where an answer was expected."""


class Engine:
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
        self.log = log
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
        environ = {**ENVIRONMENT, **(environ or {})}
        self._log_file = log.open("w")
        self.process = subprocess.Popen(
            [*NICE, sys.executable, str(Path(__file__).with_name("engine_main.py")), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            text=True,
            env=environ,
            process_group=0,
        )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._ready = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"ended": True})

    def receive(self, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        reply = self._answers.get(timeout=timeout)
        if "ended" in reply:
            raise EngineEnded(f"with status {self.process.wait()}; the end of {self.log}:\n{self.tail()}")
        assert "error" not in reply, f"{reply['error']}\n{self.tail()}"
        return reply

    def wait_ready(self) -> Engine:
        if not self._ready:
            assert self.receive(START_SECONDS).get("ready"), self.tail()
            self._ready = True
        return self

    def send(self, op: str, **fields: Any) -> None:
        self.wait_ready()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self.process.stdin.flush()

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        self.send(op, **fields)
        return self.receive()

    def generate(
        self, prompts: list[Prompt], max_tokens: int = 16, salt: str | None = None, session: str | None = None
    ) -> list[dict[str, Any]]:
        answer = self.ask("generate", prompts=prompts, max_tokens=max_tokens, salt=salt, session=session)
        outputs: list[dict[str, Any]] = answer["outputs"]
        return outputs

    def flush(self) -> None:
        """Empty the engine's own cache, so that only the daemon can give hits."""
        assert self.ask("flush")["ok"]

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text().splitlines()[-lines:])

    def kill(self) -> None:
        """Kill -9 the engine's processes, as an out-of-memory kill would."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log_file.close()
