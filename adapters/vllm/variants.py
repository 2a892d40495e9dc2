"""What may differ between requests of one registration: weights, LoRA, the dtype of embeddings, and who named its images.

The rule: what vLLM's block hash leaves out because it means one thing within one process is here, or in the identity, or keeps the
request from the cache (the table is in adapters/README.md). What vLLM's own cache may take for another, it also hands to a later request,
whose store would give it on: once such a thing was seen, no request that it can be taken for stores.

Owns: the weights epoch, the LoRAs and dtypes seen, and the text that goes with every key, with its durability: whether another start of an
engine would have the same text, and whether one on another machine would. Refuses to know: keys,
and how the server hashes the text into a namespace.

A LoRA is the files that its name and path had at its first request. vLLM reads them again when it had evicted
the LoRA, or on request, but keeps its own blocks and their hashes: once the files were replaced it is unknown which of
them a block was computed with, and requests with that name and path run without cache. New files at a new path are a new LoRA; before
vLLM 0.31, whose hashes have the name only, under a new name.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from kvserver.adapters.common.weights import NoWeights, stamps_of
from kvserver.adapters.vllm.identity import chain_durability, chain_start, lora_fingerprint
from kvserver.adapters.vllm.support import vllm_version

from kvserver.protocol import Durability

log = logging.getLogger("vllm.kvserver")

_HASHES_PATHS = (0, 31)  # vLLM's block hashes have a LoRA's path beside its name from then on


class Variant(NamedTuple):
    text: str
    durability: Durability


@dataclass(slots=True)
class _Lora:
    stamps: object  # of its files at its first request
    fingerprint: str | None = None  # None: not known, so it is shared with no other engine
    is_read: bool = False


class Variants:
    """`configured_version` reads the current `kvserver.weights_version`; `incarnation` names this incarnation of the engine.

    `private` states why the engine shares KV with itself only; empty while it shares with others. If it is set from the
    start, a version that is configured at the start does not change it.
    `trusts_uuids`: names of multimodal items, which may be the users', mean the same to every engine. `whole_digests`: the
    fingerprint of a LoRA covers every byte of its files, which a thread of its own reads: a second for each gigabyte is too long for
    the scheduler's. Until then the LoRA's requests run without cache. `embeddings_dtype`: the model's, of prompts of embeddings.
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
        self._loras: dict[tuple[str, str], _Lora] = {}  # by name and path, as vLLM's block hashes have them
        self._replaced: set[tuple[str, str]] = set()
        self._embeddings_dtype = embeddings_dtype
        self._foreign_embeddings = False  # vLLM's own cache may have blocks of another dtype
        self._unread: SimpleQueue[tuple[_Lora, Any]] = SimpleQueue()
        self._reader: threading.Thread | None = None

    def weights_changed(self, since: str) -> None:
        """Begin a private epoch, for the reason `since`, unless a new version was configured since the last change."""
        self._epoch += 1
        version = self._configured_version()
        self._version = version if self.has_new_version else ""
        self._version_seen = version
        self.private = "" if self._version else since

    @property
    def has_new_version(self) -> bool:
        """Whether another version is configured than at the last change."""
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

    def of(self, request: Any) -> Variant | None:
        """For a request: the text "epoch" or "epoch/lora", and its durability; None if it must run without cache."""
        if self._confuses_embeddings(request):
            return None
        lora = request.lora_request
        private = bool(request.mm_features) and not self._trusts_uuids
        private = private or request.prompt_is_token_ids is not None  # no hash has it, so token 0 may be an embedding
        known = self._lora(lora) if lora is not None else None
        if lora is not None and known is None:
            return None
        private = private or (known is not None and known.fingerprint is None)
        epoch = self._own(self.epoch) if private else self.epoch
        durability = Durability.PROCESS if private or self.private else self._chain_durability
        if known is None:
            return Variant(epoch, durability)
        if not self._whole_digests:
            durability = min(durability, Durability.MACHINE)
        return Variant(f"{epoch}/{_digest(known.fingerprint or lora.lora_path)}", durability)

    def is_current(self, request: Any, variant: Variant) -> bool:
        """Whether `variant` still names what the request computes with: a LoRA's files may be replaced, other embeddings may arrive, and a
        streaming session may gain images.
        """
        plain = request.lora_request is None and request.prompt_embeds is None and not request.mm_features
        return plain or self.of(request) == variant

    def why_without_cache(self, request: Any) -> str:
        """One of EndRequest's codes, or "" if it has none."""
        return "embeddings_dtype" if request.prompt_embeds is not None and self._foreign_embeddings else ""

    def _confuses_embeddings(self, request: Any) -> bool:
        """Whether other embeddings may have the hashes of this request's: vLLM hashes raw bytes, and casts them to its dtype later."""
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

    def _lora(self, lora: Any) -> _Lora | None:
        """None if its files are not read yet, or are not those of its first request."""
        files = stamps_of(Path(lora.lora_path).expanduser())
        hashed = vllm_version() >= _HASHES_PATHS
        name = (lora.lora_name, lora.lora_path if hashed else "")
        stamps = (lora.lora_path, files)
        known = self._loras.get(name)
        if known is None:
            known = self._loras[name] = _Lora(stamps)
            if self._whole_digests and files:
                self._read_later(known, lora)
            else:
                self._read(known, lora)
        if known.stamps == stamps:
            return known if known.is_read else None
        self._counters["replaced_lora_requests"] += 1
        if name not in self._replaced:
            self._replaced.add(name)
            log.warning(
                "the files of LoRA %r were replaced: its requests run without kvserver; give new files a new %s",
                lora.lora_name,
                "path" if hashed else "name",
            )
        return None

    def _read_later(self, known: _Lora, lora: Any) -> None:
        self._unread.put((known, lora))
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_all, name="kvserver-loras", daemon=True)
            self._reader.start()

    def _read_all(self) -> None:
        while True:
            self._read(*self._unread.get())

    def _read(self, known: _Lora, lora: Any) -> None:
        try:
            known.fingerprint = lora_fingerprint(lora, self._whole_digests)
        except (NoWeights, OSError) as error:
            log.debug("LoRA %r", lora.lora_name, exc_info=error)
        except Exception:  # a bug, which must not end the thread
            log.exception("kvserver: a fault while LoRA %r was read", lora.lora_name)
        if known.fingerprint is None:
            log.warning("kvserver: KV with LoRA %r is shared with no other engine: no files to read", lora.lora_name)
        known.is_read = True


def _digest(text: str) -> str:
    """120 bits: every message about a copy carries it."""
    return hashlib.blake2b(text.encode(), digest_size=15).hexdigest()
