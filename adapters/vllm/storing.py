"""Stores of the scheduler's requests, from a step's plan until every rank has reported the store's end.

Owns: which stores wait for vLLM to accept their step, and the blocks that they keep. Refuses to know: the order of a scheduler pass, and loads.

Hazard closed here: a block that is allocated again while a store still reads it. Its blocks are pinned in the pool from the
store's plan until all ranks have reported its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from kvserver.adapters.common.failed_loads import FailedLoads
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.hazards import PinnedStores
from kvserver.adapters.common.specs import StoreSpec
from kvserver.adapters.vllm.acceptance import Acceptance
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.chunks import Chunks, Tables
from kvserver.adapters.vllm.facts import EngineFacts
from kvserver.adapters.vllm.requests import RequestState
from kvserver.adapters.vllm.settings import AdapterSettings
from kvserver.adapters.vllm.store_plans import StorePlanner
from kvserver.adapters.vllm.variants import Variants
from kvserver.protocol import HelloReply

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_REPORT_SECONDS = 1.0  # from a store's deadline until the workers have reported its end
_NOT_ACCEPTED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)  # ends from outside of a step


class Storing:
    def __init__(
        self, facts: EngineFacts, settings: AdapterSettings, chunks: Chunks, variants: Variants, pool: PoolHook,
        failed: FailedLoads, ids: Iterator[int], counters: Counter[str], faults: Faults,
    ) -> None:  # fmt: skip
        self._chunks, self._failed, self._faults = chunks, failed, faults
        self._inexact_siblings, self._replayed_tokens = facts.inexact_siblings, facts.replayed_tokens
        self._pins = PinnedStores(pool, facts.world_size, settings.store_timeout_ms / 1000 + _REPORT_SECONDS)
        self._acceptance = Acceptance(
            self._pins, pool.suspects, facts.block_tokens, counters, variants.are_files_same
        )  # fmt: skip
        self._planner = StorePlanner(
            chunks, facts, variants, self._pins, pool, self._acceptance, ids, counters, settings.store_generated
        )  # fmt: skip

    def begin_session(self, hello: HelloReply | None) -> None:
        self._chunks.resize(hello.chunk_tokens if hello is not None else 0, hello is not None and hello.tails)
        self._planner.begin_session(hello)
        self._acceptance.drop_all()

    def answered(self, request: Request, state: RequestState, tokens: int, is_usable: Callable[[], bool]) -> None:
        """vLLM is answered, and will go on behind `tokens`. `is_usable` may void the answer, so it is called for models with states alone."""
        if self._chunks.states:
            state.engine_boundary = request.shared_prefix_boundary  # vLLM has just set it
            if state.wishes.stores and is_usable():
                self._want_state(state, tokens)

    # ---- a step ---------------------------------------------------------------------------------

    def scheduled(self, state: RequestState, before: int, computed: int, anew: bool) -> None:
        """A step computes a request's tokens from `before` to `computed`.

        Where vLLM replays the last tokens of a hit, it counts from them on, and writes none of the blocks that were found.
        """
        if anew and (replay_start := getattr(state.request, "replay_start", 0)):  # 0.32 and later
            before = replay_start + self._replayed_tokens
        asked, state.asked_tokens = state.asked_tokens, None
        if (
            self._inexact_siblings
            and asked is not None
            and before - asked - state.own_tokens >= self._chunks.block_tokens
        ):  # another connector of vLLM's MultiConnector has loaded what neither vLLM nor this one had
            self._acceptance.loaded_by_sibling(state, asked, before)
        self._acceptance.scheduled(state, before, computed, anew)

    def plan(self, state: RequestState, output: SchedulerOutput, computed: int) -> None:
        with self._faults.guarded("stores of a request"):
            self._planner.plan(state, output, computed)
        with self._faults.guarded("the next state"):
            self._want_state(state, computed)

    def _want_state(self, state: RequestState, computed: int) -> None:
        if self._chunks.states and state.wishes.stores:
            self._planner.want_state(state, computed)

    def plan_last(self, state: RequestState, tables: Tables, may_store: Callable[[], bool]) -> None:
        """Plan the last stores of a request. One that was aborted or failed stores what vLLM had accepted before, alone."""
        aborted = state.request.status in _NOT_ACCEPTED
        if aborted:
            self._acceptance.drop_request(state)
        # The end of a step before a preemption counts for blocks that a load may not have filled yet: these have none computed.
        computed = min(state.accepted_tokens, state.computed) if aborted else state.computed
        if state.wishes.stores and not state.lost and may_store():
            self._planner.plan_last(state, tables, computed)

    def stored_tokens(self, state: RequestState) -> int:
        """Tokens of the request that the daemon has, or that stores bring."""
        return max(state.stored_chunks * self._chunks.tokens, state.stored_blocks * self._chunks.block_tokens)

    def take(self, computes: bool) -> tuple[int, list[StoreSpec]]:
        """(number of the step, its stores)."""
        step, stores = self._acceptance.plan(computes=computes)
        for store in stores:
            self._failed.store_planned(store, self._planner.copies_of(store))
        return step, stores

    def step_ended(self) -> None:
        """vLLM has processed the outputs of the step that a worker's report named."""
        self._pins.step_ended(self._acceptance.step_ended())

    # ---- reports --------------------------------------------------------------------------------

    def step_reported(self, step: int) -> None:
        self._acceptance.reported(step)

    def ended(self, store_id: int) -> None:
        self._pins.ended(store_id)

    def copied(self, store_id: int, objects: int) -> None:
        self._failed.store_copied(store_id, objects)

    def invalid_blocks(self, block_ids: set[int], requests: Iterable[RequestState]) -> None:
        """vLLM has declared them invalid: they were to be loaded, by any connector, and were not."""
        self._acceptance.invalid_blocks(block_ids, requests)

    # ---- blocks that stores keep ----------------------------------------------------------------

    @property
    def awaited(self) -> bool:
        return self._pins.awaited

    @property
    def kept_blocks(self) -> int:
        return self._pins.kept()

    def cancel_those_that_keep(self) -> list[int]:
        """Ids of stores to abort: those that alone keep blocks from vLLM."""
        return self._acceptance.drop_stores(self._pins.cancel_all_that_keep())

    def cancel_all(self) -> list[int]:
        """Ids of stores to abort."""
        return self._acceptance.drop_stores(list(self._pins))
