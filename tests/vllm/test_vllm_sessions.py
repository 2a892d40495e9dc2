"""Sessions of real requests over HTTP: vLLM's `session_id` in the body or a header, and kvserver's own name on older vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import Engines, Prompt
from serving import Server, completion
from support.daemon import Daemon, wait_until

from kvserver.protocol import salt_digest

Make = Callable[..., Prompt]


def test_sessions_of_http_requests_are_those_of_the_daemon(
    model: Path, engines: Engines, prompt: Make, tmp_path: Path
) -> None:
    server = Server(model, engines.endpoint, tmp_path / "log", "sessions")
    daemon = Daemon(endpoint=engines.endpoint, l1_size="256MiB", chunk_tokens=256)

    def sessions() -> dict[str, dict[str, Any]]:
        return {one["session_id"]: one for one in json.loads(daemon.http("/sessions")[1])["sessions"]}

    def ask(seed: int, length: int, **more: Any) -> dict[str, Any]:
        chunks = daemon.status()["l1"]["chunks"]
        headers = more.pop("headers", {})
        answer = server.post("/v1/completions", completion(prompt(seed, 1500)[:length], 2, **more), **headers)
        wait_until(lambda: daemon.status()["l1"]["chunks"] > chunks, 30, "its chunks are stored")
        return answer

    try:
        daemon.start()
        server.wait_ready()
        wait_until(lambda: any(one["namespace"] for one in daemon.status()["instances"]), 60, "the engine registered")
        ask(301, 700, session_id="body")
        ask(301, 1300, session_id="body")
        ask(302, 700, headers={"x_session_id": "header"}, cache_salt="secret")
        ask(303, 700, kv_transfer_params={"kvserver.session_id": "params"})
        ask(304, 700)
        found = sessions()
        assert {id: one["tokens"] for id, one in found.items()} == {"body": 1280, "header": 512, "params": 512}
        assert found["header"]["salt_digest"] == salt_digest("secret").hex()
        assert daemon.http("/sessions/header", "DELETE")[0] == 404, "without the salt it is another session"
        assert daemon.http("/sessions/header?cache_salt=secret", "DELETE")[0] == 200
        assert sessions().keys() == {"body", "params"}
        server.forget()
        answer = server.post("/v1/completions", completion(prompt(301, 1500)[:1300], 2, session_id="s" * 257))
        assert answer["choices"], "a name that is too long costs nothing but the session"
        assert daemon.status()["totals"]["errors"] == 0
    finally:
        server.close()
        daemon.close()
