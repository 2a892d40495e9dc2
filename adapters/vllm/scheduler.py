"""The scheduler half: what to look up, load and store, and which blocks must not be touched.

Owns: the decisions about each request, and the plan of the step. Refuses to know: memory, copies, tensors, and how messages
reach the daemon. Runs on the engine's scheduler thread. A call of vLLM's does several things: each is done even if another
one raises.

Hazard closed here: a block that is allocated again while a store still reads it. The pool's hook sees
every allocation; the stores concerned go into the step's plan and end before the step computes.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, ParamSpec

from kvserver.adapters.common.announcer import Announcer
from kvserver.adapters.common.cache_status import CacheStatus
from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.hazards import PendingStores, Quarantine
from kvserver.adapters.common.introduction import Introduction
from kvserver.adapters.common.link import Link
from kvserver.adapters.common.lookups import Lookups
from kvserver.adapters.common.notices import Notices
from kvserver.adapters.common.specs import LoadSpec, StoreSpec
from kvserver.adapters.common.speed import PrefillSpeed
from kvserver.adapters.common.steps import NULL_BLOCK, StepPlan, StepReport
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.chunks import Chunks
from kvserver.adapters.vllm.contents import Contents
from kvserver.adapters.vllm.events import TierEvents
from kvserver.adapters.vllm.facts import EngineFacts
from kvserver.adapters.vllm.requests import Requests, RequestState, Tables, tables_of
from kvserver.adapters.vllm.settings import AdapterSettings
from kvserver.adapters.vllm.sources import Sources
from kvserver.adapters.vllm.support import rehashes_sessions
from kvserver.adapters.vllm.variants import Variants

from kvserver._native import pack_blocks
from kvserver.protocol import MAX_CHUNKS, HelloReply, Lookup

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvserver")

_STORE_TOKENS = 1 << 16  # in one message, which with their contents has less than 1 MiB
_REPORT_SECONDS = 1.0  # from a store's deadline until the workers have reported its end
_LONGEST_TRACEPARENT = 512  # as the protocol has it

P = ParamSpec("P")


def by_position(tables: Tables, first: int, last: int) -> list[int]:
    """The ids of positions [first, last) as a copy names them: [position][group]."""
    if len(tables) == 1:
        return tables[0][first:last]
    return [block_id for ids in zip(*(table[first:last] for table in tables), strict=True) for block_id in ids]


def whole_ranges(tables: Tables, chunk_blocks: int, first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of the chunks [first, end) that have no null block, `most` at most in each: a window that moved on splits them."""
    while first < end:
        last, limit = first, min(end, first + most)
        while last < limit and not any(
            NULL_BLOCK in t[last * chunk_blocks : (last + 1) * chunk_blocks] for t in tables
        ):
            last += 1
        if last > first:
            yield first, last
        first = max(last, first + 1)


def traceparent(request: Request) -> str:
    """The traceparent of the request's headers; empty if there is none."""
    for name, value in (request.trace_headers or {}).items():
        if name.lower() == "traceparent" and len(value) <= _LONGEST_TRACEPARENT:
            return str(value)
    return ""


class SchedulerHalf:
    def __init__(self, settings: AdapterSettings, link: Link, facts: EngineFacts, faults: Faults) -> None:
        self.counters: Counter[str] = Counter()
        self._link = link
        self._facts = facts
        self._faults = faults
        self._serves = False  # until the pool's hook sees which blocks are allocated
        self._stale_hashes = False  # vLLM's own cache may have blocks under hashes of other tokens
        self._follows_resets = facts.weights_are_transferred or settings.on_prefix_reset == "private"
        self._resets_seen = 0
        self._clears_awaited = 0  # until the pool was cleared so often, blocks may hold KV of former weights
        self._sends_contents = False  # with stores, in this session
        self._requests = Requests(faults)
        self._ids = itertools.count(1)
        self._plan = StepPlan()
        self._chunks = Chunks(facts.block_tokens, facts.hash_block_tokens)
        self._contents = Contents(self._chunks, self.counters)
        self._variants = Variants(
            f"{facts.names.instance_id}/{facts.names.incarnation}",
            facts.weights_version,
            "epoch: weight_transfer_config is set" if facts.weights_are_transferred else "",
            counters=self.counters,
            trusts_uuids=settings.trust_multi_modal_uuids,
        )
        self._pending = PendingStores(facts.world_size, settings.store_timeout_ms / 1000 + _REPORT_SECONDS)
        self._pool = PoolHook(self._allocated)
        self._quarantine = Quarantine(self._pool)
        self._speed = PrefillSpeed()
        self._sources = Sources()
        self._dispatcher = Dispatcher(link, self.counters, faults)
        self._dispatcher.on_session.append(self._begin_session)
        self._lookups = Lookups(self._dispatcher, settings, self.counters)
        self._notices = Notices(self._dispatcher, facts.names, self._pool, self.counters)
        self._announcer = Announcer(self._dispatcher, facts.names, TierEvents(facts.groups), facts.publishes)
        self._introduction = Introduction(
            self._dispatcher, lambda: facts.describe(self._variants.epoch, self._variants.private)
        )

    # ---- lookup -------------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        self._follow_resets()
        if request.resumable and not rehashes_sessions():
            if not self._stale_hashes:
                log.warning(
                    "a streaming session, for which vLLM before 0.32 keeps hashes of dropped tokens: no more stores"
                )
            self._stale_hashes = True
            return
        variant = self._variants.of(request)
        if variant is None:
            return  # it runs without cache
        state = RequestState(request=request, variant=variant)
        self._requests[request.request_id] = state
        usable = self._dispatcher.usable() is not None
        if usable and self._chunks.hashed(request) and not request.skip_reading_prefix_cache:
            self._lookups.send(state, self._lookup_of(state))

    def _lookup_of(self, state: RequestState) -> Lookup:
        request = state.request
        chunks = min(self._chunks.hashed(request), MAX_CHUNKS)  # so a hit, and the load of it, is one message too
        return Lookup(
            instance_id=self._facts.names.instance_id,
            incarnation=self._facts.names.incarnation,
            request_id=request.request_id,
            chunk_blocks=self._chunks.blocks,
            keys=self._chunks.keys(request, 0, chunks),
            variant=state.variant,
            tokens=request.num_tokens,
            traceparent=traceparent(request),
        )

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Answer vLLM: (tokens beyond `local_tokens` to load, asynchronously); (None, False) = not known yet."""
        self._sources.asked(request.request_id, local_tokens)
        self._follow_resets()
        state = self._requests.get(request.request_id)
        if state is None or state.give_up or not self._serves or not self._chunks.hashed(request):
            return 0, False
        if request.skip_reading_prefix_cache:  # every token must be computed; vLLM before 0.31 queries all the same
            return 0, False
        if state.admitted:  # it was preempted since: look up again, more may be stored by now
            state.admitted = False
            state.answer = None
        if self._lookups.must_send(state):
            self._lookups.send(state, self._lookup_of(state))
        if (answer := self._lookups.answer_to(state)) is None:
            return None, False
        tokens = min(answer.hit_chunks * self._chunks.tokens, request.num_tokens - 1) - local_tokens
        state.not_loaded = "lookup_timeout" if answer.timed_out else ""
        if tokens <= 0:
            return 0, False
        if self._facts.whole_prompts_only and local_tokens + tokens < request.num_tokens - 1:
            state.not_loaded = "whole_prompts_only"
        elif not self._is_current(state):
            state.not_loaded = "weights_changed"
        if state.not_loaded:
            return 0, False
        state.local_tokens = local_tokens
        return tokens, True

    # ---- loads --------------------------------------------------------------------------------

    def allocated(self, request: Request, tables: Tables, external_tokens: int) -> None:
        """vLLM has allocated the request's blocks; with external tokens, some of them are to be loaded."""
        self._guarded("sources of a prompt", self._sources.placed, request, external_tokens)
        state = self._requests.get(request.request_id)
        if state is not None:
            state.admitted = True
        if external_tokens <= 0:
            return
        try:
            if state is None:
                raise LookupError("a load for a request that was never seen")
            load = self._load_of(state, tables, external_tokens)
            state.load = load
            state.stored_chunks = max(state.stored_chunks, state.answer.hit_chunks if state.answer else 0)
        except Exception as error:
            # The request waits for this load now, so it must be planned all the same: without keys it fails.
            self._faults.count("planning of a load", error)
            every = pack_blocks([block_id for table in tables for block_id in table])
            load = LoadSpec(next(self._ids), request.request_id, "", 1, b"", every, 0)
        self._plan.loads.append(load)

    def _load_of(self, state: RequestState, tables: Tables, external_tokens: int) -> LoadSpec:
        end = -(-(state.local_tokens + external_tokens) // self._chunks.block_tokens)
        first = state.local_tokens // self._chunks.block_tokens
        while first < end and all(table[first] == NULL_BLOCK for table in tables):  # no window sees them
            first += 1
        per_chunk = self._chunks.blocks
        first_chunk, last_chunk = first // per_chunk, -(-end // per_chunk)
        return LoadSpec(
            copy_id=next(self._ids),
            request_id=state.request.request_id,
            variant=state.variant,
            chunk_blocks=per_chunk,
            keys=self._chunks.keys(state.request, first_chunk, last_chunk),
            block_ids=pack_blocks(by_position(tables, first, end)),
            skip_blocks=first % per_chunk,
        )

    # ---- stores -------------------------------------------------------------------------------

    def plan_step(self, output: SchedulerOutput) -> None:
        """Add this step's stores to the plan, and send what the block pool did. Ends a scheduler pass."""
        self._guarded("resets", self._follow_resets)
        self._guarded("answers", self._dispatcher.receive)
        self._lookups.next_pass()
        may_store = (
            self._serves
            and self._dispatcher.usable() is not None
            and self._pool.clears >= self._clears_awaited
            and not self._stale_hashes
        )
        prompt_tokens = 0
        for state, before, computed in self._requests.scheduled(output):
            prompt_tokens += max(0, min(computed, state.request.num_prompt_tokens) - before)
            if may_store and not state.lost:
                self._guarded("stores of a request", self._plan_stores, state, output, computed)
        self._guarded("reports of blocks", self._notices.send_blocks)
        self._guarded("introduction", self._introduction.send)
        self._guarded("question for events", self._announcer.request_events)
        self._guarded("prefill speed", self._speed.planned, prompt_tokens)

    def step_ended(self) -> None:
        """vLLM has taken the outputs of the oldest step that was planned."""
        self._pending.step_ended()
        self._speed.ended()

    def drain_events(self) -> Iterable[KVCacheEvent]:
        """Events of the daemon's tiers for vLLM to publish behind the step's own events."""
        return self._announcer.drain_events(self._pool.clears)

    def take_plan(self, idle: bool) -> StepPlan:
        """The plan, complete or not: a load in it must reach the worker, which alone can end the load."""
        plan, self._plan = self._plan, StepPlan()
        self._pending.planned()
        plan.idle = idle
        return plan

    def _plan_stores(self, state: RequestState, output: SchedulerOutput, computed: int) -> None:
        """Store the chunks that this step completes."""
        tables = tables_of(state, output)
        first, end = state.stored_chunks, self._completed(state.request, tables, computed)
        if first >= end or not self._is_current(state):
            return
        most = max(1, min(MAX_CHUNKS, _STORE_TOKENS // self._chunks.tokens))
        for begin, last in whole_ranges(tables, self._chunks.blocks, first, end, most):
            self._add_store(state, begin, last, tables)
            first += last - begin
        self.counters["chunks_left_by_window"] += end - first
        state.stored_chunks = end

    def _completed(self, request: Request, tables: Tables, computed: int) -> int:
        """How many chunks are complete. Hashes exist for confirmed tokens only, so rejected drafts never count."""
        blocks = min((len(table) for table in tables), default=0)
        hashed = len(request.block_hashes) * self._chunks.hash_block_tokens
        tokens = min(computed, blocks * self._chunks.block_tokens, hashed)
        if self._facts.holds_back_tail and tokens >= request.num_tokens:
            tokens = request.num_tokens - 1  # the draft model rewrites its KV of the last position
        return tokens // self._chunks.tokens

    def _add_store(self, state: RequestState, first: int, last: int, tables: Tables) -> None:
        block_ids = by_position(tables, first * self._chunks.blocks, last * self._chunks.blocks)
        store = StoreSpec(
            copy_id=next(self._ids),
            request_id=state.request.request_id,
            variant=state.variant,
            chunk_blocks=self._chunks.blocks,
            keys=self._chunks.keys(state.request, first, last),
            block_ids=pack_blocks(block_ids),
            contents=self._contents.of(state.request, first, last) if self._sends_contents else None,
        )
        # First guarded, then planned: no store may read blocks that are not guarded.
        self._pending.add(store.copy_id, block_ids)
        self._plan.stores.append(store)

    def _allocated(self, block_id: int) -> None:
        """Pool hook: the block will be overwritten, so every store that still reads it must end first."""
        self._plan.overwritten_stores.extend(self._pending.overwrite(block_id))

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
        """Whether an idle engine should step on: a store's end is awaited, or records wait to be sent."""
        return self._pending.awaited or (self.connected and self._notices.has_unsent_records)

    # ---- reports of workers -------------------------------------------------------------------

    def worker_report(self, report: StepReport) -> None:
        """Process each entry on its own: it is reported once, and a fault in one must not lose another."""
        for load_id, block_ids in report.quarantined:
            self._guarded("quarantine", self._quarantined, load_id, block_ids)
        for request_id in report.failed_loads:
            self._guarded("a failed load", self._load_failed, request_id)
        for load_id in report.released:
            self._guarded("the end of a quarantine", self._quarantine.release, load_id)
        for store_id in report.ended_stores:
            self._guarded("the end of a store", self._pending.ended, store_id)

    def _quarantined(self, load_id: int, block_ids: list[int]) -> None:
        if self._quarantine.add(load_id, block_ids):
            self.counters["quarantined_blocks"] += len(block_ids)
            log.warning("a load did not end in time; %d blocks stay out of use until the load ends", len(block_ids))

    def _load_failed(self, request_id: str) -> None:
        self.counters["failed_loads"] += 1
        self._sources.load_failed(request_id)
        if (state := self._requests.get(request_id)) is not None:
            state.give_up = True
            state.stored_chunks = 0

    def _guarded(self, where: str, act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        with self._faults.guarded(where):
            act(*args, **kwargs)

    # ---- end of requests, cache resets, shutdown ----------------------------------------------

    def request_finished(self, request: Request) -> None:
        """Also of requests that ran without cache: the daemon counts every prompt."""
        state = self._requests.pop(request.request_id, None)
        if state is not None and state.load is not None:
            self._plan.abort_loads.append(state.load.copy_id)  # a no-op unless it still runs
        prompt = self._sources.ended(request)
        if state is not None:
            self._lookups.drop_question(state)
        why = "computes_all" if request.skip_reading_prefix_cache else state.not_loaded if state is not None else ""
        self._notices.end_request(request.request_id, self._speed.tokens_per_second, prompt, why)

    def reset_cache(self) -> bool:
        """vLLM reports that the weights may have changed. It resets its own blocks first, if it can."""
        self._resets_seen = self._pool.resets
        self._begin_epoch("epoch: private since reset_cache", self._pool.clears + (not self._pool.unused))
        return True

    def _follow_resets(self) -> None:
        """Follow a reset of the prefix cache that vLLM did not pass on to the connector: trainers reset after new weights.

        Called before KV is named by the weights, and not by the reset itself, which reset_cache() may follow at once.
        """
        if self._resets_seen == self._pool.resets:
            return
        self._resets_seen = self._pool.resets
        if not self._follows_resets:
            return
        self._begin_epoch("epoch: private since prefix reset", self._pool.clears_awaited)
        if not self._variants.private:
            return
        self.counters["prefix_resets"] += 1
        if self.counters["prefix_resets"] == 1:
            log.warning(
                "the prefix cache was reset, so the weights may have changed: from now on this engine shares KV with "
                "itself only. Set a new kvserver.weights_version before a reset to share again, or "
                "kvserver.on_prefix_reset=keep where a reset does not mean new weights (further resets are only counted)"
            )

    def _begin_epoch(self, since: str, clears_awaited: int) -> None:
        """No KV stored so far may be found, unless a configured version names the weights.

        vLLM does not reset blocks that requests use: they keep KV of the old weights, and nothing is stored until
        a reset has succeeded.
        """
        serves, self._serves = self._serves, False  # for good, should a fault leave open which weights' KV is found
        self._variants.weights_changed(since)
        self._introduction.again()
        self._clears_awaited = clears_awaited
        if self._pool.clears < clears_awaited:
            log.warning(
                "vLLM did not reset the prefix cache, since requests ran; nothing is stored until a reset succeeds"
            )
        for state in self._requests.values():
            if state.load is not None:
                self._plan.abort_loads.append(state.load.copy_id)
            self._lookups.drop_question(state)
            state.variant = self._variants.of(state.request) or state.variant  # if None it is no longer current
            state.answer = None
            state.stored_chunks = 0
        self._serves = serves

    def bind_pool(self, pool: BlockPool) -> None:
        self._pool.install(pool)
        self._serves = True

    def shut(self) -> None:
        try:
            self._link.stop()
        finally:
            self._dispatcher.close()

    # ---- inside -------------------------------------------------------------------------------

    def _begin_session(self, hello: HelloReply | None) -> None:
        """Lookups and their answers are void."""
        self._chunks.resize(hello.chunk_tokens if hello is not None else 0)
        self._sends_contents = hello is not None and (hello.kv_events or self._facts.publishes)
        for state in self._requests.values():
            state.answer = None
            state.stored_chunks = 0

    def _is_current(self, state: RequestState) -> bool:
        """Whether the request still computes with the weights that its variant names: a LoRA's files may be replaced."""
        return state.request.lora_request is None or self._variants.of(state.request) == state.variant
