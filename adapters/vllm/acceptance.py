"""Stores that wait until vLLM has accepted the step that computed their KV.

vLLM takes steps back:
- After a step it may find that a sibling's synchronous load had failed, so that everything behind it is garbage.
- A step's output may raise, and then vLLM never processes the step.
- A request may be preempted or aborted while its step is under way.

**The rule: a chunk may be found only once every step that computed any token of its prefix was accepted.** So a store is planned
with the step that completes its KV. It is sent with the first step that is planned after that one was accepted. A store of a LoRA
also waits until its files were looked at.

Steps are named by a number that the plan carries and the workers' report returns. They are never counted: vLLM drops a step
before it raises, and goes on with the next one.

Owns: the steps under way and the stores that wait for each; the blocks with KV that was taken back (`suspects`); for each
request, up to which token its blocks are known to have none (`RequestState.trusted_tokens`). Refuses to know: which KV is to be
stored, and how.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvserver.adapters.common.hazards import PinnedStores
from kvserver.adapters.common.specs import StoreSpec, ids_of
from kvserver.adapters.common.steps import NULL_BLOCK
from kvserver.adapters.vllm.chunks import Tables
from kvserver.adapters.vllm.requests import ALL_TOKENS, RequestState

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LOOK_SECONDS = 1.0  # for a look at a LoRA's files, from a store's acceptance


@dataclass(slots=True)
class _Unsent:
    store: StoreSpec
    state: RequestState
    end_tokens: int  # of the request, up to which the store's last object reaches
    undo: Callable[[], None]  # the request may store it again
    accepted_at: float = 0.0


@dataclass(slots=True)
class _Step:
    """A step that computes something."""

    stores: list[_Unsent] = field(default_factory=list)
    requests: list[tuple[RequestState, int, int]] = field(default_factory=list)  # tokens computed before and after it


class Acceptance:
    """Steps, stores and suspect blocks of one engine.

    A store is pinned before it waits here, and unpinned if it is dropped. `suspects` is the pool's: a block that it allocates
    again is removed. `block_tokens`: of each KV cache group.
    """

    def __init__(
        self,
        pins: PinnedStores,
        suspects: set[int],
        block_tokens: Sequence[int],
        counters: Counter[str],
        are_files_same: Callable[[Request, float], bool | None],
    ) -> None:
        self._are_files_same = are_files_same
        self.suspects = suspects
        self._pins, self._block_tokens, self._counters = pins, block_tokens, counters
        self._planning = _Step()
        self._under_way: dict[int, _Step] = {}  # by number, the oldest first
        self._accepted: list[_Unsent] = []  # not sent yet
        self._step = 0  # the last one that was planned
        self._reported = 0

    # ---- a step is planned ----------------------------------------------------------------------

    def scheduled(self, state: RequestState, before: int, after: int, anew: bool) -> None:
        """The step computes tokens [before, after) of this request; `anew`: its blocks before them were found or loaded.

        It begins earlier if vLLM rejects drafts of the step under way, which it counts as accepted, but never among known tokens.
        """
        if anew:
            state.accepted_tokens = 0
            state.trusted_tokens = self._first_suspect(state.tables, before) if self.suspects else ALL_TOKENS
        self._planning.requests.append((state, min(before, state.request.num_tokens), after))

    def loaded_by_sibling(self, state: RequestState, first: int, end: int) -> None:
        """Another connector, which may not be exact, loaded tokens [first, end): they are not to be stored, nor what lies behind."""
        for tokens, table in zip(self._block_tokens, state.tables, strict=False):
            self._suspect(table[first // tokens : -(-end // tokens)])

    def hold(self, store: StoreSpec, state: RequestState, end_tokens: int, undo: Callable[[], None]) -> None:
        """Keep the store back until the step that is being planned was accepted."""
        store.step = self._step + 1
        self._planning.stores.append(_Unsent(store, state, end_tokens, undo))

    def hold_ended(self, store: StoreSpec, state: RequestState, end_tokens: int, undo: Callable[[], None]) -> None:
        """Keep the store of a request that ends back until the step whose outputs are being processed was accepted, if there is one.

        REQUIRES: no later step computed KV of the store.
        """
        unsent = _Unsent(store, state, end_tokens, undo)
        store.step, step = next(iter(self._under_way.items()), (self._reported, None))
        if step is not None:
            step.stores.append(unsent)
        else:
            self._accept(unsent)

    def plan(self, computes: bool) -> tuple[int, list[StoreSpec]]:
        """End the step that is being planned: its number, and the stores that go with it."""
        self._step += 1
        step, self._planning = self._planning, _Step()
        if computes:
            self._under_way[self._step] = step
        return self._step, [unsent.store for unsent in self._take_accepted()]

    def _take_accepted(self) -> list[_Unsent]:
        """The accepted stores that may be sent. Others wait for a look at their LoRA's files, or are dropped."""
        accepted, self._accepted = self._accepted, []
        sent, now = [], time.monotonic()
        for unsent in accepted:
            same = self._are_files_same(unsent.state.request, unsent.accepted_at)
            if same and not any(waiting.state is unsent.state for waiting in self._accepted):  # they keep their order
                sent.append(unsent)
            elif same is not False and now < unsent.accepted_at + _LOOK_SECONDS:
                self._keep(unsent)
            else:
                self._drop(unsent)
        return sent

    # ---- a step ends ----------------------------------------------------------------------------

    def reported(self, step: int) -> None:
        """The outputs that vLLM processes are this step's."""
        self._reported = max(self._reported, step)

    def invalid_blocks(self, block_ids: set[int], requests: Iterable[RequestState]) -> None:
        """vLLM declares these blocks, which were to be loaded, invalid. KV computed behind them is garbage as well.

        vLLM has one KV cache group then. It computes such a request anew in place, and nothing of it is stored. A request that
        only shares the block goes on behind it. Model runner V2 goes on from tokens of the step that was taken back (findings/).
        """
        self.suspects |= block_ids
        for state in {id(each): each for each in [*requests, *self._requests_under_way()]}.values():
            for tokens, table in zip(self._block_tokens, state.tables, strict=False):
                place = next((i for i, block in enumerate(table) if block in block_ids), None)
                if place is not None:
                    state.trusted_tokens = min(state.trusted_tokens, place * tokens)
                    self._suspect(table[place:])

    def step_ended(self) -> int:
        """vLLM has processed the outputs of the step that was reported last: accept what it computed. The step's number."""
        for number in [n for n in self._under_way if n < self._reported]:
            self._drop_step(number)
        for step in self._under_way.values():
            step.stores = [unsent for unsent in step.stores if self._still_computed(unsent)]
        if (ended := self._under_way.pop(self._reported, None)) is not None:
            for state, _, after in ended.requests:
                state.accepted_tokens = min(after, state.request.num_computed_tokens, state.trusted_tokens)
            for unsent in ended.stores:
                self.suspects.difference_update(ids_of(unsent.store))
                self._accept(unsent)
        return self._reported

    def _accept(self, unsent: _Unsent) -> None:
        """Have it sent, once its LoRA's files were looked at: they are the same since its first request, also when its KV was computed."""
        unsent.accepted_at = time.monotonic()
        self._are_files_same(unsent.state.request, unsent.accepted_at)  # begins the look
        self._keep(unsent)

    def _keep(self, unsent: _Unsent) -> None:
        """Keep the store for the next step. Should that step's plan be lost, the store's pins still end some time after the step."""
        self._accepted.append(unsent)
        self._pins.sent(unsent.store.copy_id, self._step + 1)

    def _still_computed(self, unsent: _Unsent) -> bool:
        """False, and the store is dropped, if vLLM has taken the request back behind the store's end."""
        if unsent.end_tokens <= min(unsent.state.request.num_computed_tokens, unsent.state.trusted_tokens):
            return True
        self._drop(unsent)
        return False

    def _drop_step(self, number: int) -> None:
        """vLLM never processed its outputs: nothing is known of what it wrote into blocks, nor of what later steps computed upon that."""
        requests = self._requests_from(number)
        for state, before, _ in requests:
            for tokens, table in zip(self._block_tokens, state.tables, strict=False):
                self._suspect(table[before // tokens :])
        for state, _, _ in requests:
            state.trusted_tokens = min(state.trusted_tokens, self._first_suspect(state.tables))
        for unsent in self._under_way.pop(number).stores:
            self._drop(unsent)

    def _requests_from(self, number: int) -> list[tuple[RequestState, int, int]]:
        return [each for n, step in self._under_way.items() if n >= number for each in step.requests]

    def _requests_under_way(self) -> list[RequestState]:
        """Requests of the steps under way, also those that have ended meanwhile."""
        return [state for state, _, _ in self._requests_from(0)]

    # ---- what is taken back ----------------------------------------------------------------------

    def drop_request(self, state: RequestState) -> None:
        """Drop the stores of a request that was aborted or has failed: KV that steps under way compute of it is not accepted."""
        self._drop_where(lambda unsent: unsent.state is state, [step.stores for step in self._under_way.values()])

    def drop_stores(self, store_ids: Iterable[int]) -> list[int]:
        """Drop those of these stores that were not sent; the others, which the workers have to cancel."""
        wanted = set(store_ids)
        here: list[int] = []

        def is_wanted(unsent: _Unsent) -> bool:
            if unsent.store.copy_id in wanted:
                here.append(unsent.store.copy_id)
            return unsent.store.copy_id in wanted

        self._drop_where(is_wanted, self._everywhere())
        return sorted(wanted.difference(here))

    def drop_all(self) -> None:
        self._drop_where(lambda unsent: True, self._everywhere())

    def _everywhere(self) -> list[list[_Unsent]]:
        return [self._accepted, self._planning.stores, *(step.stores for step in self._under_way.values())]

    def _drop_where(self, condition: Callable[[_Unsent], bool], lists: list[list[_Unsent]]) -> None:
        for stores in lists:
            for unsent in [each for each in stores if condition(each)]:
                stores.remove(unsent)
                self._drop(unsent)

    def _drop(self, unsent: _Unsent) -> None:
        self._counters["dropped_stores"] += 1
        unsent.undo()
        self._pins.drop(unsent.store.copy_id)

    def _suspect(self, blocks: Iterable[int]) -> None:
        self.suspects.update(block for block in blocks if block != NULL_BLOCK)

    def _first_suspect(self, tables: Tables, before: int = ALL_TOKENS) -> int:
        """Tokens in front of the first suspect block among those that hold the first `before` tokens."""
        first = ALL_TOKENS
        for tokens, table in zip(self._block_tokens, tables, strict=False):
            place = next((i for i, block in enumerate(table[: -(-before // tokens)]) if block in self.suspects), None)
            if place is not None:
                first = min(first, place * tokens)
        return first
