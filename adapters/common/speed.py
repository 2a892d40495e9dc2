"""Prompt tokens a second that the engine computes at present: the time that a token not computed saves.

Measured over steps with enough prompt tokens to be mostly prefill; decoding in the same step is included. Under asynchronous
scheduling a step is planned while the one before still runs. Its time is then too long, and the speed an underestimate.

Owns: the steps between their plan and their end. Refuses to know: requests, and how the speed is used.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

FLOOR_TOKENS = 256  # in fewer, a step's fixed costs would be taken for prefill
_WEIGHT = 0.2  # of the newest step
_STEPS = 64  # more than any pipeline has under way


class PrefillSpeed:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens_per_second = 0.0  # 0: not known yet
        self._clock = clock
        self._steps: deque[tuple[int, float]] = deque(maxlen=_STEPS)

    def planned(self, prompt_tokens: int) -> None:
        self._steps.append((prompt_tokens, self._clock()))

    def ended(self) -> None:
        """The oldest step has ended."""
        if not self._steps:
            return
        tokens, began = self._steps.popleft()
        seconds = self._clock() - began
        if tokens < FLOOR_TOKENS or seconds <= 0:
            return
        known, now = self.tokens_per_second, tokens / seconds
        self.tokens_per_second = known + _WEIGHT * (now - known) if known else now
