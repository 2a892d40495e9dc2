"""vLLM's real scheduler and the real connector around a model that is not there.

`configure` builds VllmConfig and KVCacheConfig by hand; `Engine` puts vLLM's Scheduler or AsyncScheduler with the
connector's scheduler half on one side and one worker half per rank on the other, and plays the model
runner between them, in the order vLLM's own one has.

The made-up model: every token's KV is a number that depends on all tokens up to it (and on layer, head,
rank and weights), and the next token is a function of the last one. So a single wrong block under any
request is seen in the step that would have used it, byte for byte: `Runner.forward` asserts it.
"""

from __future__ import annotations

import copy
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from kvserver.adapters.common.specs import LoadSpec, StoreSpec
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.vllm import KVServerConnector
from late_gpu import LateGpu
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
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

VOCAB = 1024
BLOCK = 16  # tokens
LAYERS, HEADS, WIDTH = 2, 2, 2
_MASK = (1 << 64) - 1


# ---- the model --------------------------------------------------------------------------------


def chain(state: int, token: int) -> int:
    """The KV number of a token after `state`, the one of the token before."""
    return (state * 6364136223846793005 + token * 2 + 1442695040888963407) & _MASK


def next_token(state: int) -> int:
    return 3 + (state >> 33) % (VOCAB - 3)


def continuation(prompt: list[int], count: int, weights: int = 0) -> list[int]:
    """What the model generates."""
    state = weights
    for token in prompt:
        state = chain(state, token)
    tokens = []
    for _ in range(count):
        tokens.append(next_token(state))
        state = chain(state, tokens[-1])
    return tokens


def prompt(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, VOCAB) for _ in range(length)]


# ---- the runner -------------------------------------------------------------------------------


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
class Row:
    """A request as the runner knows it."""

    tokens: list[int]
    blocks: list[int]
    computed: int  # tokens with KV
    states: list[int] = field(default_factory=list)  # KV numbers of the tokens
    drafts: list[int] = field(default_factory=list)

    def numbers(self, tokens: list[int], weights: int) -> list[int]:
        """The KV numbers of all of `tokens`, which continue what is known."""
        known = min(len(self.states), len(self.tokens))
        states = self.states[:known]
        for token in tokens[known:]:
            states.append(chain(states[-1] if states else weights, token))
        return states


class Runner:
    """One rank: KV tensors of its layers and a connector. Ranks of equal salt hold the same KV."""

    def __init__(
        self,
        connector: KVConnectorBase_V1,
        num_blocks: int,
        rank: int,
        register: bool,
        layers: Sequence[int] = range(LAYERS),
        salt: int | None = None,
    ) -> None:
        self.connector = connector
        self.rank = rank
        self.launch: Callable[[Callable[[], None]], None] = lambda work: work()  # on a GPU: queued
        storage = torch.zeros(len(layers), num_blocks, HEADS, BLOCK, WIDTH, dtype=torch.int64)
        caches = {f"layers.{i}": layer for i, layer in zip(layers, storage.unbind(0), strict=True)}
        if register:
            connector.register_kv_caches(caches)
        self.kv = [layer.numpy().view(np.uint64) for layer in caches.values()]  # registering moves the memory
        shape = (HEADS, WIDTH)
        self.salts = [
            np.array(
                [hash((rank if salt is None else salt, i, j)) & _MASK for j in range(HEADS * WIDTH)], np.uint64
            ).reshape(shape)
            for i in layers
        ]

    def slots(self, blocks: list[int], first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(first, last)
        return np.array(blocks, np.int64)[positions // BLOCK], positions % BLOCK

    def write(self, blocks: list[int], first: int, numbers: list[int]) -> None:
        ids, offsets = self.slots(blocks, first, first + len(numbers))
        assert 0 not in ids, "the scheduler gave the null block to write to"
        values = np.array(numbers, np.uint64)
        for kv, salt in zip(self.kv, self.salts, strict=True):
            kv[ids, :, offsets] = values[:, None, None] ^ salt

    def wrong(self, blocks: list[int], first: int, numbers: list[int]) -> list[int]:
        """Positions, from `first` on, whose KV is not what it must be. Null blocks belong to no request."""
        ids, offsets = self.slots(blocks, first, first + len(numbers))
        values = np.array(numbers, np.uint64)
        bad = np.zeros(len(numbers), bool)
        for kv, salt in zip(self.kv, self.salts, strict=True):
            bad |= (kv[ids, :, offsets] != values[:, None, None] ^ salt).any(axis=(1, 2))
        return [first + int(i) for i in np.flatnonzero(bad & (ids != 0))]

    def check(self, name: str, blocks: list[int], computed: int, numbers: list[int]) -> None:
        wrong = self.wrong(blocks, 0, numbers)
        assert not wrong, (
            f"rank {self.rank}: request {name} attends to foreign KV at tokens {wrong[:5]}... of "
            f"{len(numbers)}, {computed} were computed before, blocks {blocks}"
        )

    def connector_output(self, output: SchedulerOutput) -> KVConnectorOutput:
        """What vLLM's runner collects after the forward, in its order."""
        results = self.connector.get_transfer_results(output.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )


# ---- the engine -------------------------------------------------------------------------------


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

    @property
    def right(self) -> bool:
        """Whether they are the model's tokens, as many as it wanted unless it was aborted."""
        count = len(self.tokens) if self.finish_reason == "abort" else self.count
        return self.tokens == continuation(self.prompt, count, self.weights)


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
    engine_id: str | None = None,
    extra: dict[str, Any] | None = None,
    adjust: Adjust = lambda config, caches: None,
    **model_options: Any,
) -> tuple[VllmConfig, KVCacheConfig]:
    """What vLLM would have made of its command line and its memory. `folder` holds a model's config.json."""
    model = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 2048, **model_options}
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
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
            kv_connector_extra_config={"kvserver.endpoint": endpoint, **(extra or {})},
            **({"engine_id": engine_id} if engine_id else {}),
        ),
        speculative_config=speculation,
    )
    # Set after construction: vLLM would refuse both here, for want of a GPU or a second process.
    config.scheduler_config.async_scheduling = asynchronous
    if world_size > 1:
        config.parallel_config = ParallelConfig(tensor_parallel_size=world_size, distributed_executor_backend="mp")
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": WIDTH // 2, "dtype": torch.int64}
    spec: KVCacheSpec = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
    caches = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layers.{i}" for i in range(LAYERS)], spec)],
        hash_block_size=BLOCK,
    )
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
        self.draft_luck = random.Random(5)
        self.answers: dict[str, Answer] = {}
        self.received: list[str] = []  # requests in finished_recving, in their order
        self.plans: list[StepPlan] = []  # what the scheduler half sent the worker halves, step by step
        self.stats: list[SchedulerStats] = []  # of each step
        self.preemptions = 0
        self.before_step: Callable[[StepPlan], None] = lambda plan: None  # called before the workers see the plan
        self.after_step: Callable[[StepPlan], None] = lambda plan: None
        self.rows: dict[str, Row] = {}
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        asynchronous = config.scheduler_config.async_scheduling
        self._steps_ahead = 2 if asynchronous else 1
        self.scheduler: Scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = runner == 2
        world_size = config.parallel_config.world_size
        self.runners = [self._make_runner(rank, register) for rank in range(world_size)]
        self._aggregator = KVOutputAggregator.from_connector(self.runners[0].connector, world_size)

    def _make_runner(self, rank: int, register: bool) -> Runner:
        config = copy.copy(self.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        kind = self.gpu.connector if self.gpu is not None else KVConnectorFactory.create_connector
        connector = kind(config, KVConnectorRole.WORKER, self.caches)
        # The last stage of a pipeline has one layer more than the others.
        stages = config.parallel_config.pipeline_parallel_size
        layers = range(rank * LAYERS, (rank + 1) * LAYERS + (rank == stages - 1)) if stages > 1 else range(LAYERS)
        made = Runner(connector, self.num_blocks, rank, register, layers, 0 if self.caches.kv_tp_replicas > 1 else None)
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
                if output.finish_reason is not None:
                    answer.finish_reason = str(output.finish_reason)
                if output.prefill_stats is not None:
                    answer.local = output.prefill_stats.num_local_cached_tokens
                    answer.external = output.prefill_stats.num_external_cached_tokens
        if self.drafts and self._steps_ahead == 1:
            rows = {name: row.drafts for name, row in self.rows.items() if row.drafts}
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(rows), list(rows.values())))

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """What the workers do in one step."""
        metadata = output.kv_connector_metadata
        plan = plan_of(metadata)
        self.plans.append(plan)
        self.preemptions += len(output.preempted_req_ids or ())
        self.before_step(plan)
        for runner in self.runners:
            runner.connector.handle_preemptions(metadata)
            runner.connector.bind_connector_metadata(metadata)
        result = self.forward(output)
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

    # ---- the forward --------------------------------------------------------------------------

    def forward(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Write the scheduled tokens' KV, check all KV that they attend to, sample."""
        self._take_changes(output)
        inputs: dict[str, list[int]] = {}
        numbers: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            row = self.rows[name]
            drafts = self._drafts_of(row, output.scheduled_spec_decode_tokens.get(name, []))
            known = row.tokens[row.computed : row.computed + count - len(drafts)]
            assert len(known) == count - len(drafts), f"{name}: scheduled beyond what is known"
            inputs[name] = [*row.tokens[: row.computed + len(known)], *drafts]
            numbers[name] = row.numbers(inputs[name], self.weights)
            for runner in self.runners:
                fresh = numbers[name][row.computed :]
                runner.launch(partial(runner.write, list(row.blocks), row.computed, fresh))
        sampled: list[list[int]] = []
        for name, count in output.num_scheduled_tokens.items():
            row = self.rows[name]
            for runner in self.runners:
                runner.launch(partial(runner.check, name, list(row.blocks), row.computed, numbers[name]))
            sampled.append(self._sample(row, inputs[name], numbers[name], count))
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)

    def _take_changes(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self.rows.pop(name, None)
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            self.rows[new.req_id] = Row(tokens, list(new.block_ids[0]), new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            row = self.rows[name]
            if name in cached.resumed_req_ids:
                assert blocks is not None
                tokens = cached.all_token_ids.get(name, row.tokens)
                self.rows[name] = Row(list(tokens), list(blocks[0]), computed)
            else:
                row.blocks += blocks[0] if blocks is not None else []
                # Under async scheduling the scheduler counts drafts as if all were accepted.
                assert row.computed <= computed if self.drafts else row.computed == computed

    def _drafts_of(self, row: Row, scheduled: list[int]) -> list[int]:
        """Under async scheduling they are placeholders for what this runner proposed itself."""
        if -1 not in scheduled:
            return scheduled
        mine = row.drafts[: len(scheduled)]
        return mine + [3] * (len(scheduled) - len(mine))

    def _sample(self, row: Row, inputs: list[int], numbers: list[int], count: int) -> list[int]:
        """Accept drafts as far as the model agrees, add one token; nothing while the prompt is not done."""
        row.states = numbers
        if len(inputs) < len(row.tokens):
            row.computed += count
            return []
        sampled = [next_token(numbers[len(row.tokens) - 1])]
        while (at := len(row.tokens) - 1 + len(sampled)) < len(inputs) and inputs[at] == sampled[-1]:
            sampled.append(next_token(numbers[at]))
        row.computed = len(row.tokens) + len(sampled) - 1
        row.states = numbers[: row.computed]
        row.tokens += sampled
        row.drafts = self._propose(row)
        return sampled

    def _propose(self, row: Row) -> list[int]:
        """Drafts for the tokens after the last one; each right with three chances in four."""
        state, found = row.states[-1], []
        token = row.tokens[-1]
        for _ in range(self.drafts):
            state = chain(state, token)
            token = next_token(state)
            if self.draft_luck.random() < 0.25:
                token = 3 + (token + 1) % (VOCAB - 3)
            found.append(token)
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
