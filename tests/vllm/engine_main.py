"""One real vLLM engine in a process of its own, driven by JSON lines: a request in, an answer out.

Run by `engine.py`. Standard output carries only answers; what vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever the engine prints must not mix with the answers


def answer(value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")


def main() -> None:
    options = json.loads(sys.argv[1])
    began = time.monotonic()
    from vllm import LLM, SamplingParams

    llm = LLM(**options)
    answer({"ready": True, "seconds": time.monotonic() - began})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(handle(llm, SamplingParams, request))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def handle(llm: Any, sampling: Any, request: dict[str, Any]) -> dict[str, Any]:
    match request["op"]:
        case "generate":
            params = sampling(
                temperature=0, max_tokens=request["max_tokens"], detokenize=False, ignore_eos=True, logprobs=3
            )
            began = time.monotonic()
            outputs = llm.generate([{"prompt_token_ids": p} for p in request["prompts"]], params, use_tqdm=False)
            return {"outputs": [describe(o) for o in outputs], "seconds": time.monotonic() - began}
        case "reset_prefix_cache":
            return {"ok": llm.reset_prefix_cache(reset_connector=request.get("reset_connector", False))}
        case "metrics":
            wanted = {}
            for metric in llm.get_metrics():
                if hasattr(metric, "value"):
                    wanted[metric.name] = wanted.get(metric.name, 0) + metric.value
            return {"metrics": wanted}
        case "counters":
            return counters(llm)
    raise ValueError(request["op"])


def describe(output: Any) -> dict[str, Any]:
    sample = output.outputs[0]
    return {
        "tokens": list(sample.token_ids),
        "logprobs": [sorted((int(t), p.logprob) for t, p in step.items()) for step in sample.logprobs],
        "cached_tokens": output.num_cached_tokens,
        "finish_reason": sample.finish_reason,
    }


def counters(llm: Any) -> dict[str, Any]:
    """The connector's own counters; only for an engine whose core lives in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector
    worker = get_kv_transfer_group()
    return {
        "scheduler": dict(scheduler.scheduler.counters) if scheduler.scheduler else {},
        "worker": dict(worker.worker.counters) if worker.worker else {},
        "errors": dict(scheduler.errors + worker.errors),
        "preemptions": getattr(llm.llm_engine.engine_core.engine_core.scheduler, "num_preemptions_seen", 0),
    }


if __name__ == "__main__":
    main()
