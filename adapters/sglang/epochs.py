"""Epochs of the weights: SGLang resets a linker for a flush and after new weights, and does not state which.

Owns: the text that goes with every key, its durability, and why the engine shares with itself only. Refuses to know: keys.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from kvserver.adapters.common.log import log
from kvserver.protocol import Durability


class WeightEpochs:
    def __init__(self, incarnation: str, on_reset: Literal["private", "keep"]) -> None:
        self._incarnation, self._on_reset = incarnation, on_reset
        self._epoch = 0
        self.private = ""

    @property
    def variant(self) -> str:
        if not self._epoch:
            return ""
        return hashlib.blake2b(f"epoch={self._incarnation}/{self._epoch}".encode(), digest_size=15).hexdigest()

    @property
    def durability(self) -> Durability:
        return Durability.PROCESS if self._epoch else Durability.ANYWHERE

    def reset(self) -> None:
        if self._on_reset == "keep":
            return
        if not self._epoch:
            log.warning(
                "SGLang's cache was reset, so the weights may have changed: from now on this engine shares KV with itself only. "
                "Set kvserver.on_prefix_reset=keep where a reset does not mean new weights (further resets are not logged)"
            )
        self._begin("epoch: private since prefix reset")

    def weights_updated(self) -> None:
        """Also with `keep`, which states that a reset means no new weights."""
        if not self._epoch:
            log.warning("SGLang's weights are updated in place: from now on this engine shares KV with itself only")
        self._begin("epoch: private since new weights")

    def _begin(self, why: str) -> None:
        self._epoch += 1
        self.private = why
