"""The scheduler half: what to look up, load and store, and which blocks must not be touched.

Owns: a small state per request. Refuses to know: memory, copies, tensors, and how messages reach the daemon. Runs
on the engine's scheduler thread. A call of vLLM's does several things: each is done even if another one raises.

Hazard closed here: a block that is allocated again while a store still reads it. The pool's hook sees
every allocation; the stores concerned go into the step's plan and end before the step computes.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias

from kvserver.adapters.common.cache_status import CacheStatus
from kvserver.adapters.common.link import Link
from kvserver.adapters.common.specs import LoadSpec, StoreSpec
from kvserver.adapters.vllm.announcer import Announcer
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.chunks import Chunks
from kvserver.adapters.vllm.contents import Contents
from kvserver.adapters.vllm.description import Engine, Introduction
from kvserver.adapters.vllm.hazards import PendingStores, Quarantine
from kvserver.adapters.vllm.lookups import Lookups, Question
from kvserver.adapters.vllm.metadata import NULL_BLOCK, StepPlan, StepReport
from kvserver.adapters.vllm.notices import Notices
from kvserver.adapters.vllm.settings import AdapterSettings
from kvserver.adapters.vllm.sources import Sources
from kvserver.adapters.vllm.speed import PrefillSpeed
from kvserver.adapters.vllm.variants import Variants

from kvserver._native import pack_blocks
from kvserver.protocol import MAX_CHUNKS, DescribeScheduler, Error, Reply

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvserver")

_STORE_TOKENS = 1 << 16  # in one message, which with their contents has less than 1 MiB
_REPORT_SECONDS = 1.0  # from a store's deadline until the workers have reported its end

P = ParamSpec("P")

# A request's block ids by KV cache group; the n-th of each belong to the same tokens.
Tables: TypeAlias = Sequence[list[int]]


def by_position(tables: Tables, first: int, last: int) -> list[int]:
    """The ids of positions [first, last) as a copy names them: [position][group]."""
    if len(tables) == 1:
        return tables[0][first:last]
    return [block_id for ids in zip(*(table[first:last] for table in tables), strict=True) for block_id in ids]


def _computes_all(request: Request) -> bool:
    """Whether vLLM must compute every token of the prompt, as for prompt logprobs. Before 0.31 it queries connectors all the same."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))


@dataclass(slots=True)
class RequestState(Question):
    local_tokens: int = 0  # what vLLM had itself when the hit was reported to it
    load: LoadSpec | None = None
    admitted: bool = False  # vLLM has placed it
    give_up: bool = False  # a load failed: compute the rest
    stored_chunks: int = 0  # chunks before this one were stored or found
    tables: Tables = ()  # for vLLM before 0.30
    lost: bool = False  # its tables may be wrong: nothing is stored until vLLM sends them whole
    not_loaded: str = ""  # why it loads nothing that the daemon has: one of EndRequest's codes


class SchedulerHalf:
    def __init__(
        self,
        settings: AdapterSettings,
        link: Link,
        *,
        instance_id: str,
        incarnation: str,
        model_name: str,
        world_size: int,
        engine: Engine,
        block_tokens: int,
        hash_block_tokens: int,
        holds_back_tail: bool,
        whole_prompts_only: bool = False,
        rehashes_sessions: bool = True,
        fault: Callable[[str, Exception], None],
        weights_version: Callable[[], str] = lambda: "",
        weights_are_transferred: bool = False,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._settings = settings
        self._link = link
        self._chunks = Chunks(block_tokens, hash_block_tokens)
        self._holds_back_tail = holds_back_tail
        self._whole_prompts_only = whole_prompts_only  # the engine cannot prefill after a hit, only decode
        self._rehashes_sessions = rehashes_sessions
        self._stale_hashes = False  # vLLM's own cache may have blocks under hashes of other tokens
        self._fault = fault  # counts and logs an exception: (where, which)
        self._variants = Variants(
            f"{instance_id}/{incarnation}",
            weights_version,
            "epoch: weight_transfer_config is set" if weights_are_transferred else "",
            counters=self.counters,
            trusts_uuids=settings.trust_multi_modal_uuids,
        )
        self._follows_resets = weights_are_transferred or settings.on_prefix_reset == "private"
        self._resets_seen = 0
        self._serves = False  # until the pool's hook sees which blocks are allocated
        self._clears_awaited = 0  # until the pool was cleared so often, blocks may hold KV of former weights
        self._requests: dict[str, RequestState] = {}
        self._ids = itertools.count(1)
        self._plan = StepPlan()
        self._pending = PendingStores(world_size, settings.store_timeout_ms / 1000 + _REPORT_SECONDS)
        self._pool = PoolHook(self._allocated)
        self._quarantine = Quarantine(self._pool)
        self._notices = Notices(instance_id, incarnation, model_name, self._pool, self.counters, unsent=link.refresh)
        self._speed = PrefillSpeed()
        self._sources = Sources()
        self._engine = engine
        self._contents = Contents(self._chunks, self.counters)
        self._announcer = Announcer(
            instance_id, incarnation, engine.groups, self._pool, self.counters, engine.publishes
        )
        self._introduction = Introduction(
            lambda: DescribeScheduler(
                instance_id=instance_id,
                incarnation=incarnation,
                model_name=model_name,
                variant=self._variants.epoch,
                private=self._variants.private,
                **engine.describe(),
            )
        )
        self._lookups = Lookups(
            settings,
            link,
            instance_id,
            incarnation,
            self._chunks,
            self.counters,
            new_session=self._begin_session,
            on_reply=self._on_reply,
        )

    # ---- lookup -------------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        self._follow_resets()
        if getattr(request, "resumable", False) and not self._rehashes_sessions:
            if not self._stale_hashes:
                log.warning(
                    "a streaming session, for which vLLM before 0.32 keeps hashes of dropped tokens: no more stores"
                )
            self._stale_hashes = True
            return
        variant = self._variants.of(request)
        if variant is None:
            return  # it runs without cache
        state = RequestState(request, variant)
        self._requests[request.request_id] = state
        if not _computes_all(request):
            self._lookups.send(state)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Answer vLLM: (tokens beyond `local_tokens` to load, asynchronously); (None, False) = not known yet."""
        self._sources.asked(request.request_id, local_tokens)
        self._follow_resets()
        state = self._requests.get(request.request_id)
        if state is None or state.give_up or not self._serves or _computes_all(request):
            return 0, False
        if state.admitted:  # it was preempted since: look up again, more may be stored by now
            state.admitted = False
            state.hit_chunks = None
        if not self._lookups.answered(state):
            return None, False
        tokens = min((state.hit_chunks or 0) * self._chunks.tokens, request.num_tokens - 1) - local_tokens
        state.not_loaded = "lookup_timeout" if state.timed_out else ""
        if tokens <= 0:
            return 0, False
        if self._whole_prompts_only and local_tokens + tokens < request.num_tokens - 1:
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
            state.tables = [list(table) for table in tables]
            state.admitted = True
        if external_tokens <= 0:
            return
        try:
            if state is None:
                raise LookupError("a load for a request that was never seen")
            load = self._load_of(state, tables, external_tokens)
            state.load = load
            state.stored_chunks = max(state.stored_chunks, state.hit_chunks or 0)
        except Exception as error:
            # The request waits for this load now, so it must be planned all the same: without keys it fails.
            self._fault("planning of a load", error)
            every = pack_blocks([block_id for table in tables for block_id in table])
            load = LoadSpec(next(self._ids), request.request_id, "", 1, b"", every, 0)
        self._plan.loads.append(load)
        self.counters["loads"] += 1

    def _load_of(self, state: RequestState, tables: Tables, external_tokens: int) -> LoadSpec:
        end = -(-(state.local_tokens + external_tokens) // self._chunks.block_tokens)
        first = state.local_tokens // self._chunks.block_tokens
        while first < end and all(table[first] == NULL_BLOCK for table in tables):  # no window sees them
            first += 1
        per_chunk = self._chunks.blocks
        first_chunk, last_chunk = first // per_chunk, -(-end // per_chunk)
        return LoadSpec(
            load_id=next(self._ids),
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
        self._guarded("answers", self._lookups.receive)
        self._lookups.next_pass()
        session = self._lookups.usable()
        may_store = (
            self._serves
            and session is not None
            and self._pool.clears >= self._clears_awaited
            and not self._stale_hashes
        )
        prompt_tokens = 0
        for state, before, computed in self._scheduled(output):
            prompt_tokens += max(0, min(computed, state.request.num_prompt_tokens) - before)
            if may_store and not state.lost:
                self._guarded("stores of a request", self._plan_store, state, computed, output)
        if session is not None:
            self._guarded("reports of blocks", self._notices.send_blocks, session)
            self._guarded("introduction", self._introduction.send, session)
        self._guarded("question for events", self._announcer.request_events, session)
        self._guarded("prefill speed", self._speed.planned, prompt_tokens)

    def step_ended(self) -> None:
        """vLLM has taken the outputs of the oldest step that was planned."""
        self._pending.step_ended()
        self._speed.ended()

    def drain_events(self) -> Iterable[KVCacheEvent]:
        """Events of the daemon's tiers for vLLM to publish behind the step's own events."""
        return self._announcer.drain_events()

    def take_plan(self, idle: bool) -> StepPlan:
        """The plan, complete or not: a load in it must reach the worker, which alone can end the load."""
        plan, self._plan = self._plan, StepPlan()
        self._pending.planned()
        plan.idle = idle
        return plan

    def _scheduled(self, output: SchedulerOutput) -> Iterator[tuple[RequestState, int, int]]:
        """The requests of this step, with the tokens computed before and after it; keeps tables and cursors true."""
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            if (state := self._requests.get(new.req_id)) is not None:
                self._follow_tables(state, new.block_ids, anew=True)
                yield state, new.num_computed_tokens, new.num_computed_tokens + scheduled[new.req_id]
        cached = output.scheduled_cached_reqs
        for request_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if (state := self._requests.get(request_id)) is not None:
                if request_id in cached.resumed_req_ids:
                    state.stored_chunks = 0
                self._follow_tables(state, blocks, anew=request_id in cached.resumed_req_ids)
                yield state, computed, computed + scheduled[request_id]

    def _follow_tables(self, state: RequestState, blocks: Tables | None, anew: bool) -> None:
        """Add `blocks` to the request's tables, or replace them. One missed block shifts all later ones."""
        state.lost = state.lost and not anew
        if anew:
            state.tables = ()
        if blocks is None:
            return
        try:
            tables = state.tables or [[] for _ in blocks]
            state.tables = [[*table, *more] for table, more in zip(tables, blocks, strict=True)]
        except Exception as error:
            state.lost = True
            self._fault("tables of a request", error)

    def _plan_store(self, state: RequestState, computed: int, output: SchedulerOutput) -> None:
        """Store the chunks that this step completes. Hashes exist for confirmed tokens only, so rejected drafts never count."""
        request = state.request
        tables = self._tables(state, output)
        blocks = min((len(table) for table in tables), default=0)
        tokens = min(
            computed, blocks * self._chunks.block_tokens, len(request.block_hashes) * self._chunks.hash_block_tokens
        )
        if self._holds_back_tail and tokens >= request.num_tokens:
            tokens = request.num_tokens - 1  # the draft model rewrites its KV of the last position
        end = tokens // self._chunks.tokens
        if state.stored_chunks >= end or not self._is_current(state):
            return
        per_chunk = self._chunks.blocks
        most = max(1, min(MAX_CHUNKS, _STORE_TOKENS // self._chunks.tokens))
        first = state.stored_chunks
        while first < end:
            # Chunks with null blocks (a window moved on) split the range.
            last, limit = first, min(end, first + most)
            while last < limit and not any(NULL_BLOCK in t[last * per_chunk : (last + 1) * per_chunk] for t in tables):
                last += 1
            if last > first:
                self._add_store(state, first, last, by_position(tables, first * per_chunk, last * per_chunk))
                first = last
            else:
                self.counters["chunks_left_by_window"] += 1
                first += 1
        state.stored_chunks = max(state.stored_chunks, end)

    def _tables(self, state: RequestState, output: SchedulerOutput) -> Tables:
        block_state: Any = getattr(output, "kv_connector_block_state", None)
        if not hasattr(block_state, "get_block_ids"):  # 0.29 has tables there too, but only of requests with new blocks
            return state.tables
        tables: Tables | None = block_state.get_block_ids(state.request.request_id)
        return tables if tables is not None else ()

    def _add_store(self, state: RequestState, first: int, last: int, block_ids: list[int]) -> None:
        store_id = next(self._ids)
        keys = self._chunks.keys(state.request, first, last)
        contents = self._contents.of(state.request, first, last) if self._sends_contents else None
        store = StoreSpec(
            store_id,
            state.request.request_id,
            state.variant,
            self._chunks.blocks,
            keys,
            pack_blocks(block_ids),
            contents,
        )
        # First guarded, then planned: no store may read blocks that are not guarded.
        self._pending.add(store_id, block_ids)
        self._plan.stores.append(store)
        self.counters["stores"] += 1

    @property
    def _sends_contents(self) -> bool:
        session = self._lookups.usable()
        return session is not None and (session.hello.kv_events or self._engine.publishes)

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
        """A fault in `act` is counted and logged, and the caller goes on."""
        try:
            act(*args, **kwargs)
        except Exception as error:
            self._fault(where, error)

    # ---- end of requests, cache resets, shutdown ----------------------------------------------

    def request_finished(self, request: Request) -> None:
        """Also of requests that ran without cache: the daemon counts every prompt."""
        state = self._requests.pop(request.request_id, None)
        if state is not None and state.load is not None:
            self._plan.abort_loads.append(state.load.load_id)  # a no-op unless it still runs
        prompt = self._sources.ended(request)
        if state is not None:
            self._lookups.drop_question(state)
        session = self._lookups.usable()
        if session is not None:
            why = "computes_all" if _computes_all(request) else state.not_loaded if state is not None else ""
            self._notices.end_request(session, request.request_id, self._speed.tokens_per_second, prompt, why)

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
                self._plan.abort_loads.append(state.load.load_id)
            self._lookups.drop_question(state)
            state.variant = self._variants.of(state.request) or state.variant  # if None it is no longer current
            state.hit_chunks = None
            state.stored_chunks = 0
        self._serves = serves

    def bind_pool(self, pool: BlockPool) -> None:
        self._pool.install(pool)
        self._serves = True

    def shut(self) -> None:
        try:
            self._link.stop()
        finally:
            self._lookups.close()

    # ---- inside -------------------------------------------------------------------------------

    def _begin_session(self) -> None:
        """Another daemon than before, or none: lookups and their answers are void."""
        for state in self._requests.values():
            state.lookup = None
            state.hit_chunks = None
            state.stored_chunks = 0
        self._notices.begin_session()
        self._introduction.again()
        self._guarded("beginning of events", self._announcer.begin_session)

    def _on_reply(self, number: int, reply: Reply) -> None:
        if isinstance(reply, Error):
            self._notices.refused(number, reply)
            self._introduction.refused(number, reply)
        self._guarded("events", self._announcer.receive_reply, number, reply)

    def _is_current(self, state: RequestState) -> bool:
        """Whether the request still computes with the weights that its variant names: a LoRA's files may be replaced."""
        return getattr(state.request, "lora_request", None) is None or self._variants.of(state.request) == state.variant
