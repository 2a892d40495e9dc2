"""Shortage: whether the engine needs blocks that only stores keep.

vLLM states neither which request waits for blocks nor how many it needs. It asks about one request after the other, and ends a
pass at the first one that it cannot place. So the request that it asked about last and did not place waits for blocks. Its need
is counted here, from the tokens and the kinds of the KV cache groups. The count is never too high: a request would wait for
stores although their cancel would help it.

Owns: which request waits, for how many passes, and the blocks that requests need. Refuses to know: stores, pins and how they end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from kvserver.adapters.vllm.requests import ALL_TOKENS
from kvserver.protocol import ObjectGroup

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Under asynchronous scheduling so many passes see the blocks of a store that ends in time: it waits for the outputs of its step, goes out
# with the next plan, and vLLM has the report one pass later.
PATIENCE = 4
STORING_SECONDS = 1.0  # that an engine which only stores waits besides: other engines wait as long for what it stores
_WAITS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class Shortage:
    """Shortage of one engine.

    `admitted_tokens`: vLLM admits a request that has blocks for so many more tokens, where these are not all of it.
    `patience_seconds`: how long a request waits for stores at least, from the first pass in which it does.
    """

    def __init__(
        self,
        groups: Sequence[ObjectGroup],
        admitted_tokens: int,
        patience_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience_seconds, self._clock = patience_seconds, clock
        self._waits_since = 0.0
        self._groups = groups
        self._admitted_tokens = admitted_tokens
        self._front: tuple[Request, int, int] | None = None  # (it, tokens that it has, tokens that it is to have)
        self._loading: dict[str, Request] = {}  # placed for a load: vLLM places them again without a question
        self._passes = 0  # in a row, in which a request waited for blocks that only stores keep

    # ---- a pass -----------------------------------------------------------------------------------

    def asked(self, request: Request, local_tokens: int, external_tokens: int) -> None:
        """vLLM knows what is found of the request, and is to place it."""
        partly = self._admitted_tokens < ALL_TOKENS  # then a load needs blocks for itself only
        admitted = external_tokens if partly and external_tokens else self._admitted_tokens
        self._front = request, local_tokens, min(request.num_tokens, local_tokens + admitted)

    def placed(self, request: Request, loads: bool) -> None:
        """vLLM has allocated blocks for the request."""
        self._front = None
        if loads:
            self._loading[request.request_id] = request
        else:
            self._loading.pop(request.request_id, None)

    def ended(self, request: Request) -> None:
        self._loading.pop(request.request_id, None)
        if self._front is not None and self._front[0] is request:
            self._front = None

    def pass_ended(self, free: int, kept: int, running: Iterable[tuple[Request, int]]) -> bool:
        """True if the engine needs the `kept` blocks beside the `free` ones.

        `running`: requests of this step, with their computed tokens. They need blocks in the next steps and are counted in
        advance: vLLM preempts one of them as soon as a block is missing.
        """
        front, self._front = self._front, None
        if kept <= 0:
            self._passes = 0
            return False
        waiting = [front[1:]] if front is not None else list(self._loaded())
        waits = any(self._blocks(have, tokens) <= free + kept for have, tokens in waiting)
        self._passes = self._passes + 1 if waits else 0
        self._waits_since = self._clock() if self._passes <= 1 else self._waits_since
        patient = self._passes < PATIENCE or self._clock() < self._waits_since + self._patience_seconds
        more = self._groups[0].block_tokens
        soon = sum(self._blocks(tokens, max(tokens, request.num_tokens) + more) for request, tokens in running)
        return (waits and not patient) or soon > free

    def _loaded(self) -> Iterator[tuple[int, int]]:
        """Tokens of requests whose load has ended and that vLLM did not place: that each has, and is to have."""
        for request in self._loading.values():
            if request.status in _WAITS:
                have = request.num_computed_tokens
                yield have, min(request.num_tokens, have + self._admitted_tokens)

    # ---- blocks -----------------------------------------------------------------------------------

    def _blocks(self, have: int, tokens: int) -> int:
        """Least number of blocks that a request with so many tokens needs beside those of the tokens that it has."""
        return sum(len(group.members) * self._of_group(group, have, tokens) for group in self._groups)

    @staticmethod
    def _of_group(group: ObjectGroup, have: int, tokens: int) -> int:
        """Least number of blocks for one member of the group.

        A window keeps no more blocks than it covers; a state and a local chunk may need one only.
        """
        more = -(-tokens // group.block_tokens) - have // group.block_tokens
        if group.kind == "window":
            more = min(more, -(-group.tokens // group.block_tokens))
        return more if group.kind in ("full", "window") else min(more, 1)
