"""Stores of each request: which of its chunks and single blocks, read from which blocks, in which step.

The blocks of a store are pinned before the store is planned.

Owns: the rule which of a request's KV is final; the boundaries whose states it has the engine keep. Refuses to know: whether the
engine stores at all, loads, when stores are sent (`acceptance`), and how they end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from kvserver._native import pack_blocks
from kvserver.adapters.common.boundaries import Boundaries
from kvserver.adapters.common.hazards import PinnedStores
from kvserver.adapters.common.specs import StoreSpec
from kvserver.adapters.vllm.acceptance import Acceptance
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.chunks import Chunks, Offer, Tables
from kvserver.adapters.vllm.contents import Contents
from kvserver.adapters.vllm.facts import EngineFacts
from kvserver.adapters.vllm.requests import RequestState, offers_of, session_of, tables_of
from kvserver.adapters.vllm.variants import Variants
from kvserver.protocol import MAX_CHUNKS, HelloReply

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_STORE_TOKENS = 1 << 16  # in one message, which with their contents has less than 1 MiB

Hold: TypeAlias = Callable[[StoreSpec, RequestState, int, Callable[[], None]], None]  # as Acceptance.hold


def runs(chunks: Iterable[int], most: int) -> Iterator[range]:
    """Ascending chunks as ranges of neighbours, `most` at most in each."""
    first = last = -1
    for chunk in chunks:
        if chunk != last or chunk - first >= most:
            if last > first:
                yield range(first, last)
            first = chunk
        last = chunk + 1
    if last > first:
        yield range(first, last)


class StorePlanner:
    """Planner of stores. `ids` numbers the copies of the engine."""

    def __init__(
        self,
        chunks: Chunks,
        facts: EngineFacts,
        variants: Variants,
        pins: PinnedStores,
        pool: PoolHook,
        acceptance: Acceptance,
        ids: Iterator[int],
        counters: Counter[str],
        store_generated: bool = True,
    ) -> None:
        self._chunks, self._facts, self._variants, self._pins, self._ids = chunks, facts, variants, pins, ids
        self._pool = pool
        self._acceptance, self._counters, self._store_generated = acceptance, counters, store_generated
        self._contents = Contents(chunks, counters)
        self._sends_contents = False  # with stores, in this session
        self._sends_parents = False  # with stores of chunks, in this session
        self._boundary_interval = 0  # tokens, in this session

    def begin_session(self, hello: HelloReply | None) -> None:
        self._sends_contents = hello is not None and (hello.kv_events or self._facts.publishes)
        self._sends_parents = hello is not None and hello.parents
        self._boundary_interval = hello.boundary_interval if hello is not None else 0

    def plan(self, state: RequestState, output: SchedulerOutput, computed: int) -> None:
        """Store the chunks that this step completes, and the blocks behind them where the prompt ends."""
        if self._chunks.states:
            state.offers += (*offers_of(state, output),)
        confirmed = min(self._confirmed(state.request, computed), state.trusted_tokens)
        # Not by what is confirmed: the last, partial block of the prompt has no hash.
        prompt_ends = self._chunks.tails and not state.has_prompt_tail and computed >= state.request.num_prompt_tokens
        if state.stored_chunks >= confirmed // self._chunks.tokens and not prompt_ends:
            return  # as in most steps; the tables of a long request cost more than all else here
        tables = tables_of(state, output)
        confirmed = min(confirmed, *self._chunks.tokens_of(tables))
        if not self._variants.is_current(state.request, state.variant):
            return
        hold = self._acceptance.hold
        self._store_chunks(state, tables, confirmed // self._chunks.tokens, hold)
        if prompt_ends:
            self._store_tail(state, tables, confirmed, hold)
            state.has_prompt_tail = True

    def plan_last(self, state: RequestState, tables: Tables, computed: int) -> None:
        """Store what a request that ends has beyond its last store: the next turn of a chat begins with it.

        The KV of its last token may not be computed.
        """
        request = state.request
        if not self._chunks.tails or not computed:
            return
        confirmed = self._confirmed(request, min(computed, request.num_tokens - 1 - self._facts.holds_back_tail))
        confirmed = min(confirmed, state.trusted_tokens, *self._chunks.tokens_of(tables))
        if confirmed // self._chunks.block_tokens > state.stored_blocks and self._variants.is_current(
            state.request, state.variant
        ):
            hold = self._acceptance.hold_ended
            self._store_chunks(state, tables, confirmed // self._chunks.tokens, hold)
            self._store_tail(state, tables, confirmed, hold)

    def _store_chunks(self, state: RequestState, tables: Tables, end: int, hold: Hold) -> None:
        first = state.stored_chunks
        if first >= end:
            return
        boundaries = self._boundaries_of(state)
        offers = [offer for offer in state.offers if self._is_resident(state.request, offer)]
        tables = self._chunks.offered(tables, offers)
        for number, group in enumerate(self._chunks.groups):
            wanted = boundaries.wanted(group, first, end, self._chunks.tokens)
            whole = [chunk for chunk in wanted if self._chunks.whole(number, tables, chunk)]
            self._counters["chunks_left_by_window"] += len(wanted) - len(whole)
            most = max(1, min(MAX_CHUNKS, _STORE_TOKENS // self._chunks.tokens))
            dropped = boundaries.superseded(group, end, self._chunks.tokens)
            for chunks in runs(whole, most):
                self._add_chunks(state, number, chunks, tables, dropped, hold)
        boundaries.passed(end)
        state.stored_chunks = end
        state.stored_blocks = max(state.stored_blocks, end * self._chunks.blocks)
        state.offers = tuple([offer for offer in state.offers if offer[2] > end * self._chunks.tokens])

    def _is_resident(self, request: Request, offer: Offer) -> bool:
        """False if vLLM has given the block away.

        It may do so in the pass in which it offers it: where accepted drafts go on behind the boundary, it frees the boundary's block
        before it hands over the offer.
        """
        group, block_id, tokens = offer
        return self._pool.has(block_id, group, request.block_hashes[tokens // self._chunks.hash_block_tokens - 1])

    def _store_tail(self, state: RequestState, tables: Tables, tokens: int, hold: Hold) -> None:
        """The single blocks behind the last chunk, but for those that are stored."""
        request, chunks = state.request, tokens // self._chunks.tokens
        tail = self._chunks.tail(request, chunks, tokens)
        tail = range(max(tail.start, state.stored_blocks), tail.stop)
        if not tail:
            return
        for group in range(len(self._chunks.groups)):
            block_ids = self._chunks.tail_ids(group, tables, tail)
            store = StoreSpec(
                copy_id=next(self._ids),
                request_id=request.request_id,
                variant=state.variant.text,
                durability=state.variant.durability,
                chunk_blocks=1,
                keys=self._chunks.block_keys(request, tail),
                block_ids=pack_blocks(block_ids),
                group=self._chunks.tail_group(group),
                contents=self._contents.of_blocks(request, tail.start, tail.stop)
                if self._sends_contents and group == 0
                else None,
                first_chunk=tail.start,
                after=self._key_before(request, chunks),
            )
            self._pins.add(store.copy_id, block_ids)
            hold(store, state, tail.stop * self._chunks.block_tokens, self._undo(state, chunks, tail.start))
        state.stored_blocks = tail.stop

    def want_state(self, state: RequestState, computed: int) -> None:
        """Have vLLM end a step at the next kept boundary, or before it at its own one, and offer the state.

        vLLM may schedule a step before it knows the tokens of the previous one. Then it offers a state one step after the state
        was computed: the boundary is the next one until vLLM has hashed the boundary's last token.
        """
        request, size = state.request, self._chunks.tokens
        tokens = min(computed, request.num_tokens)
        if tokens < request.shared_prefix_boundary <= (tokens // size + 1) * size:
            return  # no boundary is nearer
        wanted = self._boundaries_of(state).next_kept(tokens // size, request.num_tokens // size) * size
        own = state.engine_boundary
        request.shared_prefix_boundary = min(wanted, own) if own > tokens else wanted

    def _boundaries_of(self, state: RequestState) -> Boundaries:
        if state.boundaries is None:
            size, tokens, answer = self._chunks.tokens, state.request.num_prompt_tokens, state.answer
            junction = answer.full_chunks if answer is not None and answer.full_chunks > answer.hit_chunks else 0
            state.boundaries = Boundaries(
                (tokens // size, (tokens - 1) // size), junction, self._boundary_interval // size
            )
        return state.boundaries

    def _confirmed(self, request: Request, computed: int) -> int:
        """Number of tokens whose KV is final. Hashes exist for confirmed tokens only, so rejected drafts never count."""
        hashed = len(request.block_hashes) * self._chunks.hash_block_tokens
        tokens = min(computed, hashed) if self._store_generated else min(computed, hashed, request.num_prompt_tokens)
        if self._facts.holds_back_tail and tokens >= request.num_tokens:
            tokens = request.num_tokens - 1  # the draft model rewrites its KV of the last position
        return tokens

    def _add_chunks(
        self, state: RequestState, group: int, chunks: range, tables: Tables, dropped: Sequence[int], hold: Hold
    ) -> None:
        block_ids = self._chunks.blocks_of(group, tables, chunks)
        described = self._sends_contents and group == 0
        full = self._chunks.groups[group].kind == "full"
        session_id, session_salt = session_of(state)
        linked = full and self._sends_parents
        store = StoreSpec(
            copy_id=next(self._ids),
            request_id=state.request.request_id,
            variant=state.variant.text,
            durability=state.variant.durability,
            chunk_blocks=self._chunks.object_blocks[group],
            keys=self._chunks.keys(state.request, chunks),
            block_ids=pack_blocks(block_ids),
            contents=self._contents.of(state.request, chunks.start, chunks.stop) if described else None,
            group=group,
            first_chunk=chunks.start,
            dropped=self._chunks.keys(state.request, dropped),
            after=self._key_before(state.request, chunks.start) if linked else None,
            session_id=session_id,
            session_salt=session_salt,
            tenant=state.wishes.tenant,
        )
        self._pins.add(store.copy_id, block_ids)
        undo = self._undo(state, chunks.start, chunks.start * self._chunks.blocks)
        hold(store, state, chunks.stop * self._chunks.tokens, undo)

    def _key_before(self, request: Request, chunk: int) -> bytes | None:
        return self._chunks.keys(request, range(chunk - 1, chunk)) if chunk else None

    @staticmethod
    def _undo(state: RequestState, chunks: int, blocks: int) -> Callable[[], None]:
        """Function that makes the request store again from these first chunks and single blocks on, after a store of it was dropped."""

        def undo() -> None:
            state.stored_chunks = min(state.stored_chunks, chunks)
            state.stored_blocks = min(state.stored_blocks, blocks)
            state.has_prompt_tail, state.boundaries = False, None

        return undo

    def copies_of(self, store: StoreSpec) -> int:
        """Number of ranks that copy each of the store's objects."""
        group = self._chunks.groups[store.group % len(self._chunks.groups)]
        return 1 if group.replicated else self._facts.world_size
