"""The scheduler half: the order of what each call of vLLM's does, and the plan of the step.

A call does several things: each is done even if another one raises. Runs on the engine's scheduler thread.

Refuses to know: memory, copies, tensors, how messages reach the daemon, and what loads (`loading`), stores (`storing`) and
reports (`reporting`) consist of.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec

from kvserver.adapters.common.cache_status import CacheStatus
from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.failed_loads import FailedLoads
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.link import Link
from kvserver.adapters.common.steps import StepPlan, StepReport
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.chunks import Chunks, Tables
from kvserver.adapters.vllm.epochs import Epochs
from kvserver.adapters.vllm.facts import EngineFacts
from kvserver.adapters.vllm.loading import Loading
from kvserver.adapters.vllm.reporting import Reporting
from kvserver.adapters.vllm.requests import Requests, RequestState, turn_of
from kvserver.adapters.vllm.settings import AdapterSettings
from kvserver.adapters.vllm.shortage import STORING_SECONDS, Shortage
from kvserver.adapters.vllm.sleeps import Sleeps
from kvserver.adapters.vllm.storing import Storing
from kvserver.adapters.vllm.support import rehashes_sessions
from kvserver.adapters.vllm.variants import Variants
from kvserver.adapters.vllm.wishes import TrustedWishes, hinted, not_pinned, wishes_of, wishes_of_turn
from kvserver.protocol import HelloReply

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvserver")

P = ParamSpec("P")


class SchedulerHalf:
    """The half of one engine. `lacking`: true of a request if a part of its prompt cannot be computed."""

    def __init__(
        self,
        settings: AdapterSettings,
        link: Link,
        facts: EngineFacts,
        faults: Faults,
        lacking: Callable[[Request], bool],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._link = link
        self._faults = faults
        self._lacking = lacking
        self._serves = False  # until the pool's hook sees which blocks are allocated
        self._stale_hashes = False  # vLLM's own cache may have blocks under hashes of other tokens
        self._requests = Requests(faults)
        self._instance_id, self._only_stores = facts.names.instance_id, not facts.loads
        self._trusted = TrustedWishes(settings.trust_request_pins, settings.tenant, self.counters)
        self._plan = StepPlan()
        self._variants = variants = Variants(
            f"{facts.names.instance_id}/{facts.names.incarnation}",
            facts.weights_version,
            "epoch: weight_transfer_config is set" if facts.weights_are_transferred else "",
            counters=self.counters,
            trusts_uuids=settings.trust_multi_modal_uuids,
            whole_digests=settings.weights_digest == "whole",
            hash_algorithm=facts.hash_algorithm,
            embeddings_dtype=facts.dtype,
        )
        self._pool = pool = PoolHook()
        pool.was_reset = self._pool_was_reset
        self._epochs = Epochs(
            pool,
            variants,
            Sleeps(settings.on_sleep == "keep" and not facts.weights_are_transferred),
            facts.weights_are_transferred or settings.on_prefix_reset == "private",
            self.counters,
            self._begin_epoch,
        )
        patience_seconds = 0.0 if facts.loads else STORING_SECONDS
        self._shortage = Shortage(facts.object_groups, facts.admitted_tokens, patience_seconds)
        self._ids = ids = itertools.count(1)
        self._dispatcher = dispatcher = Dispatcher(link, self.counters, faults)
        dispatcher.on_session.append(self._begin_session)
        chunks = Chunks(facts.object_groups, facts.hash_block_tokens, facts.all_groups)
        failed = FailedLoads()
        self._storing = Storing(facts, settings, chunks, variants, pool, failed, ids, self.counters, faults)
        self._loading = Loading(
            facts, settings, dispatcher, chunks, variants, pool, failed, ids, self.counters, faults
        )  # fmt: skip
        self._reporting = Reporting(
            facts,
            dispatcher,
            pool,
            lambda: facts.describe(variants.epoch, variants.private, variants.durability),
            self.counters,
            faults,
        )

    # ---- lookup -------------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        self._epochs.follow_resets()
        if request.resumable and not rehashes_sessions():
            if not self._stale_hashes:
                log.warning(
                    "a streaming session, for which vLLM before 0.32 keeps hashes of dropped tokens: no more stores"
                )
            self._stale_hashes = True
            return
        since = time.monotonic()
        variant = self._variants.of(request)
        if variant is None:
            return  # it runs without cache
        self._variants.are_files_same(request, since)  # begins the look
        asked = wishes_of(request.kv_transfer_params, self.counters)
        asked = hinted(asked, getattr(request, "kv_hints", None), self.counters)  # vLLM before 0.32 has none
        wishes = self._trusted.allowed(asked)
        state = RequestState(
            request=request,
            variant=variant,
            since=since,
            wishes=wishes,
            waits_for_fills=wishes.waits_for_storage,
            turn=turn_of(request),
            pin=not_pinned(asked, wishes),
            must_load=self._lacking(request),
        )
        self._requests[request.request_id] = state
        self._loading.look_up(state)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Answer vLLM: (tokens beyond `local_tokens` to load, asynchronously); (None, False) = not known yet."""
        state = self._requests.get(request.request_id)
        if state is None:  # it runs without cache
            self._loading.asked(request.request_id, local_tokens)
            self._shortage.asked(request, local_tokens, 0)
            return 0, False
        self._guarded("a session's new turn", self._follow_session, state)
        state.asked_tokens, state.own_tokens = local_tokens, 0
        has_all = self._loading.has_all(state, local_tokens)
        if self._loading.awaits_fill(state):
            return None, False  # first: many may wait, and vLLM asks about each in each pass
        self._loading.asked(request.request_id, local_tokens)
        self._epochs.follow_resets()
        if self._epochs.in_question():
            return None, False
        tokens = self._loading.tokens_to_load(state, local_tokens, has_all) if self._serves else 0
        if tokens is not None:
            self._shortage.asked(request, local_tokens, tokens)
        self._loading.promised(state, tokens or 0)
        if tokens is not None:
            self._storing.answered(request, state, local_tokens + tokens, self._is_usable)
        return tokens, bool(tokens)

    def refused(self, request: Request) -> None:
        """vLLM ends the request instead of placing it, so it waits for no blocks."""
        self._shortage.ended(request)

    def _follow_session(self, state: RequestState) -> None:
        """Before anything is named or planned by the request: a streaming session may have a new turn."""
        turn, request = turn_of(state.request), state.request
        if request.resumable and (turn[0] != state.turn[0] or turn[1] is not state.turn[1]):
            asked = wishes_of_turn(request.sampling_params, state.wishes, self.counters)
            wishes = self._trusted.allowed(asked)
            if asked is not state.wishes:
                state.pin = not_pinned(asked, wishes)
            state.begin_turn(self._variants.of(request), wishes)

    def hit_sources(self, request_id: str) -> tuple[int, int]:
        """Tokens from L1, and from L2, of the load that was just planned."""
        return self._loading.hit_sources(request_id)

    def allocated(self, request: Request, tables: Tables, external_tokens: int) -> None:
        """vLLM has allocated the request's blocks; with external tokens, some of them are to be loaded."""
        self._shortage.placed(request, loads=external_tokens > 0)
        state = self._requests.get(request.request_id)
        if state is not None:
            self._guarded("a session's new turn", self._follow_session, state)
            state.admitted = True
            # Its blocks are others now, and a load may still have to fill them.
            state.computed = 0
        self._plan.loads.extend(self._loading.allocated(request, state, tables, external_tokens))

    # ---- a step -------------------------------------------------------------------------------

    def plan_step(self, output: SchedulerOutput) -> None:
        """Add this step's stores to the plan, and send what the block pool did. Ends a scheduler pass."""
        self._guarded("resets", self._epochs.follow_resets)
        self._guarded("answers", self._dispatcher.receive)
        idle = not output.total_num_scheduled_tokens
        self._loading.next_pass(idle)
        may_store = self._may_store()
        prompt_tokens = 0
        running: list[tuple[Request, int]] = []
        for state, before, computed, anew in self._requests.scheduled(output):
            state.computed = computed
            running.append((state.request, computed))
            self._storing.scheduled(state, before, computed, anew)
            prompt_tokens += max(0, min(computed, state.request.num_prompt_tokens) - before)
            if may_store and state.wishes.stores and not state.lost:
                self._storing.plan(state, output, computed)
        self._guarded("blocks that only stores keep", self._yield_blocks, running)
        # Loads that alone are waited for go first; the next pass sends the records.
        self._reporting.pass_ended(prompt_tokens, with_blocks=not (idle and self._plan.loads))

    def _is_usable(self) -> bool:
        """A connected daemon has registered this engine. It may begin a session, after which answers are void."""
        return self._dispatcher.usable() is not None

    def _may_store(self) -> bool:
        return self._serves and self._is_usable() and self._epochs.may_store and not self._stale_hashes

    def _yield_blocks(self, running: list[tuple[Request, int]]) -> None:
        """Have the stores cancelled that alone keep blocks, if the engine needs these."""
        if self._shortage.pass_ended(self._pool.free, self._storing.kept_blocks, running):
            self._plan.abort_stores += self._storing.cancel_those_that_keep()

    def take_plan(self, idle: bool) -> StepPlan:
        """The plan, complete or not: a load in it must reach the worker, which alone can end the load."""
        plan, self._plan = self._plan, StepPlan()
        plan.step, plan.stores = self._storing.take(computes=not idle)
        plan.idle = idle
        return plan

    def step_ended(self) -> None:
        """vLLM has processed the outputs of the step that a worker's report named."""
        self._storing.step_ended()
        self._reporting.step_ended()

    def drain_events(self) -> Iterable[KVCacheEvent]:
        """Events of the daemon's tiers for vLLM to publish behind the step's own events."""
        return self._reporting.drain_events()

    @property
    def connected(self) -> bool:
        return self._link.usable() is not None

    @property
    def cache_status(self) -> CacheStatus:
        return self._link.cache_status if self._serves else CacheStatus("fault", "see the engine's log")

    @property
    def quarantined_blocks(self) -> int:
        return self._loading.quarantined_blocks

    @property
    def has_pending_work(self) -> bool:
        """True if an idle engine should step on: stores or records wait to be sent, or a store's end is awaited."""
        return self._storing.awaited or (self.connected and self._reporting.has_unsent_records)

    # ---- reports of workers -------------------------------------------------------------------

    def worker_report(self, report: StepReport) -> None:
        """Process each entry on its own: it is reported once, and a fault in one must not lose another."""
        self._storing.step_reported(report.step)
        self._guarded("resets", self._epochs.workers_reported, report.wakes)
        for load_id, block_ids in report.quarantined:
            self._guarded("quarantine", self._loading.quarantined, load_id, block_ids)
        for request_id in report.failed_loads:
            self._guarded("a failed load", self._loading.load_failed, request_id, self._requests.get(request_id))
        for load_id in report.released:
            self._guarded("the end of a quarantine", self._loading.released, load_id)
        for store_id in report.ended_stores:
            self._guarded("the end of a store", self._storing.ended, store_id)
        for store_id, objects in report.copied:
            self._guarded("the end of a store", self._storing.copied, store_id, objects)

    def invalid_blocks(self, block_ids: set[int]) -> None:
        """vLLM has declared them invalid: they were to be loaded, by any connector, and were not."""
        self._storing.invalid_blocks(block_ids, self._requests.values())

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        """vLLM receives the ends of these requests' loads."""
        self._loading.loads_ended(request_ids)

    def _pool_was_reset(self) -> None:
        self._guarded("loads in a reset", self._begin_loading_requests_again)

    def _begin_loading_requests_again(self) -> None:
        for request_id in self._loading.pool_was_reset():
            if (state := self._requests.get(request_id)) is not None:
                self._abort_loads(state)
                state.loads = []  # their keys are none that cannot be loaded
                state.store_again()

    def _guarded(self, where: str, act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        with self._faults.guarded(where):
            act(*args, **kwargs)

    # ---- end of requests, cache resets, shutdown ----------------------------------------------

    def request_finished(self, request: Request, tables: Tables) -> dict[str, Any] | None:
        """End the request; return what its answer's kv_transfer_params should have.

        Requests that ran without cache are ended, too: the daemon counts every prompt.
        """
        state = self._requests.pop(request.request_id, None)
        self._shortage.ended(request)
        self._loading.request_ended(request.request_id, tables)
        if state is not None:
            self._abort_loads(state)
            self._guarded("stores of a request", self._plan_last_stores, state, tables)
        prompt = self._loading.prompt_ended(request, state)
        why = state.not_loaded if state is not None else ""
        why = "computes_all" if request.skip_reading_prefix_cache else why or self._variants.why_without_cache(request)
        self._reporting.request_ended(request.request_id, prompt, why)
        return self._answered_params(request, state)

    def _answered_params(self, request: Request, state: RequestState | None) -> dict[str, Any] | None:
        params: dict[str, Any] = {"kvserver.pin": state.pin} if state is not None and state.pin else {}
        if self._hands_over(request):
            # 0 too: where there is an answer, a proxy does not pass on what its client made up.
            tokens = self._storing.stored_tokens(state) if state is not None else 0
            params |= {"kvserver.prefilled_tokens": tokens, "kvserver.prefilled_by": self._instance_id}
        return params or None

    def _hands_over(self, request: Request) -> bool:
        """True if another engine may decode the request: a proxy asks for it by vLLM's own parameter, or for one token alone."""
        asked = request.kv_transfer_params
        return (
            self._only_stores
            or request.max_tokens == 1
            or (isinstance(asked, dict) and bool(asked.get("do_remote_decode")))
        )

    def _plan_last_stores(self, state: RequestState, tables: Tables) -> None:
        self._follow_session(state)
        self._storing.plan_last(state, tables, self._may_store)

    def reset_cache(self) -> bool:
        """vLLM reports that the weights may have changed, or goes to sleep."""
        self._epochs.reset_cache()
        return True

    def _begin_epoch(self, since: str) -> None:
        """Make void what is of the former weights."""
        serves, self._serves = self._serves, False  # for good, should a fault leave open which weights' KV is found
        self._variants.weights_changed(since)
        self._reporting.introduce_again()
        self._plan.abort_stores += self._storing.cancel_all()  # what they read may be of both weights
        for state in self._requests.values():
            self._abort_loads(state)
            self._loading.drop_answer(state)
            state.variant = self._variants.of(state.request) or state.variant  # if None it is no longer current
            state.store_again()
            state.boundaries = None
        self._serves = serves

    def bind_pool(self, pool: BlockPool, begin_again: Callable[[set[str]], object] | None) -> None:
        """`begin_again` has vLLM begin these requests again once their loads have ended."""
        self._pool.install(pool)
        self._loading.can_begin_again(begin_again)
        self._serves = True

    @property
    def has_pool(self) -> bool:
        return self._pool.size > 0

    def shut(self) -> None:
        try:
            self._link.stop()
        finally:
            self._dispatcher.close()

    def _abort_loads(self, state: RequestState) -> None:
        """A no-op unless they still run."""
        self._plan.abort_loads.extend(load.copy_id for load in state.loads)

    def _begin_session(self, hello: HelloReply | None) -> None:
        """Lookups and their answers are void."""
        self._loading.begin_session(next(self._ids))
        self._storing.begin_session(hello)
        for state in self._requests.values():
            state.answer = None
            state.store_again()
            state.boundaries = None
