"""Loads of the scheduler's requests, from the question to the daemon until vLLM has received the load's end.

Owns: answers, promised tokens, blocks in quarantine, keys that cannot be loaded. Refuses to know: which memory a load fills, and stores.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from vllm.v1.request import Request

from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.failed_loads import FailedLoads
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.hazards import Quarantine
from kvserver.adapters.common.lookups import Lookups
from kvserver.adapters.common.notices import Prompt
from kvserver.adapters.common.specs import LoadSpec
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.chunks import Chunks, Tables
from kvserver.adapters.vllm.facts import EngineFacts
from kvserver.adapters.vllm.forgotten import WaitingForLoads
from kvserver.adapters.vllm.hits import Hits
from kvserver.adapters.vllm.load_plans import LoadPlanner
from kvserver.adapters.vllm.promises import Promises
from kvserver.adapters.vllm.requests import RequestState
from kvserver.adapters.vllm.settings import AdapterSettings
from kvserver.adapters.vllm.sources import Sources
from kvserver.adapters.vllm.variants import Variants

log = logging.getLogger("vllm.kvserver")

_IDLE_WAIT_SECONDS = 0.001  # of a pass that schedules nothing, while requests wait for fills


class Loading:
    def __init__(
        self, facts: EngineFacts, settings: AdapterSettings, dispatcher: Dispatcher, chunks: Chunks, variants: Variants,
        pool: PoolHook, failed: FailedLoads, ids: Iterator[int], counters: Counter[str], faults: Faults,
    ) -> None:  # fmt: skip
        self._dispatcher, self._chunks, self._failed = dispatcher, chunks, failed
        self._counters, self._faults = counters, faults
        self._waiting = WaitingForLoads()
        pool.forgettable = self._waiting.blocks
        self._planner = LoadPlanner(chunks, ids)
        self._quarantine = Quarantine(pool)
        self._sources = Sources()
        self._promises = Promises(counters)
        self._lookups = Lookups(dispatcher, settings, counters)
        self._hits = Hits(facts, chunks, variants, failed, self._lookups)

    def can_begin_again(self, begin_again: Callable[[set[str]], object] | None) -> None:
        """`begin_again` has vLLM begin these requests again once their loads have ended."""
        self._waiting.begin_again = begin_again

    # ---- the question ---------------------------------------------------------------------------

    def look_up(self, state: RequestState) -> None:
        usable = self._dispatcher.usable() is not None
        if usable and self._hits.is_useful(state) and not state.request.skip_reading_prefix_cache:
            self._hits.look_up(state)

    def next_pass(self, idle: bool) -> None:
        """Count a pass. One that schedules nothing waits a little while requests wait for fills."""
        self._lookups.next_pass()
        if self._lookups.fills and idle:
            with self._faults.guarded("a wait for fills"):
                self._dispatcher.wait(_IDLE_WAIT_SECONDS)

    def asked(self, request_id: str, local_tokens: int) -> None:
        self._sources.asked(request_id, local_tokens)

    def has_all(self, state: RequestState, local_tokens: int) -> bool:
        return self._hits.has_all(state, local_tokens)

    def awaits_fill(self, state: RequestState) -> bool:
        return self._lookups.awaits_fill(state)

    def tokens_to_load(self, state: RequestState, local_tokens: int, has_all: bool) -> int | None:
        """Tokens beyond `local_tokens` to load; None while it is not known."""
        return self._hits.tokens_to_load(state, local_tokens, has_all)

    def promised(self, state: RequestState, tokens: int) -> None:
        """vLLM is answered that these tokens can be loaded."""
        if state.answer is not None:
            request_id = state.request.request_id
            self._promises.answered(request_id, tokens, state.answer.l2_chunks * self._chunks.tokens)

    def hit_sources(self, request_id: str) -> tuple[int, int]:
        """Tokens from L1, and from L2, of the load that was just planned."""
        return self._promises.being_loaded(request_id)

    def drop_answer(self, state: RequestState) -> None:
        self._lookups.drop_question(state)
        state.answer = None

    # ---- the load -------------------------------------------------------------------------------

    def allocated(
        self, request: Request, state: RequestState | None, tables: Tables, external_tokens: int
    ) -> list[LoadSpec]:
        """Loads of a request whose blocks vLLM has allocated; with external tokens there is one at least."""
        self._waiting.placed(request.request_id)
        if state is not None and external_tokens <= 0 and self._promises.is_open(request.request_id):
            state.not_loaded = "not_used"
        with self._faults.guarded("sources of a prompt"):
            from_l2 = self._promises.placed(request.request_id, external_tokens)
            self._sources.placed(request, external_tokens, from_l2)
        if external_tokens <= 0:
            return []
        self._waiting.began(request, tables)
        loads: list[LoadSpec] = []
        with self._faults.guarded("planning of a load"):
            if state is None:
                raise LookupError("a load for a request that was never seen")
            state.own_tokens = external_tokens
            state.loads = []
            loads = self._planner.plan(state, tables, external_tokens)
            state.loads = loads
            self._note_found(state)
        return loads or [self._planner.without_keys(request.request_id, tables)]

    def _note_found(self, state: RequestState) -> None:
        """Chunks and blocks that the daemon has are not stored."""
        if (answer := state.answer) is not None:
            state.stored_chunks = max(state.stored_chunks, answer.hit_chunks)
            found = self._chunks.found_tokens(answer.hit_chunks, answer.tail_blocks) if self._chunks.tails else 0
            state.stored_blocks = max(state.stored_blocks, found // self._chunks.block_tokens)

    def load_failed(self, request_id: str, state: RequestState | None) -> None:
        self._counters["failed_loads"] += 1
        self._sources.load_failed(request_id)
        self._promises.failed(request_id)
        if state is not None:
            for load in state.loads:
                self._failed.failed(load)
            state.give_up = True
            state.store_again()

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        """vLLM receives the ends of these requests' loads."""
        self._waiting.loads_ended(request_ids)

    def pool_was_reset(self) -> list[str]:
        """Requests whose loads bring KV from before the reset. Their loads end, and fail in the accounts only."""
        begun = self._waiting.reset()
        for request_id in begun:
            self._sources.load_failed(request_id)
            self._promises.failed(request_id)
        return begun

    # ---- blocks of a load that was given up -----------------------------------------------------

    @property
    def quarantined_blocks(self) -> int:
        return len(self._quarantine)

    def quarantined(self, load_id: int, block_ids: list[int]) -> None:
        if self._quarantine.add(load_id, block_ids):
            self._counters["quarantined_blocks"] += len(block_ids)
            log.warning(
                "a load that was given up has not ended; %d blocks stay out of use until it has", len(block_ids)
            )

    def released(self, load_id: int) -> None:
        self._quarantine.release(load_id)

    # ---- ends -----------------------------------------------------------------------------------

    def request_ended(self, request_id: str, tables: Tables) -> None:
        self._waiting.request_ended(request_id, tables)

    def prompt_ended(self, request: Request, state: RequestState | None) -> Prompt:
        """Tokens of the prompt by source; its question and promise are closed."""
        prompt = self._sources.ended(request)
        self._promises.ended(request.request_id)
        if state is not None:
            self._lookups.drop_question(state)
        return prompt

    def begin_session(self, first_copy: int) -> None:
        """Loads with an id of at least `first_copy` are those of a new session with a daemon."""
        self._failed.begin_session(first_copy)
