"""One real vLLM engine in a process of its own, driven by JSON lines: a request in, an answer out.

Run by `engines.py`. Standard output carries only answers; what vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from typing import Any

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever the engine prints must not mix with the answers


def answer(value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")


class Driver:
    def __init__(self, options: dict[str, Any]) -> None:
        if options.pop("exact_states", False):
            import exact_states

            exact_states.install()
        if not options.pop("measures_speed", True):
            from kvserver.adapters.vllm import reporting

            reporting.PrefillSpeed = partial(reporting.PrefillSpeed, lambda: 0.0)
        from vllm import LLM

        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        self.done: dict[str, Any] = {}
        self.records: list[dict[str, str]] = []

    @property
    def worker(self) -> dict[str, Any]:
        """The model runner and the scheduling that this engine has. vLLM before 0.28 knows no other runner than V1."""
        config = self.engine.vllm_config
        v2 = getattr(config, "use_v2_model_runner", False)
        return {"runner": "v2" if v2 else "v1", "asynchronous": bool(config.scheduler_config.async_scheduling)}

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        operation = getattr(self, "op_" + request.pop("op"))
        found: dict[str, Any] = operation(**request)
        return found

    def op_version(self) -> dict[str, Any]:
        import vllm

        return {"version": vllm.__version__}

    def op_generate(self, prompts: list[list[int]], max_tokens: int, lora: Any = None) -> dict[str, Any]:
        """All prompts at once, to their end."""
        began = time.monotonic()
        outputs = self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts], sampling(max_tokens), use_tqdm=False, lora_request=lora
        )
        return {"outputs": [describe(o) for o in outputs], "seconds": time.monotonic() - began}

    def op_serve(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """All requests at once, to their end. Of each its `prompt`, and what else it wants: `sampling`, `priority`, the folder of a `lora`."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        wanted, loras = [], []
        for request in requests:
            options = {"temperature": 0, "detokenize": False, "ignore_eos": True, "logprobs": 3, **request["sampling"]}
            wanted.append(SamplingParams(**options))
            loras.append(LoRARequest("adapter", 1, request["lora"]) if "lora" in request else None)
        outputs = self.llm.generate(
            [{"prompt_token_ids": request["prompt"]} for request in requests],
            wanted,
            use_tqdm=False,
            lora_request=loras if any(loras) else None,
            priority=[request.get("priority", 0) for request in requests] if "priority" in requests[0] else None,
        )
        return {"outputs": [describe(output) for output in outputs]}

    def op_session(self, request_id: str, turns: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """A streaming session: the tokens of each turn, and how many of its prompt were cached."""
        core, answers = self.engine.engine_core, []
        for turn in turns:
            made = self.engine.input_processor.process_inputs(
                request_id,
                {"prompt_token_ids": turn},
                sampling(max_tokens),
                supported_tasks=("generate",),
                resumable=True,
            )
            core.add_request(made)
            answer: dict[str, Any] = {"tokens": [], "cached_tokens": 0}
            while len(answer["tokens"]) < max_tokens:
                for output in core.get_output().outputs:
                    answer["tokens"] += output.new_token_ids
                    if (stats := output.prefill_stats) is not None:
                        answer["cached_tokens"] = stats.num_cached_tokens
            answers.append(answer)
        core.abort_requests([request_id])
        return {"turns": answers}

    def op_generate_of_embeddings(self, bits: list[list[int]], dtype: str, max_tokens: int) -> dict[str, Any]:
        """One prompt of embeddings: rows of 16 bits, which are numbers of `dtype`."""
        import torch

        prompt: Any = {"prompt_embeds": torch.tensor(bits, dtype=torch.int16).view(getattr(torch, dtype))}
        return {"outputs": [describe(o) for o in self.llm.generate([prompt], sampling(max_tokens), use_tqdm=False)]}

    # The engine stepped by hand, to act between steps.

    def op_add(self, request_id: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling(max_tokens))
        return {}

    def op_step(self, seconds: float, until: str | None = None) -> dict[str, Any]:
        """Step for so long, or until a request (or, for None, every request) is done."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.engine.has_unfinished_requests() and until not in self.done:
            for output in self.engine.step():
                if output.finished:
                    self.done[output.request_id.split("-")[0]] = output
        return {
            "unfinished": self.engine.has_unfinished_requests(),
            "outputs": {name: describe(o) for name, o in self.done.items()},
        }

    def op_steps(self, count: int) -> dict[str, Any]:
        for _ in range(count):
            self.engine.step()
        return {}

    def op_abort(self, request_id: str) -> dict[str, Any]:
        self.engine.abort_request([request_id])
        return {}

    def op_wait_for_stores(self, seconds: float) -> dict[str, Any]:
        """Step an idle engine while the connector reports work."""
        core = self.engine.engine_core.engine_core
        deadline = time.monotonic() + seconds
        while core.scheduler.connector.has_pending_push_work() and time.monotonic() < deadline:
            core.step_fn()
        return {"pending": core.scheduler.connector.has_pending_push_work()}

    def op_drain(self, seconds: float) -> dict[str, Any]:
        """Step as a server does until no connector keeps the blocks of an ended request."""
        core = self.engine.engine_core.engine_core
        deadline = time.monotonic() + seconds
        while core.scheduler.has_requests() and time.monotonic() < deadline:
            core.step_fn()
        return {"pending": core.scheduler.has_requests()}

    def op_reset_prefix_cache(self, reset_connector: bool = False) -> dict[str, Any]:
        return {"ok": self.llm.reset_prefix_cache(reset_connector=reset_connector)}

    def op_sleep(self, level: int) -> dict[str, Any]:
        self.llm.sleep(level)
        return {}

    def op_wake_up(self) -> dict[str, Any]:
        self.llm.wake_up()
        return {}

    def op_negate_norms(self) -> dict[str, Any]:
        """Other weights in place, as a trainer loads them. Linear layers on CPUs compute with copies of theirs."""

        def negate(worker: Any) -> int:
            parameters = worker.model_runner.get_model().named_parameters()
            norms = [weight for name, weight in parameters if "input_layernorm" in name]
            for weight in norms:
                weight.data.neg_()
            return len(norms)

        return {"changed": self.llm.collective_rpc(negate)}

    def op_set_weights_version(self, version: str) -> dict[str, Any]:
        config = self.engine.vllm_config.kv_transfer_config
        config.kv_connector_extra_config["kvserver.weights_version"] = version
        return {}

    def op_metrics(self) -> dict[str, Any]:
        """Sums over all labels, and those of one tier, reason or source: "name tier"."""
        sums: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                labels = [metric.labels[label] for label in ("tier", "reason", "source") if label in metric.labels]
                for name in {metric.name, " ".join([metric.name, *labels])}:
                    sums[name] = sums.get(name, 0) + metric.value
        return {"metrics": sums}

    def op_histograms(self) -> dict[str, Any]:
        """Count and sum of each."""
        found = [metric for metric in self.llm.get_metrics() if hasattr(metric, "buckets")]
        return {"histograms": {metric.name: {"count": metric.count, "sum": metric.sum} for metric in found}}

    def op_keep_records(self) -> dict[str, Any]:
        """Of what the block pool's hook hands over from now on."""
        hook = self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.metrics_collector
        drain_records, drain_full_state = hook.drain_records, hook.drain_full_state

        def keep(taken: Any) -> Any:
            self.records.append({"records": taken.records.hex(), "marks": taken.marks.hex()})
            return taken

        def keep_full() -> list[Any]:
            hook.drain_records = drain_records  # it may call drain_records(), whose records would be kept twice
            try:
                return [keep(part) for part in drain_full_state()]
            finally:
                hook.drain_records = keep_taken

        def keep_taken() -> Any:
            return keep(drain_records())

        hook.drain_records, hook.drain_full_state = keep_taken, keep_full
        return {}

    def op_records(self) -> dict[str, Any]:
        return {"records": self.records}

    def op_zero_group(self, group: int) -> dict[str, Any]:
        """Zero what the engine's own prefix cache has of one KV cache group. A block belongs to one group at a time."""
        from vllm.v1.core.kv_cache_utils import get_group_id

        core = self.engine.engine_core.engine_core
        blocks = core.scheduler.kv_cache_manager.block_pool.blocks
        zeroed = [b.block_id for b in blocks if b.block_hash is not None and get_group_id(b.block_hash) == group]
        for cache in core.model_executor.driver_worker.worker.model_runner.kv_caches:
            cache[zeroed] = 0
        return {"zeroed": len(zeroed)}

    def op_counters(self) -> dict[str, Any]:
        """The connector's own counters and the pool's accounting.

        Of several ranks, which have processes of their own, only the scheduler's half is here.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        scheduler = self.engine.engine_core.engine_core.scheduler
        connector = ours(scheduler.connector)
        worker = ours(get_kv_transfer_group()) if has_kv_transfer_group() else connector
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "scheduler": dict(connector.scheduler.counters) if connector.scheduler else {},
            "worker": dict(worker.worker.counters) if worker.worker else {},
            "connected": all(half.cache_status.connected for half in (connector.scheduler, worker.worker) if half),
            "errors": dict(connector.errors + worker.errors if worker is not connector else connector.errors),
            "blocks_in_use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }


def ours(connector: Any) -> Any:
    """It, or the one that vLLM's MultiConnector has."""
    return next((c for c in getattr(connector, "sub_connectors", ()) if hasattr(c, "faults")), connector)


def sampling(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True, logprobs=3)


def describe(output: Any) -> dict[str, Any]:
    sample = output.outputs[0]
    return {
        "tokens": list(sample.token_ids),
        "logprobs": [numbers(step) for step in sample.logprobs],
        "cached_tokens": output.num_cached_tokens,
        "finish_reason": sample.finish_reason,
        "kv_transfer_params": output.kv_transfer_params,
        "others": [list(other.token_ids) for other in output.outputs[1:]],
        "prompt_logprobs": [numbers(step) for step in output.prompt_logprobs or () if step is not None],
    }


def numbers(step: Any) -> list[tuple[int, float]]:
    """The log probabilities of one token."""
    return sorted((int(token), p.logprob) for token, p in step.items())


def main() -> None:
    began = time.monotonic()
    driver = Driver(json.loads(sys.argv[1]))
    answer({"ready": True, "seconds": time.monotonic() - began, **driver.worker})
    for line in sys.stdin:
        try:
            answer(driver.handle(json.loads(line)))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
