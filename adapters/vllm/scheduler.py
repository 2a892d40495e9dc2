"""The scheduler half: what each call of vLLM's does, and which blocks must not be touched.

A call does several things: each is done even if another one raises. A block could be allocated again while a store still reads
it. So the store's blocks are pinned in the pool, from its plan until all ranks have reported its end.

Runs on the engine's scheduler thread.

Owns: the order of what a call does, and the plan of the step. Refuses to know: memory, copies, tensors, how messages reach the
daemon, what of a prompt is loaded (`hits`), and of which objects a store or a load consists (`store_plans`, `load_plans`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ParamSpec

from vllm.v1.request import RequestStatus

from kvserver.adapters.common.announcer import Announcer
from kvserver.adapters.common.cache_status import CacheStatus
from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.failed_loads import FailedLoads
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.hazards import PinnedStores, Quarantine
from kvserver.adapters.common.introduction import Introduction
from kvserver.adapters.common.link import Link
from kvserver.adapters.common.lookups import Lookups
from kvserver.adapters.common.notices import Notices
from kvserver.adapters.common.specs import LoadSpec
from kvserver.adapters.common.speed import PrefillSpeed
from kvserver.adapters.common.steps import StepPlan, StepReport
from kvserver.adapters.vllm.acceptance import Acceptance
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.chunks import Chunks, Tables
from kvserver.adapters.vllm.epochs import Epochs
from kvserver.adapters.vllm.events import TierEvents
from kvserver.adapters.vllm.facts import EngineFacts
from kvserver.adapters.vllm.forgotten import WaitingForLoads
from kvserver.adapters.vllm.hits import Hits
from kvserver.adapters.vllm.load_plans import LoadPlanner
from kvserver.adapters.vllm.promises import Promises
from kvserver.adapters.vllm.requests import Requests, RequestState, turn_of
from kvserver.adapters.vllm.settings import AdapterSettings
from kvserver.adapters.vllm.shortage import Shortage
from kvserver.adapters.vllm.sleeps import Sleeps
from kvserver.adapters.vllm.sources import Sources
from kvserver.adapters.vllm.store_plans import StorePlanner
from kvserver.adapters.vllm.support import rehashes_sessions
from kvserver.adapters.vllm.variants import Variants
from kvserver.adapters.vllm.wishes import wishes_of, wishes_of_turn
from kvserver.protocol import HelloReply

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvserver")

_IDLE_WAIT_SECONDS = 0.001  # of a pass that schedules nothing, while requests wait for fills
_REPORT_SECONDS = 1.0  # from a store's deadline until the workers have reported its end
_NOT_ACCEPTED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)  # ends from outside of a step

P = ParamSpec("P")


class SchedulerHalf:
    def __init__(self, settings: AdapterSettings, link: Link, facts: EngineFacts, faults: Faults) -> None:
        self.counters: Counter[str] = Counter()
        self._link = link
        self._faults = faults
        self._serves = False  # until the pool's hook sees which blocks are allocated
        self._stale_hashes = False  # vLLM's own cache may have blocks under hashes of other tokens
        self._requests = Requests(faults)
        self._plan = StepPlan()
        self._chunks = Chunks(facts.object_groups, facts.hash_block_tokens)
        self._variants = Variants(
            f"{facts.names.instance_id}/{facts.names.incarnation}",
            facts.weights_version,
            "epoch: weight_transfer_config is set" if facts.weights_are_transferred else "",
            counters=self.counters,
            trusts_uuids=settings.trust_multi_modal_uuids,
            whole_digests=settings.weights_digest == "whole",
            hash_algorithm=facts.hash_algorithm,
            embeddings_dtype=facts.dtype,
        )
        self._pool = PoolHook()
        self._epochs = Epochs(
            self._pool,
            self._variants,
            Sleeps(settings.on_sleep == "keep" and not facts.weights_are_transferred),
            facts.weights_are_transferred or settings.on_prefix_reset == "private",
            self.counters,
            self._begin_epoch,
        )
        self._waiting = WaitingForLoads()
        self._pool.forgettable, self._pool.was_reset = self._waiting.blocks, self._pool_was_reset
        self._shortage = Shortage(facts.object_groups, facts.admitted_tokens)
        seconds = settings.store_timeout_ms / 1000 + _REPORT_SECONDS
        self._pins = PinnedStores(self._pool, facts.world_size, seconds)
        self._ids = ids = itertools.count(1)
        self._failed = FailedLoads()
        self._inexact_siblings = facts.inexact_siblings
        self._acceptance = Acceptance(
            self._pins, self._pool.suspects, facts.block_tokens, self.counters, self._variants.are_files_same
        )
        self._stores = StorePlanner(
            self._chunks, facts, self._variants, self._pins, self._acceptance, ids, self.counters
        )
        self._loads = LoadPlanner(self._chunks, ids)
        self._quarantine = Quarantine(self._pool)
        self._speed = PrefillSpeed()
        self._sources = Sources()
        self._promises = Promises(self.counters)
        self._dispatcher = Dispatcher(link, self.counters, faults)
        self._dispatcher.on_session.append(self._begin_session)
        self._lookups = Lookups(self._dispatcher, settings, self.counters)
        self._hits = Hits(facts, self._chunks, self._variants, self._failed, self._lookups)
        self._notices = Notices(self._dispatcher, facts.names, self._pool, self.counters)
        self._announcer = Announcer(self._dispatcher, facts.names, TierEvents(facts.groups), facts.publishes)
        self._introduction = Introduction(
            self._dispatcher, lambda: facts.describe(self._variants.epoch, self._variants.private)
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
        wishes = wishes_of(request.kv_transfer_params, self.counters)
        state = RequestState(
            request=request,
            variant=variant,
            since=since,
            wishes=wishes,
            waits_for_fills=wishes.waits_for_storage,
            turn=turn_of(request),
        )
        self._requests[request.request_id] = state
        usable = self._dispatcher.usable() is not None
        if usable and self._hits.is_useful(state) and not request.skip_reading_prefix_cache:
            self._hits.look_up(state)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Answer vLLM: (tokens beyond `local_tokens` to load, asynchronously); (None, False) = not known yet."""
        state = self._requests.get(request.request_id)
        if state is None:  # it runs without cache
            self._sources.asked(request.request_id, local_tokens)
            self._shortage.asked(request, local_tokens, 0)
            return 0, False
        self._guarded("a session's new turn", self._follow_session, state)
        state.asked_tokens, state.own_tokens = local_tokens, 0
        has_all = self._hits.has_all(state, local_tokens)
        if self._lookups.awaits_fill(state):
            return None, False  # first: many may wait, and vLLM asks about each in each pass
        self._sources.asked(request.request_id, local_tokens)
        self._epochs.follow_resets()
        if self._epochs.in_question():
            return None, False
        tokens = self._hits.tokens_to_load(state, local_tokens, has_all) if self._serves else 0
        if tokens is not None:
            self._shortage.asked(request, local_tokens, tokens)
        if state.answer is not None:
            self._promises.answered(request.request_id, tokens or 0, state.answer.l2_chunks * self._chunks.tokens)
        if tokens is not None and self._chunks.states:
            state.engine_boundary = request.shared_prefix_boundary  # vLLM has just set it
            self._want_state(state, local_tokens + tokens)
        return tokens, bool(tokens)

    def _follow_session(self, state: RequestState) -> None:
        """Before anything is named or planned by the request: a streaming session may have a new turn."""
        turn, request = turn_of(state.request), state.request
        if request.resumable and (turn[0] != state.turn[0] or turn[1] is not state.turn[1]):
            wishes = wishes_of_turn(request.sampling_params, state.wishes, self.counters)
            state.begin_turn(self._variants.of(request), wishes)

    def hit_sources(self, request_id: str) -> tuple[int, int]:
        """Tokens of the load that was just planned that come from L1, and from L2."""
        return self._promises.being_loaded(request_id)

    # ---- loads --------------------------------------------------------------------------------

    def allocated(self, request: Request, tables: Tables, external_tokens: int) -> None:
        """vLLM has allocated the request's blocks; with external tokens, some of them are to be loaded."""
        self._shortage.placed(request, loads=external_tokens > 0)
        self._waiting.placed(request.request_id)
        state = self._requests.get(request.request_id)
        if state is not None:
            self._guarded("a session's new turn", self._follow_session, state)
        if state is not None and external_tokens <= 0 and self._promises.is_open(request.request_id):
            state.not_loaded = "not_used"
        self._guarded("sources of a prompt", self._placed, request, external_tokens)
        if state is not None:
            state.admitted = True
            # Its blocks are others now, and a load may still have to fill them.
            state.computed = 0
        if external_tokens <= 0:
            return
        self._waiting.began(request, tables)
        if state is not None:
            state.own_tokens = external_tokens
        loads: list[LoadSpec] = []
        try:
            if state is None:
                raise LookupError("a load for a request that was never seen")
            state.loads = []
            loads = self._loads.plan(state, tables, external_tokens)
            state.loads = loads
            if (answer := state.answer) is not None:
                state.stored_chunks = max(state.stored_chunks, answer.hit_chunks)
                found = self._chunks.found_tokens(answer.hit_chunks, answer.tail_blocks) if self._chunks.tails else 0
                state.stored_blocks = max(state.stored_blocks, found // self._chunks.block_tokens)
        except Exception as error:
            self._faults.count("planning of a load", error)
        if not loads:
            loads = [self._loads.without_keys(request.request_id, tables)]
        self._plan.loads.extend(loads)

    def _placed(self, request: Request, external_tokens: int) -> None:
        from_l2 = self._promises.placed(request.request_id, external_tokens)
        self._sources.placed(request, external_tokens, from_l2)

    # ---- stores -------------------------------------------------------------------------------

    def plan_step(self, output: SchedulerOutput) -> None:
        """Add this step's stores to the plan, and send what the block pool did. Ends a scheduler pass."""
        self._guarded("resets", self._epochs.follow_resets)
        self._guarded("answers", self._dispatcher.receive)
        self._lookups.next_pass()
        idle = not output.total_num_scheduled_tokens
        if self._lookups.fills and idle:
            self._guarded("a wait for fills", self._dispatcher.wait, _IDLE_WAIT_SECONDS)
        may_store = self._may_store()
        prompt_tokens = 0
        running: list[tuple[Request, int]] = []
        for state, before, computed, anew in self._requests.scheduled(output):
            state.computed = computed
            running.append((state.request, computed))
            self._look_for_siblings(state, before)
            self._acceptance.scheduled(state, before, computed, anew)
            prompt_tokens += max(0, min(computed, state.request.num_prompt_tokens) - before)
            if may_store and state.wishes.stores and not state.lost:
                self._guarded("stores of a request", self._stores.plan, state, output, computed)
                self._guarded("the next state", self._want_state, state, computed)
        self._guarded("blocks that only stores keep", self._yield_blocks, running)
        if not (idle and self._plan.loads):  # loads that alone are waited for go first; the next pass sends the records
            self._guarded("reports of blocks", self._notices.send_blocks)
        self._guarded("introduction", self._introduction.send)
        self._guarded("question for events", self._announcer.request_events)
        self._guarded("prefill speed", self._speed.planned, prompt_tokens)

    def _look_for_siblings(self, state: RequestState, before: int) -> None:
        """Another connector of vLLM's MultiConnector has loaded what neither vLLM nor this one had."""
        asked, state.asked_tokens = state.asked_tokens, None
        if (
            self._inexact_siblings
            and asked is not None
            and before - asked - state.own_tokens >= self._chunks.block_tokens
        ):
            self._acceptance.loaded_by_sibling(state, asked, before)

    def _may_store(self) -> bool:
        return (
            self._serves and self._dispatcher.usable() is not None and self._epochs.may_store and not self._stale_hashes
        )

    def step_ended(self) -> None:
        """vLLM has processed the outputs of the step that a worker's report named."""
        self._pins.step_ended(self._acceptance.step_ended())
        self._speed.ended()

    def drain_events(self) -> Iterable[KVCacheEvent]:
        """Events of the daemon's tiers for vLLM to publish behind the step's own events."""
        return self._announcer.drain_events(self._pool.clears)

    def take_plan(self, idle: bool) -> StepPlan:
        """The plan, complete or not: a load in it must reach the worker, which alone can end the load."""
        plan, self._plan = self._plan, StepPlan()
        plan.step, plan.stores = self._acceptance.plan(computes=not idle)
        plan.idle = idle
        for store in plan.stores:
            self._failed.store_planned(store, self._stores.copies_of(store))
        return plan

    def _plan_last_stores(self, state: RequestState, tables: Tables) -> None:
        """Plan the last stores of a request. If it was aborted or failed, only KV that vLLM had accepted is stored."""
        self._follow_session(state)
        aborted = state.request.status in _NOT_ACCEPTED
        if aborted:
            self._acceptance.drop_request(state)
        # The end of a step before a preemption counts for blocks that a load may not have filled yet: these have none computed.
        computed = min(state.accepted_tokens, state.computed) if aborted else state.computed
        if state.wishes.stores and not state.lost and self._may_store():
            self._stores.plan_last(state, tables, computed)

    def _want_state(self, state: RequestState, computed: int) -> None:
        if self._chunks.states and state.wishes.stores and self._dispatcher.usable() is not None:
            self._stores.want_state(state, computed)

    def _yield_blocks(self, running: list[tuple[Request, int]]) -> None:
        """Have the stores cancelled that alone keep blocks, if the engine needs these."""
        if self._shortage.pass_ended(self._pool.free, self._pins.kept(), running):
            self._cancel_stores(self._pins.cancel_all_that_keep())

    def _cancel_stores(self, store_ids: Iterable[int]) -> None:
        self._plan.abort_stores += self._acceptance.drop_stores(store_ids)

    @property
    def connected(self) -> bool:
        return self._link.usable() is not None

    @property
    def cache_status(self) -> CacheStatus:
        return self._link.cache_status if self._serves else CacheStatus("fault", "see the engine's log")

    @property
    def quarantined_blocks(self) -> int:
        return len(self._quarantine)

    @property
    def has_pending_work(self) -> bool:
        """True if an idle engine should step on: stores or records wait to be sent, or a store's end is awaited."""
        return self._pins.awaited or (self.connected and self._notices.has_unsent_records)

    # ---- reports of workers -------------------------------------------------------------------

    def worker_report(self, report: StepReport) -> None:
        """Process each entry on its own: it is reported once, and a fault in one must not lose another."""
        self._acceptance.reported(report.step)
        self._guarded("resets", self._epochs.workers_reported, report.wakes)
        for load_id, block_ids in report.quarantined:
            self._guarded("quarantine", self._quarantined, load_id, block_ids)
        for request_id in report.failed_loads:
            self._guarded("a failed load", self._load_failed, request_id)
        for load_id in report.released:
            self._guarded("the end of a quarantine", self._quarantine.release, load_id)
        for store_id in report.ended_stores:
            self._guarded("the end of a store", self._pins.ended, store_id)
        for store_id, objects in report.copied:
            self._guarded("the end of a store", self._failed.store_copied, store_id, objects)

    def invalid_blocks(self, block_ids: set[int]) -> None:
        """vLLM has declared them invalid: they were to be loaded, by any connector, and were not."""
        self._acceptance.invalid_blocks(block_ids, self._requests.values())

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        """vLLM receives the ends of these requests' loads."""
        self._waiting.loads_ended(request_ids)

    def _pool_was_reset(self) -> None:
        self._guarded("loads in a reset", self._begin_loading_requests_again)

    def _begin_loading_requests_again(self) -> None:
        """Their loads bring KV from before the reset. They end, and fail in the accounts only."""
        for request_id in self._waiting.reset():
            self._sources.load_failed(request_id)
            self._promises.failed(request_id)
            if (state := self._requests.get(request_id)) is not None:
                self._abort_loads(state)
                state.loads = []  # their keys are none that cannot be loaded
                state.store_again()

    def _quarantined(self, load_id: int, block_ids: list[int]) -> None:
        if self._quarantine.add(load_id, block_ids):
            self.counters["quarantined_blocks"] += len(block_ids)
            log.warning(
                "a load that was given up has not ended; %d blocks stay out of use until it has", len(block_ids)
            )

    def _load_failed(self, request_id: str) -> None:
        self.counters["failed_loads"] += 1
        self._sources.load_failed(request_id)
        self._promises.failed(request_id)
        if (state := self._requests.get(request_id)) is not None:
            for load in state.loads:
                self._failed.failed(load)
            state.give_up = True
            state.store_again()

    def _guarded(self, where: str, act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        with self._faults.guarded(where):
            act(*args, **kwargs)

    # ---- end of requests, cache resets, shutdown ----------------------------------------------

    def request_finished(self, request: Request, tables: Tables) -> None:
        """End the request. Requests that ran without cache are ended, too: the daemon counts every prompt."""
        state = self._requests.pop(request.request_id, None)
        self._shortage.ended(request)
        self._waiting.request_ended(request.request_id, tables)
        if state is not None:
            self._abort_loads(state)
            self._guarded("stores of a request", self._plan_last_stores, state, tables)
        prompt = self._sources.ended(request)
        self._promises.ended(request.request_id)
        if state is not None:
            self._lookups.drop_question(state)
        why = state.not_loaded if state is not None else ""
        why = "computes_all" if request.skip_reading_prefix_cache else why or self._variants.why_without_cache(request)
        self._notices.end_request(request.request_id, self._speed.tokens_per_second, prompt, why)

    def reset_cache(self) -> bool:
        """vLLM reports that the weights may have changed, or goes to sleep."""
        self._epochs.reset_cache()
        return True

    def _begin_epoch(self, since: str) -> None:
        """Make void what is of the former weights."""
        serves, self._serves = self._serves, False  # for good, should a fault leave open which weights' KV is found
        self._variants.weights_changed(since)
        self._introduction.again()
        self._cancel_stores(list(self._pins))  # what they read may be of both weights
        for state in self._requests.values():
            self._abort_loads(state)
            self._lookups.drop_question(state)
            state.variant = self._variants.of(state.request) or state.variant  # if None it is no longer current
            state.answer = None
            state.store_again()
            state.boundaries = None
        self._serves = serves

    def bind_pool(self, pool: BlockPool, begin_again: Callable[[set[str]], object] | None) -> None:
        """`begin_again` has vLLM begin these requests again once their loads have ended."""
        self._pool.install(pool)
        self._waiting.begin_again = begin_again
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

    # ---- inside -------------------------------------------------------------------------------

    def _begin_session(self, hello: HelloReply | None) -> None:
        """Lookups and their answers are void."""
        self._chunks.resize(hello.chunk_tokens if hello is not None else 0, hello is not None and hello.tails)
        self._stores.begin_session(hello)
        self._failed.begin_session(next(self._ids))
        self._acceptance.drop_all()
        for state in self._requests.values():
            state.answer = None
            state.store_again()
            state.boundaries = None
