"""Variants: what may differ between requests of one registration: weights, LoRA, dtype of embeddings, namer of its images.

vLLM's block hash leaves out what means one thing within one process. The rule: each such thing is here, or in the identity, or
keeps the request from the cache (the table is in adapters/README.md). Where vLLM's own cache may confuse two things, it gives the
KV of one to a later request of the other, whose store would pass it on. So once such a thing was seen, no request that may be
confused with it stores.

Owns: the weights epoch, the dtypes seen, and the text that goes with every key. The text has a durability: whether another start
of the engine, or an engine on another machine, would have the same text. Refuses to know: keys, a LoRA's files (`loras`), and how
the server hashes the text into a namespace.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from kvserver.adapters.vllm.identity import chain_durability, chain_start
from kvserver.adapters.vllm.loras import Loras
from kvserver.protocol import Durability

log = logging.getLogger("vllm.kvserver")


class Variant(NamedTuple):
    text: str
    durability: Durability


class Variants:
    """Variants of one engine's requests.

    - `configured_version` reads the current `kvserver.weights_version`; `incarnation` names this incarnation of the engine.
    - `private` states why the engine shares KV with itself only; empty while it shares with others. If it is set from the start,
      a version that is configured at the start does not change it.
    - `trusts_uuids`: names of multimodal items, which users may choose, mean the same to every engine.
    - `whole_digests`: as in Loras.
    - `embeddings_dtype`: the model's, for prompts of embeddings.
    """

    def __init__(
        self,
        incarnation: str,
        configured_version: Callable[[], str],
        private: str = "",
        *,
        counters: Counter[str] | None = None,
        trusts_uuids: bool = False,
        whole_digests: bool = False,
        hash_algorithm: str = "",
        embeddings_dtype: Any = None,
    ) -> None:
        self.private = private
        self._whole_digests = whole_digests
        self._hash_algorithm = hash_algorithm
        self._counters = counters if counters is not None else Counter()
        self._trusts_uuids = trusts_uuids
        self._incarnation = incarnation
        self._configured_version = configured_version
        self._version_seen = configured_version()
        self._version = "" if private else self._version_seen
        self._epoch = 0
        self._chain = ""
        self._chain_durability = Durability.PROCESS  # known when `_chain` is
        self._loras = Loras(whole_digests, self._counters)
        self._embeddings_dtype = embeddings_dtype
        self._foreign_embeddings = False  # vLLM's own cache may have blocks of another dtype

    def weights_changed(self, since: str) -> None:
        """Begin a private epoch, for the reason `since`, unless a new version was configured since the last change."""
        self._epoch += 1
        version = self._configured_version()
        self._version = version if self.has_new_version else ""
        self._version_seen = version
        self.private = "" if self._version else since

    @property
    def has_new_version(self) -> bool:
        """True if another version is configured than at the last change."""
        return self._configured_version() != self._version_seen

    @property
    def epoch(self) -> str:
        """The text for requests without a LoRA, and the start of all others: a digest, since every copy carries it.

        REQUIRES: the engine core was built.
        """
        if not self._chain:
            self._chain = chain_start(self._incarnation)
            self._chain_durability = chain_durability(self._hash_algorithm)
        parts = [f"chain={self._chain}"]
        if self._version:
            parts.append(f"weights={self._version}")
        elif self.private:
            parts.append(f"epoch={self._incarnation}/{self._epoch}")
        return _digest(" ".join(parts))

    @property
    def durability(self) -> Durability:
        """Durability of `epoch`. REQUIRES: as epoch, which was read."""
        return Durability.PROCESS if self.private else self._chain_durability

    def of(self, request: Any) -> Variant | None:
        """Variant of a request: the text "epoch" or "epoch/lora", and its durability; None if it must run without cache."""
        if self._confuses_embeddings(request):
            return None
        lora = request.lora_request
        private = bool(request.mm_features) and not self._trusts_uuids
        private = private or request.prompt_is_token_ids is not None  # no hash has it, so token 0 may be an embedding
        known = self._loras.of(lora) if lora is not None else None
        if lora is not None and known is None:
            return None
        private = private or (known is not None and known.fingerprint is None)
        epoch = self._own(self.epoch) if private else self.epoch
        durability = Durability.PROCESS if private else self.durability
        if known is None:
            return Variant(epoch, durability)
        if not self._whole_digests:
            durability = min(durability, Durability.MACHINE)
        return Variant(f"{epoch}/{_digest(known.fingerprint or lora.lora_path)}", durability)

    def is_current(self, request: Any, variant: Variant) -> bool:
        """True if `variant` still names what the request computes with.

        A LoRA's files may be replaced, other embeddings may arrive, and a streaming session may gain images.
        """
        plain = request.lora_request is None and request.prompt_embeds is None and not request.mm_features
        return plain or self.of(request) == variant

    def are_files_same(self, request: Any, since: float) -> bool | None:
        """True if no file that the request computes with was replaced until a moment after `since`; None: that is being looked up."""
        lora = request.lora_request
        return True if lora is None else self._loras.are_same_since(lora, since)

    def why_without_cache(self, request: Any) -> str:
        """Reason why the request runs without cache, one of EndRequest's codes; "" if there is none."""
        return "embeddings_dtype" if request.prompt_embeds is not None and self._foreign_embeddings else ""

    def _confuses_embeddings(self, request: Any) -> bool:
        """True if other embeddings may have the hashes of this request's: vLLM hashes raw bytes, and casts them to its dtype later."""
        if request.prompt_embeds is None:
            return False
        if request.prompt_embeds.dtype != self._embeddings_dtype and not self._foreign_embeddings:
            self._foreign_embeddings = True
            log.warning(
                "prompt embeddings of %s, and the model's dtype is %s: prompts of embeddings run without kvserver from now on",
                request.prompt_embeds.dtype,
                self._embeddings_dtype,
            )
        self._counters["foreign_embeddings_requests"] += self._foreign_embeddings
        return self._foreign_embeddings

    def _own(self, epoch: str) -> str:
        """The epoch's text for this incarnation of the engine only."""
        return _digest(f"{epoch} {self._incarnation}")


def _digest(text: str) -> str:
    """120 bits: every message about a copy carries it."""
    return hashlib.blake2b(text.encode(), digest_size=15).hexdigest()
