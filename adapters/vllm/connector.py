"""`KVServerConnector`: vLLM's connector interface over the two halves.

Owns: construction, and the fence that keeps the connector's exceptions out of the engine. Refuses to know: any decision.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform

from kvserver.adapters.common.cache_status import SCHEDULER, STARTING, CacheStatus
from kvserver.adapters.common.exporter import CannotShare, MakeExporter
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.host_memory import shared_allocation
from kvserver.adapters.common.link import Link
from kvserver.adapters.common.planes import UnsupportedLayout
from kvserver.adapters.common.send_queue import DirectSendQueue, OrderedSendQueue, SendQueue
from kvserver.adapters.common.settings import read_settings
from kvserver.adapters.common.stats import StatsReporter
from kvserver.adapters.common.steps import StepPlan, StepReport
from kvserver.adapters.common.worker import Rank, WorkerHalf
from kvserver.adapters.versions import tested_with
from kvserver.adapters.vllm.facts import engine_facts
from kvserver.adapters.vllm.missing_embeddings import MissingEmbeddings
from kvserver.adapters.vllm.nesting import (
    a_sibling_allocates,
    begins_again,
    fails_requests,
    has_inexact_siblings,
    is_the_only_one,
    outer_transfer,
)
from kvserver.adapters.vllm.prom import KVServerPromMetrics
from kvserver.adapters.vllm.registration import RankRegistration
from kvserver.adapters.vllm.scheduler import SchedulerHalf
from kvserver.adapters.vllm.settings import AdapterSettings
from kvserver.adapters.vllm.stats import DISK, HOST, KVServerStats
from kvserver.adapters.vllm.support import TransferResults, loads, unsupported, vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvserver")
KVConnectorMetadata.register(StepPlan)
KVConnectorWorkerMetadata.register(StepReport)

R = TypeVar("R")


def fenced(default: Any = None, half: str = "") -> Callable[[Callable[..., R]], Callable[..., R]]:
    """An exception in the method is counted, logged once per place and kind, and the method returns `default`.

    Every method of vLLM's interface is fenced or cannot raise: one that raises ends the engine. A method of one `half`,
    "scheduler" or "worker", receives it as its first argument; without that half it returns `default`.
    """

    def decorate(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def call(self: KVServerConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                if not half:
                    return method(self, *args, **kwargs)
                if (found := getattr(self, half)) is not None:
                    return method(self, found, *args, **kwargs)
            except Exception as error:
                self.faults.count(method.__name__, error)
            return default() if callable(default) else default

        if half:
            own, _, *others = inspect.signature(method).parameters.values()
            call.__signature__ = inspect.Signature([own, *others])  # type: ignore[attr-defined]
        return call

    return decorate


class StillWritten(Exception):
    """KV cache that must not be freed: a load that the daemon did not end may still write into it."""


class KVServerConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    make_exporter: MakeExporter | None = None  # None: by the memory's device

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.faults = Faults()
        self.errors = self.faults.counts
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        self._settings = AdapterSettings()
        self._config = vllm_config
        self._caches_config = kv_cache_config
        self._registration: RankRegistration | None = None  # None: this worker is not registered, or the scheduler
        rank = f"rank {vllm_config.parallel_config.rank}"
        self._stats_reporter = StatsReporter(SCHEDULER if role == KVConnectorRole.SCHEDULER else rank)
        self._answers = False  # with parameters, which MultiConnector before vLLM 0.32 takes from one connector only
        self._stepped = False
        self._has_computed = False
        self._asleep = False  # between unregister_kv_caches and restore_kv_caches
        self._missing_embeddings = MissingEmbeddings(vllm_config, alone=False)
        self._refusal: str | None = "the connector could not be set up"
        self._off: CacheStatus | None = CacheStatus("setup_failed", "see the engine's log")  # why there is no link
        self._set_up(role)

    @fenced()
    def _set_up(self, role: KVConnectorRole) -> None:
        transfer = self._config.kv_transfer_config
        outer = outer_transfer(transfer)
        self._missing_embeddings = MissingEmbeddings(self._config, alone=outer is transfer)
        self._settings = read_settings(AdapterSettings, transfer.kv_connector_extra_config)
        self._answers = outer is transfer or (vllm_version() >= (0, 32) and is_the_only_one(outer))
        self._refusal = unsupported(self._config, self._caches_config, outer)
        # vLLM reads the policy after it built the connector; its default fails the request.
        for config in (transfer, outer):
            config.kv_load_failure_policy = self._settings.load_failure_policy
        if role == KVConnectorRole.SCHEDULER:
            tested, line = tested_with(vllm.__version__)
            log.log(logging.INFO if tested else logging.WARNING, line)
        if role == KVConnectorRole.WORKER:
            self.worker = self._make_worker(DirectSendQueue())
        if self._refusal is not None:
            self._runs_without("unsupported", self._refusal)
        elif role == KVConnectorRole.WORKER:
            self._off = STARTING
        elif role == KVConnectorRole.SCHEDULER:
            facts = engine_facts(self._config, self._caches_config, has_inexact_siblings(outer), loads(transfer, outer))
            link = Link(self._settings.endpoint, "scheduler")
            link.start(self._settings.connect_timeout_ms / 1000)
            self.scheduler = SchedulerHalf(self._settings, link, facts, self.faults, self._missing_embeddings.lacking)
            self._missing_embeddings.counters = self.scheduler.counters
            self._off = None

    def _runs_without(self, reason: str, why: str) -> None:
        self._off = CacheStatus(reason, why)
        log.warning("kvserver: this engine runs without cache: %s", why)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """vLLM 0.33 and later. On GPUs sleep mode allocates the KV cache in memory that no other process can map (cumem); vLLM does not start then."""
        served = bool(current_platform.is_cpu())
        if not served:
            log.error("kvserver: sleep mode allocates GPU memory that cannot be shared; leave out --enable-sleep-mode")
        return served

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what it drops is a miss, never lost output

    def _make_worker(self, send_queue: SendQueue, link: Link | None = None, rank: Rank | None = None) -> WorkerHalf:
        fails = TransferResults is not None
        return WorkerHalf(self._settings, send_queue, self.faults, rank or Rank(), link, fails_requests=fails)

    # ---- worker side --------------------------------------------------------------------------

    @fenced()
    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """The context in which vLLM 0.32 and later allocate the KV cache: on CPU in shared memory, as model runners capture its addresses."""
        if self._refusal is not None or not current_platform.is_cpu() or a_sibling_allocates():
            return None
        return shared_allocation()

    @fenced()
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._refusal is not None:
            return
        self._off = CacheStatus("setup_failed", "the KV cache could not be registered, see the engine's log")
        registration = RankRegistration(
            self._settings, self._config, self._caches_config, kv_caches, lambda: self._has_computed
        )
        if (made := self._make_link(registration)) is None:
            return
        self._registration = registration
        self.worker = self._make_worker(self.make_send_queue(), *made)
        self._off = None
        made[0].start(self._settings.connect_timeout_ms / 1000)

    def _make_link(self, registration: RankRegistration) -> tuple[Link, Rank] | None:
        try:
            return registration.link(self.make_exporter)
        except (UnsupportedLayout, CannotShare) as error:
            self._runs_without("cannot_share", str(error))
            return None

    def make_send_queue(self) -> SendQueue:
        """Make the worker's send queue. On a GPU messages wait for the engine's work, which runs after the engine's thread has queued it."""
        on_gpu = self._registration is not None and self._registration.on_gpu
        return OrderedSendQueue(lambda: torch.cuda.Event(blocking=True)) if on_gpu else DirectSendQueue()

    def unregister_kv_caches(self, *args: Any, **kwargs: Any) -> None:
        """Unregister the KV cache before vLLM's sleep frees the memory (0.33 and later). StillWritten if it must not; the sleep fails then.

        Returns once the daemon has closed its mappings. If it has not in time and no load runs, the daemon can only read, and
        publishes nothing of it. Then vLLM may free the memory, which stays in use until the daemon closes its mappings.
        """
        if not self._unregister():
            raise StillWritten("kvserver does not answer, and a load may still write into the KV cache; try again")

    @fenced(False)
    def _unregister(self) -> bool:
        """Unregister from the daemon; return whether the memory may be freed."""
        if self.worker is None:
            return True
        self._asleep = self._registration is not None
        return self.worker.detach(self._settings.unregister_timeout_ms / 1000)

    @fenced()
    def restore_kv_caches(self, *args: Any, **kwargs: Any) -> None:
        """Register again after sleep: there is memory at the same addresses, perhaps other memory than before."""
        if self.worker is None or self._registration is None or not self._asleep:
            return
        self._asleep = False
        if (made := self._make_link(self._registration)) is not None:
            self._off = None
            self.worker.attach(made[0])
            made[0].start(self._settings.connect_timeout_ms / 1000)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step's copies: before the forward, behind the model runner's early writes (zeroes, copies of blocks and states).

        Both runners call it there, in each step and on each rank. The forward neither reads nor writes what these copies do: a
        load's request is in no batch yet, and a store's KV is of accepted steps, in pinned blocks.
        """
        super().bind_connector_metadata(connector_metadata)
        self._begin_stores()
        self._begin_loads()

    @fenced(half="worker")
    def _begin_stores(self, worker: WorkerHalf) -> None:
        plan = self._plan()
        try:
            worker.begin_step(plan.step)
            worker.start_stores(plan)
        finally:
            worker.answer_for_stores(plan)

    @fenced(half="worker")
    def _begin_loads(self, worker: WorkerHalf) -> None:
        plan = self._plan()
        self._has_computed |= not plan.idle
        try:
            worker.start_loads(plan)
        finally:
            worker.answer_for_loads(plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        return plan if isinstance(plan, StepPlan) else StepPlan()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished, _ = self._finished()
        return None, finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        finished, failed = self._finished()
        return TransferResults(finished_recving=finished, failed_recving=failed)

    @fenced(lambda: (set(), set()), "worker")
    def _finished(self, worker: WorkerHalf) -> tuple[set[str], set[str]]:
        with self.faults.guarded("poll"):  # ended copies are reported all the same
            worker.poll(idle=self._plan().idle)
        return worker.load_ends.take_finished()

    @fenced(set, "worker")
    def get_block_ids_with_load_errors(self, worker: WorkerHalf) -> set[int]:
        return worker.load_ends.take_invalid_blocks()

    @fenced(half="worker")
    def build_connector_worker_meta(self, worker: WorkerHalf) -> StepReport | None:
        return worker.take_report(self._plan().step)

    # ---- statistics: of either half, and in vLLM's front end ---------------------------------

    @fenced()
    def get_kv_connector_stats(self) -> KVServerStats | None:
        half = self.worker or self.scheduler
        quarantined = self.scheduler.quarantined_blocks if self.scheduler is not None else 0
        status = self._off or (half.cache_status if half is not None else STARTING)
        counters = half.counters if half is not None else self._missing_embeddings.counters
        data = self._stats_reporter.report(counters, self.errors, status, quarantined)
        data |= self.worker.take_seconds() if self.worker is not None else {}
        return KVServerStats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVServerStats:
        return KVServerStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVServerPromMetrics:
        return KVServerPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler side -----------------------------------------------------------------------

    @fenced(half="scheduler")
    def bind_gpu_block_pool(self, scheduler: SchedulerHalf, gpu_block_pool: BlockPool) -> None:
        self._bind(scheduler, gpu_block_pool)

    @fenced(half="scheduler")
    def bind_scheduler_context(self, scheduler: SchedulerHalf, context: Any) -> None:
        """Take the pool from the context that replaces `bind_gpu_block_pool` in vllm#53067."""
        pool = getattr(context, "gpu_block_pool", None) or getattr(context, "block_pool", None)
        if pool is not None:
            self._bind(scheduler, pool)

    def _bind(self, scheduler: SchedulerHalf, pool: BlockPool) -> None:
        if self._settings.load_failure_policy == "recompute" and fails_requests():
            self.scheduler = None
            self._runs_without(
                "unsupported",
                "a failed load would end its request, and the kv_transfer_config that sets this cannot be changed from here; set its "
                'kv_load_failure_policy to "recompute"',
            )
            scheduler.shut()
        else:
            scheduler.bind_pool(pool, begins_again())

    def _has_pool(self, scheduler: SchedulerHalf) -> bool:
        """True if the pool is bound, which vLLM does while it constructs its scheduler. Without it the cache is off from the first call on."""
        if not scheduler.has_pool:
            self.scheduler = None
            self._runs_without(
                "unsupported", "this vLLM gave the connector no block pool, so no block can be kept from others"
            )
            scheduler.shut()
        return scheduler.has_pool

    @fenced(half="scheduler")
    def on_new_request(self, scheduler: SchedulerHalf, request: Request) -> None:
        if self._has_pool(scheduler):
            scheduler.new_request(request)

    @fenced((0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = (0, False)
        if self.scheduler is not None:
            with self.faults.guarded("get_num_new_matched_tokens"):
                found = self.scheduler.matched_tokens(request, num_computed_tokens)
        if found[0] is None or not self._missing_embeddings.refuses(request, num_computed_tokens + found[0]):
            return found
        if self.scheduler is not None:
            self.scheduler.refused(request)
        return None, False

    @fenced(dict, "scheduler")
    def get_external_cache_hit_sources(
        self, scheduler: SchedulerHalf, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """vLLM 0.31 and later count hits by where they come from. Tokens that are missing here have no source."""
        l1, l2 = scheduler.hit_sources(request.request_id)
        return {source: tokens for source, tokens in ((HOST, l1), (DISK, l2)) if tokens}

    @fenced(half="scheduler")
    def update_state_after_alloc(
        self, scheduler: SchedulerHalf, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @fenced(StepPlan)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._stepped = True
        idle = scheduler_output.total_num_scheduled_tokens == 0
        if self.scheduler is None or not self._has_pool(self.scheduler):
            return StepPlan(idle=idle)
        with self.faults.guarded("_plan_stores"):
            self.scheduler.plan_step(scheduler_output)
        return self.scheduler.take_plan(idle)

    @fenced(half="scheduler")
    def update_connector_output(self, scheduler: SchedulerHalf, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            scheduler.worker_report(report)
        scheduler.loads_ended(connector_output.finished_recving or ())
        if connector_output.invalid_block_ids:
            scheduler.invalid_blocks(set(connector_output.invalid_block_ids))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @fenced((False, None), "scheduler")
    def request_finished_all_groups(
        self, scheduler: SchedulerHalf, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`block_ids` are those of no group for a model without KV cache."""
        params = scheduler.request_finished(request, block_ids)
        return False, params if self._answers else None

    @fenced(False)
    def has_pending_push_work(self) -> bool:
        """True also before the first step: with it all halves report whether they have a daemon, hours before a request perhaps."""
        return not self._stepped or (self.scheduler is not None and self.scheduler.has_pending_work)

    @fenced(False)
    def reset_cache(self) -> bool | None:
        return self.scheduler.reset_cache() if self.scheduler is not None else True

    @fenced(tuple, "scheduler")
    def take_events(self, scheduler: SchedulerHalf) -> Iterable[KVCacheEvent]:
        """vLLM calls it once in each step, after it has processed the step's outputs."""
        with self.faults.guarded("the end of a step"):
            scheduler.step_ended()
        return scheduler.drain_events()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Workers send none; vLLM's own raises for pipeline parallel."""

    @fenced()
    def shutdown(self) -> None:
        try:
            if self.scheduler is not None:
                self.scheduler.shut()
        finally:
            if self.worker is not None:
                self.worker.shut()
