"""Epochs of the weights: a new epoch makes all KV stored so far unfindable.

vLLM passes some resets on to the connector, and after others resets only its prefix cache. Either may follow new weights. A reset
that a sleep explains begins no epoch where sleep keeps the weights (`sleeps`).

Owns: which resets were seen, and until when nothing may be stored. Refuses to know: what an epoch makes void (`scheduler`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.sleeps import Sleeps
from kvserver.adapters.vllm.variants import Variants

log = logging.getLogger("vllm.kvserver")

_RESET = "epoch: private since reset_cache"


class Epochs:
    def __init__(
        self, pool: PoolHook, variants: Variants, sleeps: Sleeps, follows_resets: bool, counters: Counter[str],
        begin: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`follows_resets`: also of the prefix cache alone. `begin`: makes void what is of the former weights; it is given the reason."""
        self._pool, self._variants, self._sleeps = pool, variants, sleeps
        self._follows_resets, self._counters, self._begin_epoch = follows_resets, counters, begin
        self._resets_seen = 0
        self._clears_awaited = 0  # until the pool was cleared so often, blocks may hold KV of former weights

    @property
    def may_store(self) -> bool:
        return self._pool.clears >= self._clears_awaited

    def reset_cache(self) -> None:
        """vLLM reports that the weights may have changed, or goes to sleep. It resets its own blocks first, if it can."""
        self._resets_seen = self._pool.resets
        self._clears_awaited = self._pool.clears + (not self._pool.unused)
        if self._variants.has_new_version or not self._sleeps.may_explain_reset():
            self._begin(_RESET, self._clears_awaited)

    def workers_reported(self, wakes: int) -> None:
        if self._sleeps.reported(wakes):
            self._begin(_RESET, self._clears_awaited)

    def in_question(self) -> bool:
        """True while it is not known whether a sleep explains a reset: a request waits, for a second at most."""
        if not self._sleeps.in_question:
            return False
        if gave_up := self._sleeps.gave_up():
            self._begin(_RESET, self._clears_awaited)
        return not gave_up

    def follow_resets(self) -> None:
        """Follow a reset of the prefix cache that vLLM did not pass on to the connector: trainers reset after new weights.

        Called before KV is named by the weights, and not by the reset itself, which reset_cache() may follow at once.
        """
        if self._resets_seen == self._pool.resets:
            return
        self._resets_seen = self._pool.resets
        if not self._follows_resets:
            return
        self._begin("epoch: private since prefix reset", self._pool.clears_awaited)
        if not self._variants.private:
            return
        self._counters["prefix_resets"] += 1
        if self._counters["prefix_resets"] == 1:
            log.warning(
                "the prefix cache was reset, so the weights may have changed: from now on this engine shares KV with "
                "itself only. Set a new kvserver.weights_version before a reset to share again, or "
                "kvserver.on_prefix_reset=keep where a reset does not mean new weights (further resets are only counted)"
            )

    def _begin(self, since: str, clears_awaited: int) -> None:
        """Begin an epoch: no KV stored so far may be found, unless a configured version names the weights.

        vLLM does not reset blocks that requests use: they keep KV of the old weights, and nothing is stored until a reset has
        succeeded.
        """
        self._clears_awaited = clears_awaited
        self._begin_epoch(since)
        if not self.may_store:
            log.warning(
                "vLLM did not reset the prefix cache, since requests ran; nothing is stored until a reset succeeds"
            )
