"""Hits: which part of a prompt is looked up in the daemon, and how much of the answer the engine is to load.

Owns: the chunks and single blocks that a hit may have, and the reasons to load nothing of it. Refuses to know: block tables,
copies, stores, and how a lookup reaches the daemon (`lookups`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvserver.adapters.common.failed_loads import FailedLoads
from kvserver.adapters.common.lookups import Answer, Lookups
from kvserver.adapters.vllm.chunks import Chunks
from kvserver.adapters.vllm.facts import EngineFacts
from kvserver.adapters.vllm.requests import RequestState, session_of
from kvserver.adapters.vllm.variants import Variants
from kvserver.protocol import MAX_CHUNKS, HandOver, Lookup, LookupTail

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LOOK_SECONDS = 0.1  # for a look at a LoRA's files, from the request's arrival
# A step reads all weights whatever it computes, so a GPU computes some 300 tokens in the time of one (H100: 990 TFLOPS, 3.35 TB/s). Its other
# requests may fill it; one block of vLLM's default size costs nothing in any case.
_FREE_TOKENS = 16
_LONGEST_TRACEPARENT = 512  # as the protocol has it


def traceparent(request: Request) -> str:
    """The traceparent of the request's headers; empty if there is none."""
    for name, value in (request.trace_headers or {}).items():
        if name.lower() == "traceparent" and len(value) <= _LONGEST_TRACEPARENT:
            return str(value)
    return ""


class Hits:
    def __init__(
        self, facts: EngineFacts, chunks: Chunks, variants: Variants, failed: FailedLoads, lookups: Lookups
    ) -> None:
        self._facts = facts
        self._chunks = chunks
        self._variants = variants
        self._failed = failed
        self._lookups = lookups

    def is_useful(self, state: RequestState) -> bool:
        """True if there is something to look up, by an engine that loads."""
        if not self._facts.loads:
            return False
        return self._useful_chunks(state) > 0 or bool(self._useful_tail(state, 0))

    def _useful_chunks(self, state: RequestState) -> int:
        """Number of chunks that a hit may have, bounded so that the hit, and the load of it, fits one message."""
        useful = min(self._chunks.useful(state.request), state.wishes.most_tokens // self._chunks.tokens, MAX_CHUNKS)
        if not self._failed:
            return useful
        return self._failed.leading(state.variant.text, self._chunks.keys(state.request, range(useful)))

    def _useful_tail(self, state: RequestState, chunks: int) -> range:
        """The single blocks behind so many chunks that a hit may have."""
        request = state.request
        tail = self._chunks.tail(request, chunks, min(self._chunks.most_tokens(request), state.wishes.most_tokens))
        if not tail or not self._failed:
            return tail
        return tail[: self._failed.leading(state.variant.text, self._chunks.block_keys(request, tail))]

    def look_up(self, state: RequestState) -> None:
        self._lookups.send(state, self._lookup_of(state), lambda chunks: self._tail_of(state, chunks))

    def _tail_of(self, state: RequestState, chunks: int) -> LookupTail:
        return LookupTail(
            self._facts.names.instance_id,
            self._facts.names.incarnation,
            state.request.request_id,
            self._chunks.block_keys(state.request, self._useful_tail(state, chunks)),
        )

    def _lookup_of(self, state: RequestState) -> Lookup:
        request = state.request
        chunks = self._useful_chunks(state)
        tail = self._useful_tail(state, chunks)
        session_id, session_salt = session_of(state)
        wishes = state.wishes
        if wishes.pin_seconds:
            state.pin = "requested"
        if wishes.prefilled_tokens:  # it waits once for what was handed over: a later lookup finds what came
            state.wishes = replace(wishes, prefilled_tokens=0)
        return Lookup(
            instance_id=self._facts.names.instance_id,
            incarnation=self._facts.names.incarnation,
            request_id=request.request_id,
            chunk_blocks=self._chunks.blocks,
            keys=self._chunks.keys(request, range(chunks)),
            variant=state.variant.text,
            durability=state.variant.durability,
            tokens=request.num_tokens,
            traceparent=traceparent(request),
            tail_keys=self._chunks.block_keys(request, tail) if tail else b"",
            session_id=session_id,
            session_salt=session_salt,
            pin_seconds=wishes.pin_seconds or None,
            handed_over=HandOver(wishes.prefilled_by, wishes.prefilled_tokens) if wishes.prefilled_tokens else None,
            tenant=wishes.tenant,
        )

    def tokens_to_load(self, state: RequestState, local_tokens: int, has_all: bool) -> int | None:
        """Tokens beyond `local_tokens`, all of them to be loaded asynchronously; None: not known yet."""
        request = state.request
        if state.give_up:
            return 0
        if not self._facts.loads:
            state.not_loaded = "save_only"
        elif not state.wishes.most_tokens:
            state.not_loaded = "request_limit"
        if not self.is_useful(state):
            if self._failed and self._chunks.useful(request):
                state.not_loaded = state.not_loaded or "load_failed"
            return 0
        if request.skip_reading_prefix_cache:  # every token must be computed; vLLM before 0.31 queries all the same
            return 0
        if has_all:
            state.not_loaded = ""
            return 0
        if (answer := self._answer_to(state)) is None:
            return None
        found = self._chunks.found_tokens(answer.hit_chunks, answer.tail_blocks)
        tokens = self._worth_loading(state, found, local_tokens)
        state.not_loaded = "lookup_timeout" if answer.timed_out else ""
        if not tokens:
            return 0
        same = self._variants.are_files_same(request, state.since)
        if same is None and time.monotonic() < state.since + _LOOK_SECONDS:
            return None
        if same is None:
            state.not_loaded = "lookup_timeout"
        elif self._facts.whole_prompts_only and local_tokens + tokens < request.num_tokens - 1:
            state.not_loaded = "whole_prompts_only"
        elif not same or not self._variants.is_current(request, state.variant):
            state.not_loaded = self._variants.why_without_cache(request) or "weights_changed"
        if state.not_loaded:
            return 0
        state.local_tokens = local_tokens
        return tokens

    def _answer_to(self, state: RequestState) -> Answer | None:
        """The answer to the request's lookup, which is sent again where its answer is void or old."""
        if state.admitted:  # it was preempted since: look up again, more may be stored by now
            state.admitted = False
            state.answer = None
            state.since = time.monotonic()
            state.waits_for_fills = state.wishes.waits_for_storage
        if self._failed and state.answer is not None and state.answer.hit_chunks > self._useful_chunks(state):
            state.answer = None  # it is older than the failure of another request's load
        if self._lookups.must_send(state):
            state.boundaries = None
            self.look_up(state)
        return self._lookups.answer_to(state)

    def has_all(self, state: RequestState, local_tokens: int) -> bool:
        """True if the engine itself has all that the daemon could find. Then it waits for no answer and no fill."""
        if not local_tokens:
            return False
        chunks = self._useful_chunks(state)
        most = self._chunks.found_tokens(chunks, len(self._useful_tail(state, chunks)))
        if self._worth_loading(state, most, local_tokens):
            return False
        self._lookups.forgo(state)
        return True

    def _worth_loading(self, state: RequestState, found: int, local_tokens: int) -> int:
        """The tokens that a load brings where so many are found; 0 if there is none to begin.

        A load takes one more pass of the scheduler, in which the request could have been computed. An engine that has a prefix itself
        computes the last few tokens sooner: a step takes as long with a block more. So it loads more than a part of a block, and more
        than `_FREE_TOKENS`.
        """
        tokens = self._usable(state.request, found) - local_tokens
        few = tokens < self._chunks.block_tokens or tokens <= _FREE_TOKENS
        return 0 if tokens <= 0 or (local_tokens and few and not state.must_load) else tokens

    def _usable(self, request: Request, found: int) -> int:
        """Number of the found tokens that are used.

        One token is computed in any case. The last block is left out where vLLM leaves it out of its own hits. Objects of a
        window or a state end with chunks, so nothing can be left out of their hit.
        """
        most, size = min(found, int(request.num_tokens) - 1), self._chunks.block_tokens
        if self._facts.drops_last_block and self._chunks.only_full:
            return max(0, most // size - 1) * size
        return most
