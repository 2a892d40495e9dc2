"""Blocks of the daemon's tiers as vLLM's own KV events.

Owns: the form of the events. Refuses to know: which blocks are announced, and when (`common.announcer`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvserver.adapters.vllm.facts import hash_form
from kvserver.protocol import KVBlocks, KVGroup

# L1 is on this machine, a folder of L2 may be on a network. `ownership` is not set: Dynamo 1.6.1 drops each event that has it.
_LOCALITY = {"CPU": "LOCAL"}
_extra_keys_decoder = msgspec.msgpack.Decoder(list[tuple[Any, ...] | None])


class TierEvents:
    """Maker of the events. `groups`: the engine's KV cache groups."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._groups = groups
        self._form = hash_form()

    def stored(self, blocks: KVBlocks, first: int, last: int) -> BlockStored:
        size, tokens = blocks.hash_bytes, blocks.block_tokens
        parent = blocks.hashes[(first - 1) * size : first * size] if first else blocks.parent
        extra_keys = _extra_keys_decoder.decode(blocks.extra_keys)[first:last] if blocks.extra_keys else None
        group = self._groups[blocks.group] if blocks.group < len(self._groups) else KVGroup("")
        return BlockStored(
            block_hashes=self._named(blocks.hashes[first * size : last * size], size),
            parent_block_hash=self._named(parent, size)[0] if parent else None,
            token_ids=array("I", blocks.tokens)[first * tokens : last * tokens].tolist(),
            block_size=tokens,
            lora_id=None,
            medium=blocks.medium,
            lora_name=blocks.lora_name or None,
            extra_keys=extra_keys,
            group_idx=blocks.group,
            kv_cache_spec_kind=group.kind or None,
            kv_cache_spec_sliding_window=group.window,
            locality=_LOCALITY.get(blocks.medium),
        )

    def removed(self, hashes: bytes, hash_bytes: int, medium: str, group: int) -> BlockRemoved:
        names = self._named(hashes, hash_bytes)
        return BlockRemoved(names, medium, group_idx=group, locality=_LOCALITY.get(medium))

    def _named(self, hashes: bytes, hash_bytes: int) -> list[bytes | int]:
        """Hashes in the form of the engine's own events; maybe_convert_block_hash() would look up the form for each."""
        each = [hashes[at : at + hash_bytes] for at in range(0, len(hashes), hash_bytes)]
        return [int.from_bytes(one[-8:], "big") for one in each] if self._form == "int" else [*each]
