"""Prompts whose images, videos or sounds arrive without their embeddings.

From vLLM 0.30 on the engine of a role that loads accepts them: a client need not send what the prefill engine has computed with.
Their KV can only be loaded. Where it is not found, vLLM's worker raises, and the engine ends. A cache may miss at any time. So such
a request ends with an error, and the engine goes on, unless all those items lie in the tokens that vLLM has or will load.

Owns: which items lack their embeddings. Refuses to know: where KV is found. A connector beside this one, or one for embeddings, may
have what is missing; vLLM then decides.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm.multimodal.parse import MultiModalDataParser

from kvserver.adapters.vllm.nesting import requests_in_error

log = logging.getLogger("vllm.kvserver")

REFUSED = "missing_embeddings_requests"


class MissingEmbeddings:
    """`alone`: no other connector may bring KV."""

    def __init__(self, vllm_config: Any, alone: bool) -> None:
        self._accepted = alone and _accepts(vllm_config)
        self.counters: Counter[str] = Counter()

    def lacking(self, request: Any, tokens: int = 0) -> bool:
        """True if the request cannot be computed from the prompt's first `tokens` tokens."""
        return self._accepted and any(_lacks(each) for each in request.mm_features if _end(each) > tokens)

    def refuses(self, request: Any, tokens: int) -> bool:
        """True if the request is lacking behind `tokens`: vLLM ends it with an error, and must not place it.

        REQUIRES: called by vLLM's scheduler, for a request that waits.
        """
        if not self.lacking(request, tokens) or (errors := requests_in_error()) is None:
            return False
        request.skip_reading_prefix_cache = False  # with it vLLM 0.32 places the request whatever is answered
        self.counters[REFUSED] += request.request_id not in errors  # it may be asked about once more before its end
        errors.add(request.request_id)
        if self.counters[REFUSED] == 1:
            log.warning(
                "request %s ends with an error: its multimodal items came without embeddings, and their KV was not found. A prompt "
                "with its images or embeddings is computed. Further ones are only counted",
                request.request_id,
            )
        return True


def _accepts(vllm_config: Any) -> bool:
    """True if the engine takes items without embeddings, and no other connector brings these."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    embeddings = getattr(vllm_config, "ec_transfer_config", None)
    arrive = embeddings is not None and embeddings.is_ec_consumer
    return not arrive and getattr(multimodal, "allow_missing_mm_embeddings", False)


def _end(item: Any) -> int:
    return int(item.mm_position.offset + item.mm_position.length)


def _lacks(item: Any) -> bool:
    """True if the item has nothing but what states its size: of that nothing goes to the device."""
    if not item.data:
        return False  # vLLM's workers have it
    sizes = {name for parser in _parsers(MultiModalDataParser) for name in _sizes(parser, item.modality)}
    return all(name in sizes or getattr(part.field, "keep_on_cpu", False) for name, part in item.data.items())


def _sizes(parser: Any, modality: str) -> Iterator[str]:
    fields = getattr(parser, "embedding_fields", {}).get(modality, {})
    return (name for name, role in fields.items() if role == "metadata")


def _parsers(parser: Any) -> Iterator[Any]:
    """Parsers of the models that are loaded."""
    yield parser
    for each in parser.__subclasses__():
        yield from _parsers(each)
