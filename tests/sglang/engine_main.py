"""One real SGLang engine in a process of its own, driven by JSON lines: a request in, an answer out.

Run by `sglang_engines.py`. Standard output carries only answers; what SGLang prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints must not mix with the answers
    from sglang import Engine

    engine = Engine(**json.loads(sys.argv[1]))
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        operation = globals()["op_" + request.pop("op")]
        try:
            answers.write(json.dumps(operation(engine, **request)) + "\n")
        except Exception as error:
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
    engine.shutdown()


def op_generate(
    engine: Any, prompts: list[list[int]], max_tokens: int, salt: str | None = None, session: str | None = None
) -> dict[str, Any]:
    """All prompts at once, to their end."""
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    salts = [salt] * len(prompts) if salt else None
    began = time.perf_counter()
    outputs = engine.generate(
        input_ids=prompts, sampling_params=sampling, return_logprob=True, cache_salt=salts, session_id=session
    )
    return {
        "seconds": time.perf_counter() - began,
        "outputs": [
            {
                "tokens": [token for _, token, _ in output["meta_info"]["output_token_logprobs"]],
                "logprobs": [logprob for logprob, _, _ in output["meta_info"]["output_token_logprobs"]],
                "cached_tokens": output["meta_info"]["cached_tokens"],
            }
            for output in outputs
        ],
    }


def op_decode(
    engine: Any, prompts: list[list[int]], max_tokens: int, beside: list[list[int]], pause: float
) -> dict[str, Any]:
    """Seconds between the tokens of `prompts`, of which each decodes, while requests for one token of each of `beside` arrive."""
    gaps: list[float] = []
    cached: list[int] = []

    async def decode(prompt: list[int]) -> None:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        last = 0.0
        async for _ in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now

    async def arrive() -> None:
        await asyncio.sleep(pause)
        for prompt in beside:
            sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
            output = await engine.async_generate(input_ids=prompt, sampling_params=sampling)
            cached.append(output["meta_info"]["cached_tokens"])
            await asyncio.sleep(pause)

    async def all_of_them() -> None:
        await asyncio.gather(*map(decode, prompts), arrive())

    engine.loop.run_until_complete(all_of_them())
    return {"gaps": gaps, "cached": cached}


def op_update(engine: Any, model: str) -> dict[str, Any]:
    """Other weights in place, without a flush."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=model, flush_cache=False)
    updated = engine.tokenizer_manager.update_weights_from_disk(request, None)
    return {"answer": str(engine.loop.run_until_complete(updated))}


def op_flush(engine: Any) -> dict[str, Any]:
    return {"ok": bool(engine.flush_cache().success)}


def op_pids(engine: Any) -> dict[str, Any]:
    """The engine's processes that run a scheduler."""
    import psutil

    children = psutil.Process().children(recursive=True)
    return {"pids": [child.pid for child in children if "scheduler" in " ".join(child.cmdline()) + child.name()]}


if __name__ == "__main__":
    main()
