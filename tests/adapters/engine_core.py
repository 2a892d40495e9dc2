"""vLLM's own operations on an engine: sleep, wake-up, pauses, the release of memory, by the code of vLLM's engine core and executor.

Only the worker is played: it notifies its connector as vLLM 0.33's worker on a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from modelless import Engine
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.abstract import Executor


class _Executor(Executor):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sleeping_tags: set[str] = set()

    def collective_rpc(  # type: ignore[override]
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        arguments = dict(kwargs or {})
        if method == "sleep" or (method == "discard" and "kv_cache" in args[0]):
            for runner in self.engine.runners:
                runner.connector.unregister_kv_caches()
        elif method == "wake_up" and (arguments["tags"] is None or "kv_cache" in arguments["tags"]):
            for runner in self.engine.runners:
                runner.connector.restore_kv_caches()
        return [None] * len(self.engine.runners)

    def _init_executor(self) -> None:
        raise NotImplementedError

    def check_health(self) -> None:
        return


class EngineCore(EngineCoreProc):
    """Its methods are vLLM's; `operate` runs one that may end later, beside the engine's steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.model_executor = _Executor(engine)
        self.mm_receiver_cache = None
        self.engines_running = False
        self._idle_state_callbacks = []

    @property
    def batch_queue(self) -> Any:
        return self.engine._queue

    def _send_abort_outputs(self, aborted_reqs: Any) -> None:
        for request in aborted_reqs:
            self.engine.answers[request.request_id].finish_reason = "abort"

    def _set_kv_connector_handshake_metadata(self) -> None:
        """Of connectors whose peers read the memory."""

    def operate(self, operation: Callable[[], Future[Any] | Any]) -> Any:
        """Its result, once the engine has done what it waits for. vLLM's loop goes on afterwards, asleep or not."""
        result = operation()
        self.engine.run(until=lambda: not self.has_work())
        if isinstance(result, Future):
            self._notify_idle_state_callbacks()
            self.engine.run(until=lambda: not self.has_work())
            return result.result(timeout=0)
        return result
