"""Start and drive real vLLM engines from tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import runner_v2
from support.daemon import Daemon, wait_until
from support.engine_driver import EngineDriver, Prompt

# Tests wait for loads that never end. All else may take its time on a busy machine, as lookups of which a test expects a hit.
TIMEOUTS = {"kvserver.load_timeout_ms": 4000, "kvserver.store_timeout_ms": 60_000, "kvserver.lookup_timeout_ms": 1000}
BY_NAME = {
    "kv_connector_module_path": None
}  # `transfer` of an engine that finds the connector by its name, from vLLM's plugin
FORGETS = {"kvserver.on_prefix_reset": "keep"}  # a reset of the prefix cache is how tests empty an engine's own cache


class Engine(EngineDriver):
    """One vLLM engine process. `endpoint` None means no connector at all. `options` are vLLM's, `exact_states` and `measures_speed`.

    `runner` is vLLM's model runner: "v2" with asynchronous scheduling, as on GPUs, or "v1" without.

    Unless it measures its speed of prefill, the daemon, which then knows none, reads all that storage has: a tiny model computes a
    prompt so fast that on a busy machine no storage is worth reading.
    """

    def __init__(
        self,
        model: Path,
        endpoint: str | None,
        log: Path,
        *,
        extra: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        python: str = sys.executable,
        runner: str = runner_v2.DEFAULT,
        **options: Any,
    ) -> None:
        self.runner = runner
        self.ranks = options.get("tensor_parallel_size", 1)
        arguments: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "block_size": 32,
            "num_gpu_blocks_override": 200,
            "max_model_len": 2048,
            "disable_log_stats": False,
        } | options
        if endpoint is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": "KVServerConnector",
                "kv_connector_module_path": "kvserver.adapters.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"kvserver.endpoint": endpoint} | FORGETS | (extra or {}),
            } | (transfer or {})
        environ = {
            **os.environ,
            **runner_v2.environment(runner),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        command = [python, str(Path(__file__).with_name("engine_main.py")), json.dumps(arguments)]
        super().__init__(command, log, environ)

    def check(self, ready: dict[str, Any]) -> None:
        if (runs := (ready["runner"], ready["asynchronous"])) != (self.runner, self.runner == "v2"):
            self.kill()
            raise AssertionError(f"(runner, asynchronous) is {runs}, not as {self.runner}\n{self.tail()}")

    def generate(self, prompts: list[list[int]], max_tokens: int = 16) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = self.ask("generate", prompts=prompts, max_tokens=max_tokens)["outputs"]
        return outputs

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = self.ask("metrics")["metrics"]
        return values

    def counters(self) -> dict[str, Any]:
        return self.ask("counters")

    def forget(self) -> None:
        """Empty the engine's own prefix cache, so that only the daemon can give hits."""
        assert self.ask("reset_prefix_cache")["ok"]

    def wait_for_stores(self, seconds: float = 20) -> None:
        """Until every store was acknowledged."""
        assert not self.ask("wait_for_stores", seconds=seconds)["pending"]

    def owns_no_block_after(self, text: Prompt) -> bool:
        """Whether neither a request nor a copy keeps a block, after one more request and the ends of its stores.

        Under asynchronous scheduling the last step of a request is processed with the next one's.
        """
        self.generate([text], 1)
        self.wait_for_stores()
        return bool(self.counters()["blocks_in_use"] == 0)

    def close(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.kill()


class Engines:
    """Every engine by name, started when first needed, all against one endpoint."""

    def __init__(self, model: Path, folder: Path, endpoint: str) -> None:
        self.model = model
        self.endpoint = endpoint
        self._folder = folder
        self._engines: dict[str, Engine] = {}

    def get(self, name: str, **options: object) -> Engine:
        """The options count only when this starts the engine."""
        engine = self._engines.get(name)
        if engine is None or engine.process.poll() is not None:
            engine = self.start(name, **options)
            self._engines[name] = engine
        return engine

    def start(self, name: str, *, endpoint: str | None = "shared", **options: object) -> Engine:
        """One more engine; the caller ends it."""
        model = Path(str(options.pop("model", self.model)))
        target = self.endpoint if endpoint == "shared" else endpoint
        return Engine(model, target, self._folder / f"{name}.log", **options)  # type: ignore[arg-type]

    def live(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.process.poll() is None]

    def wait_registered(self, daemon: Daemon) -> None:
        """Until every running engine of this group is registered in the daemon, with a namespace, and knows it: until then
        the worker half drops stores."""
        live = [engine.wait_ready() for engine in self.live()]
        wait_until(
            lambda: sum(bool(i["namespace"]) for i in daemon.status()["instances"]) >= len(live),
            30,
            f"{len(live)} instances registered",
        )
        for engine in live:
            wait_until(lambda e=engine: e.counters()["connected"], 10, "both halves connected")

    def close(self) -> None:
        """Kill them, since to end takes a processor 4 s; but ranks share memory by name, which only they remove."""
        for engine in self._engines.values():
            if engine.ranks > 1:
                engine.close()
            else:
                engine.kill()


@contextlib.contextmanager
def engine_group(model: Path, folder: Path) -> Iterator[Engines]:
    """Engines of one model on an endpoint of their own; they end with it."""
    holder = Daemon()  # only for its folder: a short path for the endpoint
    group = Engines(model, folder, holder.endpoint)
    try:
        yield group
    finally:
        group.close()
        holder.close()
