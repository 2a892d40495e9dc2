"""vLLM's real scheduler and the real connector around a model that is not there.

`configure` builds VllmConfig and KVCacheConfig by hand; `Engine` puts vLLM's Scheduler or AsyncScheduler with the
connector's scheduler half on one side and one worker half per rank on the other, and plays vLLM's EngineCore
between them. A single wrong block under any request fails the step that would have used it (model_runner.py).
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from late_gpu import LateGpu
from made_up_model import BLOCK, HEADS, LAYERS, WIDTH, continuation, prompt
from model_runner import Batch, Runner
from planning import get_kv_cache_config_from_groups, get_kv_cache_groups, tp_replicas
from support.daemon import wait_until
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvserver.adapters.common.specs import LoadSpec, StoreSpec, ids_of
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.vllm import KVServerConnector


def ours(connector: KVConnectorBase_V1) -> KVServerConnector:
    """It, or the one that vLLM's MultiConnector has."""
    inner = connector.sub_connectors if isinstance(connector, MultiConnector) else [connector]
    (found,) = (each for each in inner if isinstance(each, KVServerConnector))
    return found


def plan_of(metadata: KVConnectorMetadata | None) -> StepPlan:
    """Of the same."""
    inner = metadata.metadata if isinstance(metadata, MultiKVConnectorMetadata) else [metadata]
    (found,) = (each for each in inner if isinstance(each, StepPlan))
    return found


@dataclass
class Answer:
    """What the engine has put out for one request."""

    prompt: list[int]
    count: int
    weights: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    local: int = 0  # prompt tokens that vLLM had itself
    external: int = 0  # prompt tokens promised by the connector
    params: dict[str, Any] | None = None  # its kv_transfer_params

    @property
    def right(self) -> bool:
        """Whether they are the model's tokens, as many as it wanted unless it was aborted."""
        count = len(self.tokens) if self.finish_reason == "abort" else self.count
        return self.tokens == continuation(self.prompt, count, self.weights)


PATIENT = {"kvserver.lookup_timeout_ms": 15_000}  # on a busy machine a lookup is no miss; less than run() waits
# kvserver's default, for engines whose daemon hangs from the first lookup on. If it hangs later: Engine.lose_patience().
IMPATIENT = {"kvserver.lookup_timeout_ms": 100}

Adjust: TypeAlias = Callable[[VllmConfig, KVCacheConfig], None]


def configure(
    folder: Path,
    endpoint: str,
    *,
    asynchronous: bool = True,
    num_blocks: int = 100,
    max_tokens_per_step: int = 4096,
    world_size: int = 1,
    drafts: int = 0,
    window: int | None = None,
    layers: Sequence[KVCacheSpec] = (),
    block_size: int = BLOCK,
    layout: str = "LBHNC",
    engine_id: str | None = None,
    extra: dict[str, Any] | None = None,
    adjust: Adjust = lambda config, caches: None,
    **model_options: Any,
) -> tuple[VllmConfig, KVCacheConfig]:
    """What vLLM would have made of its command line and its memory. `folder` holds a model's config.json.

    `layers` of a model of several groups, else all have full attention, or a `window`.
    """
    model = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 2048, **model_options}
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache.kv_cache_layout = layout
    cache.num_gpu_blocks = cache.num_gpu_blocks_override = num_blocks
    if any(isinstance(layer, MambaSpec) for layer in layers):
        cache.mamba_cache_mode = "align"
        layers = [
            replace(layer, num_speculative_blocks=drafts) if isinstance(layer, MambaSpec) else layer for layer in layers
        ]
    speculation = (
        SpeculativeConfig(method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=3) if drafts else None
    )
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), **model),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=max_tokens_per_step,
            max_model_len=model["max_model_len"],
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVServerConnector",
            kv_connector_module_path="kvserver.adapters.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"kvserver.endpoint": endpoint, **PATIENT, **(extra or {})},
            **({"engine_id": engine_id} if engine_id else {}),
        ),
        speculative_config=speculation,
    )
    # Set after construction: vLLM would refuse both here, for want of a GPU or a second process.
    config.scheduler_config.async_scheduling = asynchronous
    if world_size > 1:
        config.parallel_config = ParallelConfig(tensor_parallel_size=world_size, distributed_executor_backend="mp")
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": WIDTH // 2, "dtype": torch.int64}
    if not layers:
        layers = [SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)] * LAYERS
    groups = get_kv_cache_groups(config, {f"layers.{i}": spec for i, spec in enumerate(layers)})
    caches = get_kv_cache_config_from_groups(config, groups, 0)
    hashed = [group.kv_cache_spec for group in groups if getattr(group.kv_cache_spec, "prefix_cacheable", True)]
    caches.hash_block_size = math.gcd(*(spec.block_size for spec in hashed))
    caches.kv_tp_replicas = tp_replicas(groups, world_size)
    adjust(config, caches)
    return config, caches


class Engine:
    """close() at the end."""

    def __init__(
        self,
        config: VllmConfig,
        caches: KVCacheConfig,
        register: bool = True,
        runner: int = 1,
        gpu: LateGpu | None = None,
    ) -> None:
        """`register` the KV caches or forget to; `runner`: which generation of vLLM's model runners is played.

        With a `gpu` the forward only queues its work there.
        """
        self.gpu = gpu
        self.config = config
        self.caches = caches
        self.weights = 0
        self.num_blocks = caches.num_blocks
        self.drafts = config.num_speculative_tokens
        self.answers: dict[str, Answer] = {}
        self.received: list[str] = []  # requests in finished_recving, in their order
        self.plans: list[StepPlan] = []  # what the scheduler half sent the worker halves, step by step
        self.stats: list[SchedulerStats] = []  # of each step
        self.preemptions = 0
        self.before_step: Callable[[StepPlan], None] = lambda plan: None  # called before the workers see the plan
        self.after_step: Callable[[StepPlan], None] = lambda plan: None
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        block_sizes = [group.kv_cache_spec.block_size for group in caches.kv_cache_groups]
        hash_block_size = caches.hash_block_size or math.gcd(*block_sizes)
        self._hasher = get_request_block_hasher(hash_block_size, hash_function)
        asynchronous = config.scheduler_config.async_scheduling
        self._steps_ahead = 2 if asynchronous else 1
        self.scheduler: Scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=generate_scheduler_kv_cache_config([caches]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=math.lcm(*block_sizes),
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = runner == 2
        world_size = config.parallel_config.world_size
        self.runners = [self._make_runner(rank, register) for rank in range(world_size)]
        self.batch = Batch(self.runners, self.drafts)
        self._aggregator = KVOutputAggregator.from_connector(self.runners[0].connector, world_size)

    def _make_runner(self, rank: int, register: bool) -> Runner:
        config = copy.copy(self.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        kind = self.gpu.connector if self.gpu is not None else KVConnectorFactory.create_connector
        connector = kind(config, KVConnectorRole.WORKER, self.caches)
        made = Runner(connector, config, self.caches, rank, register)
        if self.gpu is not None:
            made.launch = self.gpu.queue
        return made

    @property
    def connector(self) -> KVServerConnector:
        """The scheduler's."""
        return ours(self.scheduler.connector)

    @property
    def worker(self) -> KVServerConnector:
        """Rank 0's."""
        return ours(self.runners[0].connector)

    @property
    def knows_its_daemon(self) -> bool:
        """False while one of its halves tries again because its first Hello had no answer in time."""
        halves = (
            ours(connector) for connector in (self.scheduler.connector, *(each.connector for each in self.runners))
        )
        reasons = {half.cache_status.reason for each in halves if (half := each.scheduler or each.worker) is not None}
        return "no_answer" not in reasons

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def loads(self) -> list[LoadSpec]:
        """Every load that was planned."""
        return [load for plan in self.plans for load in plan.loads]

    @property
    def stores(self) -> list[StoreSpec]:
        """Every store that was planned."""
        return [store for plan in self.plans for store in plan.stores]

    @property
    def free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    # ---- requests -----------------------------------------------------------------------------

    def add(
        self, name: str, tokens: list[int], count: int = 4, sampling: dict[str, Any] | None = None, **options: Any
    ) -> Answer:
        """Submit a request for `count` tokens."""
        parameters = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **(sampling or {}))
        request = Request(name, list(tokens), parameters, None, block_hasher=self._hasher, **options)
        self.answers[name] = Answer(list(tokens), count, self.weights)
        self.scheduler.add_request(request)
        return self.answers[name]

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.answers[name].finish_reason = "abort"

    def generate(self, name: str, tokens: list[int], count: int = 4, seconds: float = 20.0, **options: Any) -> Answer:
        """One request, to its end; and until the engine has nothing left to do."""
        answer = self.add(name, tokens, count, **options)
        self.run(seconds)
        assert answer.right, f"{name}: {answer}"
        return answer

    def generate_free(self, name: str) -> int:
        """Serve one short request, under some new name, so that a step is made; the blocks then free."""
        answer = self.add(f"{name}{len(self.answers)}", [7, 8, 9], count=2)
        self.run(until=lambda: answer.finish_reason is not None and not self._queue)
        return self.free_blocks

    def begin_load(self, name: str, tokens: list[int]) -> Answer:
        """Submit a prompt that the daemon has, until the first bytes of its load are in the first rank's KV.

        REQUIRES: slow copies, or paused ones.
        """
        answer, before = self.add(name, tokens), len(self.loads)
        self.run(until=lambda: len(self.loads) > before)
        kv, blocks = self.runners[0].kv[0], ids_of(self.loads[before])
        wait_until(lambda: kv[blocks].any(), what=f"the load of {name} has begun")
        assert self.status_of(name) == "WAITING_FOR_REMOTE_KVS"
        return answer

    def lose_patience(self) -> None:
        """From now on it waits for a lookup as kvserver does by default: the daemon hangs."""
        self.connector.scheduler._loading._lookups._timeout_seconds = IMPATIENT["kvserver.lookup_timeout_ms"] / 1000

    def use_free_blocks(self, prompts: int) -> set[int]:
        """Serve so many new prompts of 13 blocks at once; the blocks that requests had meanwhile."""
        used: set[int] = set()
        self.after_step = lambda plan: used.update(*(row.blocks for row in self.batch.rows.values()))
        first = len(self.answers)
        answers = [self.add(f"filler{n}", prompt(1000 + n, 13 * BLOCK), count=5) for n in range(first, first + prompts)]
        self.run(until=lambda: all(answer.finish_reason for answer in answers))
        assert all(answer.right for answer in answers)
        return used

    def status_of(self, name: str) -> str:
        request = self.scheduler.requests.get(name)
        return request.status.name if request is not None else "GONE"

    # ---- steps --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._queue) or self.scheduler.has_requests()

    def run(self, seconds: float = 20.0, until: Callable[[], bool] | None = None) -> None:
        """Step until there is nothing to do, or until `until()`. AssertionError if that takes too long."""
        deadline = time.monotonic() + seconds
        while self.busy if until is None else not until():
            assert time.monotonic() < deadline, (
                f"hangs: {[(name, self.status_of(name)) for name in self.scheduler.requests]}, "
                f"pending stores: {self.connector.has_pending_push_work()}"
            )
            self.step()
        if until is None:
            self.assert_no_block_owned()

    def assert_no_block_owned(self) -> None:
        """When idle no request owns a block, but for vLLM's null block."""
        assert self.free_blocks == self.num_blocks - 1
        assert not self.scheduler.requests

    def step(self) -> None:
        """One step of vLLM's EngineCore: step() or, under async scheduling, step_with_batch_queue()."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            result = self.execute(output)
            self._queue.append((output, result))
            executed = output.total_num_scheduled_tokens > 0
            if len(self._queue) < self._steps_ahead and (executed or self.scheduler.has_requests()):
                return
        if self._queue:
            self._update(*self._queue.popleft())

    def finish_steps(self) -> None:
        """Take the outputs of all steps that were begun."""
        while self._queue:
            self._update(*self._queue.popleft())

    def _update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        self.received += sorted((result.kv_connector_output and result.kv_connector_output.finished_recving) or ())
        for core in self.scheduler.update_from_output(output, result).values():
            self.stats += [core.scheduler_stats] if core.scheduler_stats is not None else []
            for output in core.outputs:
                answer = self.answers[output.request_id]
                answer.tokens += output.new_token_ids
                answer.params = output.kv_transfer_params or answer.params
                if output.finish_reason is not None:
                    answer.finish_reason = str(output.finish_reason)
                if output.prefill_stats is not None:
                    answer.local = output.prefill_stats.num_local_cached_tokens
                    answer.external = output.prefill_stats.num_external_cached_tokens
        if self.drafts and self._steps_ahead == 1:
            self.scheduler.update_draft_token_ids(self.batch.take_drafts())

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """What the workers do in one step."""
        metadata = output.kv_connector_metadata
        plan = plan_of(metadata)
        self.plans.append(plan)
        self.preemptions += len(output.preempted_req_ids or ())
        self.before_step(plan)
        for runner in self.runners:
            if self.scheduler.use_v2_model_runner:
                runner.write_early(output)
            runner.connector.handle_preemptions(metadata)
            if not self.scheduler.use_v2_model_runner:
                runner.write_early(output)
            runner.connector.bind_connector_metadata(metadata)
        result = self.batch.forward(output, self.weights)
        results: list[ModelRunnerOutput | None] = []
        for runner in self.runners:
            runner.connector.start_load_kv(None)
            runner.connector.wait_for_save()
            mine = copy.copy(result)
            mine.kv_connector_output = runner.connector_output(output)
            runner.connector.clear_connector_metadata()
            results.append(mine)
        self.after_step(plan)
        found = self._aggregator.aggregate(results) if len(results) > 1 else results[0]
        assert found is not None
        return found

    # ---- the end ------------------------------------------------------------------------------

    def errors(self) -> dict[str, int]:
        """Exceptions that the connector kept from the engine."""
        found = self.connector.errors.copy()
        for runner in self.runners:
            found += ours(runner.connector).errors
        return dict(found)

    def close(self) -> None:
        ends = [self.scheduler.shutdown, *(runner.connector.shutdown for runner in self.runners)]
        with ThreadPoolExecutor(len(ends)) as threads:  # each waits a second if the daemon hangs
            for done in [threads.submit(end) for end in ends]:
                done.result()
        if self.gpu is not None:
            self.gpu.close()
