"""Requests that the scheduler half knows, and their blocks.

Owns: a small state per request, and the block tables, followed by vLLM's differences. Refuses to know: lookups, loads and stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvserver.adapters.common.boundaries import Boundaries
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.lookups import Question
from kvserver.adapters.common.specs import LoadSpec
from kvserver.adapters.vllm.chunks import Offer, Tables
from kvserver.adapters.vllm.variants import Variant
from kvserver.adapters.vllm.wishes import NONE, Wishes
from kvserver.protocol import MAX_SESSION_ID, salt_digest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


ALL_TOKENS = 1 << 62  # more than any request has


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState(Question):
    request: Request
    variant: Variant
    since: float = 0.0  # what its LoRA's files must be looked at after, before KV is loaded
    local_tokens: int = 0  # what vLLM had itself when the hit was reported to it
    loads: list[LoadSpec] = field(default_factory=list)  # the copies of its load, one for each object group
    admitted: bool = False  # vLLM has placed it
    give_up: bool = False  # a load failed: compute the rest
    must_load: bool = False  # a part of its prompt cannot be computed
    stored_chunks: int = 0  # chunks before this one were stored or found
    stored_blocks: int = 0  # single blocks before this one were
    has_prompt_tail: bool = False  # the blocks behind the last chunk of the prompt were
    computed: int = 0  # tokens whose KV its blocks have after the steps planned so far; 0 while it is not scheduled
    accepted_tokens: int = 0  # of these, after the steps that vLLM has accepted
    trusted_tokens: int = ALL_TOKENS  # its blocks up to there hold nothing that was taken back
    asked_tokens: int | None = None  # what vLLM had itself at its last question for a hit; None: it was placed since
    own_tokens: int = 0  # what it then loads by this connector
    boundaries: Boundaries | None = None  # None: not known yet in this session
    engine_boundary: int = 0  # tokens at which the engine itself wants the state; 0: none
    tables: Tables = ()  # for vLLM before 0.30
    lost: bool = False  # its tables may be wrong: nothing is stored until vLLM sends them whole
    # Of states, behind the chunks that were stored: a draft layer holds back the last tokens of a step.
    offers: tuple[Offer, ...] = ()
    wishes: Wishes = NONE
    pin: str = ""  # whether the pin that it wished was requested of the daemon; "" if it wished none
    turn: tuple[int, Any] = (0, None)  # `turn_of` the request, as of which all this is
    not_loaded: str = ""  # why it loads nothing that the daemon has: one of EndRequest's codes

    def store_again(self) -> None:
        """Reset the state to that of a request of which nothing is stored."""
        self.stored_chunks = self.stored_blocks = self.computed = 0
        self.has_prompt_tail, self.offers = False, ()

    def begin_turn(self, variant: Variant | None, wishes: Wishes) -> None:
        """A streaming session goes on: its prompt is another one now. `variant`: None if it must run without cache; the old
        one is not current then.
        """
        if variant is not None and variant != self.variant:  # nothing of it is stored under the new one
            self.variant = variant
            self.store_again()
        self.wishes = wishes
        self.has_prompt_tail = self.give_up = False
        self.boundaries, self.offers = None, ()
        self.turn = turn_of(self.request)


def session_of(state: RequestState) -> tuple[str, bytes | None]:
    """Session of the request, and the digest of its cache salt; "" if it has no session, or a name that is too long for the daemon."""
    request = state.request
    id = getattr(request, "session_id", None) or state.wishes.session_id  # vLLM before 0.32 has none
    return (id, salt_digest(request.cache_salt) or None) if id and len(id) <= MAX_SESSION_ID else ("", None)


def turn_of(request: Request) -> tuple[int, Any]:
    """Values that every turn of a streaming session changes. vLLM extends the request in place and notifies no connector."""
    return request.num_prompt_tokens, request.sampling_params


class Requests(dict[str, RequestState]):
    """Requests by id."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def scheduled(self, output: SchedulerOutput) -> Iterator[tuple[RequestState, int, int, bool]]:
        """The requests of this step, with the tokens computed before and after it, and whether all its blocks were named anew.

        Keeps tables and cursors true.
        """
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            if (state := self.get(new.req_id)) is not None:
                self._follow_tables(state, new.block_ids, anew=True)
                yield state, new.num_computed_tokens, new.num_computed_tokens + scheduled[new.req_id], True
        cached = output.scheduled_cached_reqs
        for request_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if (state := self.get(request_id)) is not None:
                resumed = request_id in cached.resumed_req_ids
                if resumed:
                    state.stored_chunks = 0
                self._follow_tables(state, blocks, anew=resumed)
                yield state, computed, computed + scheduled[request_id], resumed

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
            self._faults.count("tables of a request", error)


def tables_of(state: RequestState, output: SchedulerOutput) -> Tables:
    block_state: Any = getattr(output, "kv_connector_block_state", None)
    if not hasattr(block_state, "get_block_ids"):  # 0.29 has tables there too, but only of requests with new blocks
        return state.tables
    tables: Tables | None = block_state.get_block_ids(state.request.request_id)
    return tables if tables is not None else ()


def offers_of(state: RequestState, output: SchedulerOutput) -> Sequence[Offer]:
    """The states that vLLM hands over with this step; 0.29 and later."""
    block_state: Any = getattr(output, "kv_connector_block_state", None)
    offers: dict[str, list[Offer]] = getattr(block_state, "boundary_state_offloads", {})
    return offers.get(state.request.request_id, ())
