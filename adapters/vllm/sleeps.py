"""Resets of the connector's cache that may be those of vLLM's sleep.

vLLM resets the connector's cache when new weights may have come, and in the same way before it sleeps. The scheduler half cannot
distinguish the two at that moment. Workers can: they give up the KV cache for a sleep and restore it afterwards. So, where sleep
keeps the weights (`kvserver.on_sleep`), a reset is in question until the next report. Meanwhile requests wait. KV computed
meanwhile is stored only if its step is accepted, and the step's report comes first.

Owns: the resets in question. Refuses to know: what a reset without sleep means.
"""

from __future__ import annotations

import time

from kvserver.adapters.common.steps import ASLEEP

_LONGEST_QUESTION_SECONDS = 1.0  # from the first request that waits: a worker's report comes with each step


class Sleeps:
    def __init__(self, keeps_weights: bool) -> None:
        self._keeps_weights = keeps_weights
        self._resets = 0  # in question
        self._wakes = 0  # reported by the workers
        self._deadline: float | None = None

    @property
    def in_question(self) -> bool:
        return self._resets > 0

    def may_explain_reset(self) -> bool:
        """True if a sleep may explain the present reset, which is then in question."""
        if self._keeps_weights:
            self._resets += 1
            self._deadline = None
        return self._keeps_weights

    def reported(self, wakes: int) -> bool:
        """True if a reset in question was no sleep's. None is in question afterwards. `wakes`: of all ranks, so far.

        An engine may make steps while it sleeps; they answer nothing.
        """
        if wakes == ASLEEP:
            return False
        explained, self._wakes = wakes - self._wakes, wakes
        resets, self._resets = self._resets, 0
        return resets > explained

    def gave_up(self) -> bool:
        """The same, without a report, once a request has waited for too long. To be called while a request waits."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + _LONGEST_QUESTION_SECONDS
        if now < self._deadline:
            return False
        self._resets = 0
        return True
