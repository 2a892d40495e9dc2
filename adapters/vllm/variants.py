"""What may differ between requests of one registration: weights and LoRA.

Owns: the weights epoch, the LoRAs seen, and the text that goes with every key. Refuses to know: keys,
and how the server hashes the text into a namespace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from kvserver.adapters.vllm.identity import chain_start, lora_fingerprint


class Variants:
    """`configured_version` reads `kvserver.weights_version` as it is now; `life` names this life of the engine.

    `private` says why the engine shares KV with itself only; empty while others may read and write it too. It may be
    given from the start, which also a version that is configured already does not change.
    """

    def __init__(self, life: str, configured_version: Callable[[], str], private: str = "") -> None:
        self.private = private
        self._life = life
        self._configured_version = configured_version
        self._version_seen = configured_version()
        self._version = "" if private else self._version_seen
        self._epoch = 0
        self._chain = ""
        self._loras: dict[tuple[int, str, str], str] = {}

    def weights_changed(self, since: str) -> None:
        """To a private epoch, because of `since`, unless the configured version was set anew since the last change."""
        self._epoch += 1
        version = self._configured_version()
        self._version = version if version != self._version_seen else ""
        self._version_seen = version
        self.private = "" if self._version else since

    @property
    def epoch(self) -> str:
        """The text for requests without a LoRA, and the start of all others: a digest, since every copy carries it.

        REQUIRES: the engine core was built.
        """
        if not self._chain:
            self._chain = chain_start(self._life)
        parts = [f"chain={self._chain}"]
        if self._version:
            parts.append(f"weights={self._version}")
        elif self.private:
            parts.append(f"epoch={self._life}/{self._epoch}")
        return _digest(" ".join(parts))

    def of(self, lora: Any) -> str:
        """The text for requests with this LoRA (or None): "epoch" or "epoch/lora"."""
        return f"{self.epoch}/{_digest(self._lora(lora))}" if lora is not None else self.epoch

    def _lora(self, lora: Any) -> str:
        """The files as they were when the engine first used them, or reloaded them in place."""
        known = (lora.lora_int_id, lora.lora_name, lora.lora_path)
        if known not in self._loras or getattr(lora, "load_inplace", False):
            self._loras[known] = lora_fingerprint(lora)
        return self._loras[known]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
