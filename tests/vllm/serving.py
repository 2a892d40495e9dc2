"""`vllm serve` as a process of its own, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import runner_v2
from engines import FORGETS, TIMEOUTS, Prompt
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.engine_driver import NICE, START_SECONDS
from support.ports import reserved_port

MODEL = "tiny"


def completion(prompt: Prompt, count: int, **more: Any) -> dict[str, Any]:
    """The body of a request, answered with token ids."""
    exact = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL, "prompt": prompt, "max_tokens": count, **exact, **more}


class Server:
    """wait_ready() before asking, close() at the end. Its own caches can be reset, as its developers do."""

    def __init__(
        self,
        model: Path,
        endpoint: str,
        log: Path,
        engine_id: str,
        extra: dict[str, Any] | None = None,
        role: str = "kv_both",
        **options: object,
    ) -> None:
        self.engine_id = engine_id
        self._reservation, self.port = reserved_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        transfer = {
            "kv_connector": "KVServerConnector",
            "kv_connector_module_path": "kvserver.adapters.vllm",
            "kv_role": role,
            "engine_id": engine_id,
            "kv_connector_extra_config": {"kvserver.endpoint": endpoint, **FORGETS, **TIMEOUTS, **(extra or {})},
        }
        options = {
            "model": model,
            "port": self.port,
            "served_model_name": MODEL,
            "dtype": "float32",
            "block_size": 32,
            "num_gpu_blocks_override": 200,
            "max_model_len": 2048,
            "kv_transfer_config": json.dumps(transfer),
        } | options
        values = {name: [] if value is True else [str(value)] for name, value in options.items()}
        flags = [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", *value)]
        self._log_file = log.open("w")
        self.process = subprocess.Popen(
            [
                *[*NICE, sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
                *[*flags, "--skip-tokenizer-init", "--enforce-eager"],
            ],
            cwd=log.parent,  # `-m` puts its folder first, whose kvserver/ would hide the installed one
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **runner_v2.environment(),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_SERVER_DEV_MODE": "1",
            },
            process_group=0,
        )

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self._get("/health")
                assert (runner_v2.CHECKED in self.log.read_text()) == (runner_v2.DEFAULT == "v2"), self.tail()
                return self
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.2)

    def generate(self, prompt: Prompt, count: int = 8) -> list[int]:
        tokens: list[int] = self.post("/v1/completions", completion(prompt, count))["choices"][0]["token_ids"]
        return tokens

    def forget(self) -> None:
        """Empty its own prefix cache."""
        self.post("/reset_prefix_cache", {})

    def post(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json", **named}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def metrics(self, **labels: str) -> dict[str, float]:
        """vLLM's own, by name; of those with more labels than the engine's only what has these."""
        expected = {"model_name": MODEL, "engine": "0", **labels}
        families = text_string_to_metric_families(self._get("/metrics"))
        return {s.name: s.value for family in families for s in family.samples if s.labels == expected}

    def samples(self, name: str) -> list[Sample]:
        """Of vLLM's own, with their labels."""
        families = text_string_to_metric_families(self._get("/metrics"))
        return [sample for family in families for sample in family.samples if sample.name == name]

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def tail(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-40:])

    def kill(self) -> None:
        """Kill -9 the server and its engine."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._log_file.closed:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reservation.close()
        self._log_file.close()
