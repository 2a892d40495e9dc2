"""Small traces, and what a plain LRU finds of them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence


def lines_of(prompts: Sequence[Sequence[int]], milliseconds: int = 100, block_tokens: int = 512) -> list[bytes]:
    """The lines of a trace with these prompts, one every so many milliseconds."""
    return [
        json.dumps(
            {
                "timestamp": number * milliseconds,
                "input_length": len(ids) * block_tokens,
                "output_length": 1,
                "hash_ids": list(ids),
            }
        ).encode()
        + b"\n"
        for number, ids in enumerate(prompts)
    ]


def plain_lru_hits(prompts: Sequence[Sequence[int]], blocks: int) -> int:
    """Blocks found as unbroken prefixes by an LRU of `blocks` blocks (0: unlimited) that stores each prompt whole.

    Of a prompt the first blocks that fit are stored, and become younger than all others, the prompt's first block the youngest.
    """
    resident: OrderedDict[int, None] = OrderedDict()  # the oldest first
    hits = 0
    for ids in prompts:
        found = next((number for number, id in enumerate(ids) if id not in resident), len(ids))
        hits += found
        kept = max(found, min(blocks or len(ids), len(ids)))
        for id in reversed(ids[:kept]):
            resident.pop(id, None)
            resident[id] = None
        while blocks and len(resident) > blocks:
            resident.popitem(last=False)
    return hits
