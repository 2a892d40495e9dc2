"""Routers of others that follow KV events, as processes: Dynamo's indexer and vLLM's router, in an environment of their own.

Owns: their processes, the workers that vLLM's router needs, and questions to both. Refuses to know: the daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from .daemon import wait_until
from .ports import reserved_port

VENV = Path(os.environ.get("KVSERVER_ROUTERS", Path(__file__).parents[2] / "build" / "routers"))
MODEL = "test/model"


def needs_routers() -> None:
    if not (VENV / "bin" / "vllm-router").exists():
        pytest.skip("no routers: `make build/routers/.installed`")


def post(url: str, body: dict[str, Any], timeout: float = 20.0) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


class _Process:
    def __init__(self, command: Sequence[str], log: Path, ports: Sequence[str], env: dict[str, str]) -> None:
        """`ports`: flags that are given ports of their own; that of HTTP first."""
        self._reserved = [reserved_port() for _ in ports]
        numbers = [str(port) for _, port in self._reserved]
        self.log, self.url = log, f"http://127.0.0.1:{numbers[0]}"
        words = [*command, *(word for pair in zip(ports, numbers, strict=True) for word in pair)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, **env})
        try:
            wait_until(self._is_up, what=f"the router answers; {log}")
        except BaseException:
            self.close()
            raise

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=1.0):
            return True
        return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20.0)
        for holder, _ in self._reserved:
            holder.close()


class DynamoIndexer(_Process):
    def __init__(self, folder: Path) -> None:
        command = [str(VENV / "bin" / "python"), "-m", "dynamo.indexer", "--threads", "1"]
        super().__init__(command, folder / "dynamo.log", ["--port"], {"DYN_LOG": "info"})

    def register(self, number: int, endpoint: str, block_tokens: int, replay_endpoint: str | None = None) -> None:
        post(
            f"{self.url}/register",
            {
                "instance_id": number,
                "endpoint": endpoint,
                "model_name": MODEL,
                "block_size": block_tokens,
                "replay_endpoint": replay_endpoint,
            },
        )

    def tokens(self, tokens: Sequence[int]) -> dict[str, dict[str, int]]:
        """By worker and tier (`gpu`, `cpu`, `disk`): the tokens that it finds cached up to that tier."""
        return dict(post(f"{self.url}/query", {"token_ids": list(tokens), "model_name": MODEL})["instances"])


class VllmRouter(_Process):
    """vLLM's router before workers that answer with their number."""

    def __init__(self, folder: Path, endpoints: Sequence[str], block_tokens: int) -> None:
        self._workers = [_worker(str(number)) for number in range(len(endpoints))]
        urls = [f"http://127.0.0.1:{worker.server_address[1]}" for worker in self._workers]
        sources = [part for at in zip(urls, endpoints, strict=True) for part in ("--kv-event-source", "=".join(at))]
        command = [
            *(str(VENV / "bin" / "vllm-router"), "--worker-urls", *urls, "--worker-startup-check-interval", "1"),
            *("--policy", "kv_aware", *sources, "--kv-event-block-size", str(block_tokens), "--kv-event-model", MODEL),
        ]
        ports = ["--port", "--prometheus-port"]
        super().__init__(command, folder / "vllm-router.log", ports, {"RUST_LOG": "vllm_router_rs=debug"})

    def chosen(self, tokens: Sequence[int]) -> int:
        """The number of the worker that the prompt is sent to."""
        body = {"model": MODEL, "prompt": list(tokens), "max_tokens": 1}
        return int(post(f"{self.url}/v1/completions", body)["choices"][0]["text"])

    def close(self) -> None:
        super().close()
        for worker in self._workers:
            worker.shutdown()
            worker.server_close()


def _worker(name: str) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            choice = {"text": name, "index": 0, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            self._answer(
                {"id": "x", "object": "text_completion", "created": 1, "model": MODEL}
                | {"choices": [choice], "usage": usage}
            )

        def _answer(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
