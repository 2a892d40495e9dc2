"""Tokens promised to vLLM and what became of them, by the tier that they come from.

vLLM may ask several times before it places a request. A promise counts once, as answered last, when vLLM has placed the request
or will not. So at any time promised = loaded + withdrawn + what is being loaded, of each tier.

Owns: the promise of each request, from the answer to vLLM until a load has brought its tokens or will not. Refuses to know:
lookups, loads, and which tokens of a prompt count where (`sources`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvserver.adapters.common.stats import LOADED_TOKENS, PROMISED_TOKENS, WITHDRAWN_TOKENS


@dataclass(slots=True)
class _Promise:
    l1: int
    l2: int
    placed: bool = False  # a load brings it


class Promises:
    """Promises of one engine. It counts into `counters`, as `stats` names them."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._open: dict[str, _Promise] = {}  # by request id

    def answered(self, request_id: str, tokens: int, from_l2: int) -> None:
        """`tokens` are promised, of which `from_l2` at most come from L2. 0: nothing is, whatever was answered before."""
        self.failed(request_id)  # vLLM asks again only if its load brought nothing
        self._open.pop(request_id, None)
        if tokens > 0:
            l2 = min(tokens, from_l2)
            self._open[request_id] = _Promise(tokens - l2, l2)

    def placed(self, request_id: str, tokens: int) -> int:
        """vLLM has placed the request, and a load will bring so many of the promised tokens: those before the others.

        Without tokens the load has ended, if there was one; else vLLM uses nothing of what was promised. Returns the tokens from L2.
        """
        promise = self._open.get(request_id)
        if promise is None:
            return 0
        if promise.placed:
            self._count(LOADED_TOKENS, promise.l1, promise.l2)
            del self._open[request_id]
            return 0
        l1 = min(tokens, promise.l1)
        l2 = min(tokens - l1, promise.l2)
        self._count(PROMISED_TOKENS, promise.l1, promise.l2)
        self._count(WITHDRAWN_TOKENS, promise.l1 - l1, promise.l2 - l2, " not_used")
        if not tokens:
            del self._open[request_id]
            return 0
        self._open[request_id] = _Promise(l1, l2, placed=True)
        return l2

    def is_open(self, request_id: str) -> bool:
        """True until vLLM has stated what it uses of a promise."""
        promise = self._open.get(request_id)
        return promise is not None and not promise.placed

    def being_loaded(self, request_id: str) -> tuple[int, int]:
        """Tokens from L1 and from L2."""
        promise = self._open.get(request_id)
        return (promise.l1, promise.l2) if promise is not None and promise.placed else (0, 0)

    def failed(self, request_id: str) -> None:
        """The request's load failed on one rank; other ranks may report the same later."""
        if (promise := self._open.get(request_id)) is not None and promise.placed:
            self._withdraw(request_id, "load_failed")

    def ended(self, request_id: str) -> None:
        """End the promise of a request that ended. What a load under way would have brought remains unknown."""
        promise = self._open.get(request_id)
        if promise is not None and not promise.placed:
            self._count(PROMISED_TOKENS, promise.l1, promise.l2)
            self._withdraw(request_id, "not_placed")
        else:
            self._withdraw(request_id, "request_ended")

    def _withdraw(self, request_id: str, why: str) -> None:
        if (promise := self._open.pop(request_id, None)) is not None:
            self._count(WITHDRAWN_TOKENS, promise.l1, promise.l2, f" {why}")

    def _count(self, what: str, l1: int, l2: int, why: str = "") -> None:
        for tier, tokens in (("l1", l1), ("l2", l2)):
            if tokens:
                self._counters[f"{what}_{tier}{why}"] += tokens
