"""Contents of stored chunks, as in vLLM's own KV events: hashes of all blocks, token ids, extra keys.

Cost on the scheduler's thread: 3 us for a chunk of 256 tokens, 13 us where hashes cover more than tokens.

Owns: the making of ChunkContents. Refuses to know: which chunks are stored, and who uses their contents.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.core import kv_cache_utils

from kvserver.adapters.vllm.chunks import Chunks
from kvserver.protocol import MOST_EXTRA_KEY_BYTES, ChunkContents

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvserver")

_HASH_BYTES = range(8, 33)
_LONGEST_NAME = 512  # as the protocol has it
_MOST_EXTRA_KEYS = 1 << 20  # bytes in one message
_as_published = getattr(
    kv_cache_utils, "to_event_extra_keys", lambda keys: keys
)  # before 0.31 what is hashed is published
_encoder = msgspec.msgpack.Encoder()


class CannotDescribe(Exception):
    """Chunks that no KV event can name. They are stored all the same."""


class Contents:
    def __init__(self, chunks: Chunks, counters: Counter[str]) -> None:
        self._chunks = chunks
        self._counters = counters

    def of(self, request: Request, first: int, last: int) -> ChunkContents | None:
        """The contents of chunks [first, last). None, counted, if they have no description or a message cannot carry it."""
        return self._of(request, first, last, self._chunks.tokens)

    def of_blocks(self, request: Request, first: int, last: int) -> ChunkContents | None:
        """The same of single blocks."""
        return self._of(request, first, last, self._chunks.block_tokens)

    def _of(self, request: Request, first: int, last: int, tokens: int) -> ChunkContents | None:
        try:
            parts = tokens // self._chunks.described_tokens
            return self._describe(request, first * parts, last * parts)
        except Exception as error:
            self._counters["undescribed_chunks"] += last - first
            if self._counters["undescribed_chunks"] == last - first:
                log.warning("no KV event names some chunks, since their contents cannot be described: %r", error)
            return None

    def _describe(self, request: Any, first: int, last: int) -> ChunkContents:
        """The contents of parts [first, last): blocks, or what they have in common where groups' blocks differ."""
        block_tokens = self._chunks.described_tokens
        if request.prompt_embeds is not None:
            raise CannotDescribe("a prompt of embeddings has no token ids")
        hashes = self._chunks.block_hashes(request, first, last)
        lora_name = request.lora_request.lora_name if request.lora_request is not None else ""
        if len(hashes[0]) not in _HASH_BYTES or len(lora_name) > _LONGEST_NAME:
            raise CannotDescribe(f"hashes of {len(hashes[0])} bytes, LoRA {lora_name[:50]!r}")
        tokens = array("I", request.all_token_ids[first * block_tokens : last * block_tokens])
        return ChunkContents(
            hash_bytes=len(hashes[0]),
            hashes=b"".join(hashes),
            tokens=tokens.tobytes(),
            parent=b"".join(self._chunks.block_hashes(request, max(0, first - 1), first)),
            lora_name=lora_name,
            extra_keys=self._extra_keys(request, first, last),
        )

    def _extra_keys(self, request: Any, first: int, last: int) -> bytes:
        """Extra keys of the blocks: all that their hashes cover besides tokens."""
        if not (request.lora_request or request.mm_features or request.cache_salt):
            return b""
        block_tokens = self._chunks.described_tokens
        found: list[Any] = []
        item = 0  # of the multimodal ones
        for start in range(first * block_tokens, last * block_tokens, block_tokens):
            keys, item = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + block_tokens, item)
            found.append(keys)
        if not any(found):
            return b""
        raw = _encoder.encode(_as_published(found))
        if len(raw) > min((last - first) * MOST_EXTRA_KEY_BYTES, _MOST_EXTRA_KEYS):
            raise CannotDescribe(f"extra keys of {len(raw)} bytes")
        return raw
