"""LMCache's multiprocess adapters, driven by JSON lines: what `peers.py` measures of that peer.

Runs in the peer's own environment and imports nothing of ours. Uses the adapters that its vLLM connector
uses, from the outside. Lookups are polled every 0.1 ms: oftener than an engine does, and still leaving the
GIL to the adapters' own threads.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # the peer logs to standard output

import torch  # noqa: E402
import zmq  # noqa: E402
from lmcache.integration.vllm.vllm_multi_process_adapter import (  # noqa: E402
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.group_view import EngineGroupInfo  # noqa: E402

WAIT_SECONDS = 20
POLL_SECONDS = 0.0001
ALONE = ParallelStrategy(mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)


def tokens_of(name: str, count: int) -> list[int]:
    """A prompt that no other name shares."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return [(seed + i * 2654435761) % 128_000 for i in range(count)]


class Driver:
    """One engine: a scheduler's and a worker's adapter, and KV of `layers` layers, [2, blocks, tokens, heads, 128]."""

    def __init__(self, url: str, worker_url: str, layers: int, heads: int, blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._scheduler = LMCacheMPSchedulerAdapter(
            [url], zmq.Context(), "bench", block_tokens, ALONE, mq_timeout=WAIT_SECONDS
        )
        self._worker = LMCacheMPWorkerAdapter(
            worker_url, zmq.Context(), "bench", block_tokens, ALONE, mq_timeout=WAIT_SECONDS
        )
        shape = (2, blocks, block_tokens, heads, 128)
        caches = {f"layer.{i}": torch.randn(shape, dtype=torch.float32).bfloat16() for i in range(layers)}
        groups = [EngineGroupInfo(0, tuple(range(layers)), block_tokens)]
        self._worker.register_kv_caches(caches, groups, layout_hints={"kv_layout": "NHD"})
        self._number = 0

    def _copy(self, tokens: list[int], start: int, end: int) -> LoadStoreOp:
        blocks = range(1 + start // self._block_tokens, 1 + end // self._block_tokens)
        return LoadStoreOp(token_ids=tokens, block_ids=[list(blocks)], start=start, end=end)

    def op_store(self, name: str, count: int, step: int) -> dict[str, Any]:
        """Steps of `step` tokens, each waited for; seconds of all."""
        tokens, began = tokens_of(name, count), time.perf_counter()
        for start in range(0, count, step):
            event = self._worker.create_recorded_event()
            self._worker.submit_store_request(name, self._copy(tokens, start, start + step), event)
            self._ended(self._worker.store_futures[name])
        return {"seconds": time.perf_counter() - began}

    def op_load(self, name: str, count: int) -> dict[str, Any]:
        """A lookup, which locks what is loaded and is not timed, then the load; its seconds."""
        self.op_await(name, count)
        tokens = tokens_of(name, count)
        request_id, _ = self._lookup(tokens)
        return self._load(request_id, tokens)

    def op_fill(self, name: str, count: int) -> dict[str, Any]:
        """A lookup, which brings what only storage has into L1, and the load; seconds of both."""
        tokens = tokens_of(name, count)
        request_id, milliseconds = self._lookup(tokens)
        return {"seconds": milliseconds / 1000 + self._load(request_id, tokens)["seconds"]}

    def _load(self, request_id: str, tokens: list[int]) -> dict[str, Any]:
        began = time.perf_counter()
        event = self._worker.create_recorded_event()
        self._worker.submit_retrieve_request(request_id, self._copy(tokens, 0, len(tokens)), event)
        self._ended(self._worker.retrieve_futures[request_id][0])
        seconds = time.perf_counter() - began
        self._scheduler.end_session(request_id)
        return {"seconds": seconds}

    def _ended(self, future: Any) -> None:
        assert future.wait(WAIT_SECONDS), "no answer"
        assert future.result(0), "the peer reports a failure"
        self._worker.get_finished(set())

    def op_lookup(self, name: str, count: int, samples: int) -> dict[str, Any]:
        """Milliseconds of each lookup; all must hit."""
        tokens, found = tokens_of(name, count), []
        for _ in range(samples):
            request_id, milliseconds = self._lookup(tokens)
            self._scheduler.free_lookup_locks(tokens, 0, count, request_id)
            self._scheduler.cleanup_lookup_result(request_id)
            self._scheduler.end_session(request_id)
            found.append(milliseconds)
        return {"milliseconds": found}

    def op_await(self, name: str, count: int) -> dict[str, Any]:
        """Until what was stored is found, which here may be a while after the store was answered."""
        deadline = time.perf_counter() + WAIT_SECONDS
        while True:
            try:
                return self.op_lookup(name, count, 1)
            except AssertionError:
                assert time.perf_counter() < deadline, "stored, but not found"

    def _lookup(self, tokens: list[int]) -> tuple[str, float]:
        self._number += 1
        request_id = f"cmpl-{self._number:032x}-0"
        began = time.perf_counter()
        self._scheduler.maybe_submit_lookup_request(request_id, tokens)
        while (hit := self._scheduler.check_lookup_result(request_id)) is None:
            assert time.perf_counter() - began < WAIT_SECONDS, "no answer"
            time.sleep(POLL_SECONDS)
        milliseconds = (time.perf_counter() - began) * 1000
        if hit < len(tokens):
            self._scheduler.end_session(request_id)
        assert hit == len(tokens), f"{hit} of {len(tokens)} tokens hit"
        return request_id, milliseconds

    def op_prefill(self, name: str, count: int, step: int) -> dict[str, Any]:
        """What a prompt sends: a lookup that misses, its stores in steps, its end."""
        tokens, request_id = tokens_of(name, count), f"cmpl-{0:032x}-0"
        self._scheduler.maybe_submit_lookup_request(request_id, tokens)
        while self._scheduler.check_lookup_result(request_id) is None:
            time.sleep(POLL_SECONDS)
        self._scheduler.cleanup_lookup_result(request_id)
        self.op_store(name, count, step)
        self._scheduler.end_session(request_id)
        return {}


def main() -> None:
    driver: Driver | None = None
    for line in sys.stdin:
        fields = json.loads(line)
        op = fields.pop("op")
        try:
            if op == "connect":
                driver, answer = Driver(**fields), {}
            else:
                answer = getattr(driver, "op_" + op)(**fields)
        except Exception as error:
            answer = {"error": f"{op}: {type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # its threads need not be waited for


if __name__ == "__main__":
    main()
