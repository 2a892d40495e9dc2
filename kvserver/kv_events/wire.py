"""Encodes KV events as vLLM 0.32 does (vllm/distributed/kv_events.py), for consumers of vLLM's events.

The form "signed" is SGLang 0.5.23's, whose maps have the same names: its integers, and its names of media.

An event is a msgpack map, or an array with the tag first as until vLLM 0.25. A batch is an array in both formats.
Maps have no field that vLLM has not: vllm-router 0.1.17 drops a batch with one.

`locality` of L1 is LOCAL; a folder of L2 may be on a network, so its events state none. `ownership` is never set:
Dynamo 1.6.1 drops each event that has it.

Owns: the structs, the numbers of KV cache groups, and the form of hashes. Refuses to know: sequences, topics, subscribers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from kvserver.kv_events.types import Description, Members, Tier
from kvserver.protocol import KVGroup

Form = Literal[
    "bytes", "int", "hex", "signed"
]  # of a hash: whole; the last 8 bytes as an unsigned big-endian integer; whole, in hexadecimal for JSON; the integer signed, of SGLang's
Groups: TypeAlias = tuple[
    tuple[int, KVGroup], ...
]  # the engine's KV cache groups, with the number that events give each
_MAIN_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
_SGLANG_MEDIA = {Tier.L1: "CPU_PINNED", Tier.L2: "DISK"}
_EXTRA_KEYS = msgspec.msgpack.Decoder(list[list[Any] | None])
_encoder = msgspec.msgpack.Encoder()


class _Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    block_hashes: list[Any]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class BlockStored(_Stored):
    locality: str | None = None
    session_id: str | None = None


class BlockRemoved(_Removed):
    locality: str | None = None


# As vLLM 0.25 has them: consumers count their fields.
class _StoredArray(_Stored, array_like=True):
    pass


class _RemovedArray(_Removed, array_like=True):
    pass


class _ClearedArray(AllBlocksCleared, array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int


def stored_events(
    chunk: Description,
    tier: Tier,
    groups: Groups,
    form: Form,
    kind: type[_Stored] = BlockStored,
) -> Iterator[_Stored]:
    """One event for each KV cache group that has the blocks."""
    hashes = _hashes(chunk.hashes, chunk.hash_bytes, form)
    (parent,) = _hashes(chunk.parent, chunk.hash_bytes, form) or [None]
    tokens = memoryview(chunk.tokens).cast("I").tolist()
    extra_keys = _extra_keys(chunk)
    for index, group in numbered(groups, chunk.members):
        yield kind(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=tokens,
            block_size=chunk.block_tokens,
            lora_id=None,
            medium=_medium(tier, form),
            lora_name=chunk.lora_name or None,
            extra_keys=extra_keys,
            group_idx=index,
            kv_cache_spec_kind=group.kind if group is not None else None,
            kv_cache_spec_sliding_window=group.window if group is not None else None,
            **_locality(kind, tier),
            **({"session_id": chunk.session_id} if chunk.session_id and kind is BlockStored else {}),
        )


class Writer:
    """Encoder of one stream's events, with its form of hashes, as maps or arrays."""

    def __init__(self, form: Form, arrays: bool) -> None:
        self._form = form
        self._stored: type[_Stored] = _StoredArray if arrays else BlockStored
        self._removed: type[_Removed] = _RemovedArray if arrays else BlockRemoved
        self.cleared = _encoder.encode(_ClearedArray() if arrays else AllBlocksCleared())

    def stored(self, chunk: Description, tier: Tier, groups: Groups) -> list[bytes]:
        return [_encoder.encode(event) for event in stored_events(chunk, tier, groups, self._form, self._stored)]

    def removed(self, hashes: bytes, hash_bytes: int, tier: Tier, groups: Groups, members: Members = ()) -> list[bytes]:
        named = _hashes(hashes, hash_bytes, self._form)
        kind, locality, medium = self._removed, _locality(self._removed, tier), _medium(tier, self._form)
        return [_encoder.encode(kind(named, medium, index, **locality)) for index, _ in numbered(groups, members)]


def batch(time: float, events: list[bytes], rank: int) -> bytes:
    return _encoder.encode(_Batch(time, [msgspec.Raw(event) for event in events], rank))


def full_attention_first(groups: tuple[KVGroup, ...]) -> Groups:
    """Groups numbered from 0, those of full attention first.

    vllm-router 0.1.17 reads group 0 alone. Dynamo 1.6.1 takes a removal in a group 0 that it does not know for one of
    full attention.
    """
    order = sorted(range(len(groups)), key=lambda index: groups[index].kind not in _MAIN_KINDS)
    return tuple((order.index(index), group) for index, group in enumerate(groups))


def numbered(groups: Groups, members: Members) -> Sequence[tuple[int | None, KVGroup | None]]:
    """The KV cache groups `members` and what is known of each; all `groups` if there are no members."""
    if members:
        return [groups[index] if index < len(groups) else (index, None) for index in members]
    return groups or [(None, None)]


def _medium(tier: Tier, form: Form) -> str:
    return _SGLANG_MEDIA[tier] if form == "signed" else tier.value


def _locality(kind: type[msgspec.Struct], tier: Tier) -> dict[str, str]:
    return {"locality": "LOCAL"} if tier is Tier.L1 and "locality" in kind.__struct_fields__ else {}


def _hashes(packed: bytes, hash_bytes: int, form: Form) -> list[Any]:
    whole = [packed[at : at + hash_bytes] for at in range(0, len(packed), hash_bytes)]
    if form in ("int", "signed"):
        return [int.from_bytes(name[-8:], "big", signed=form == "signed") for name in whole]
    return [name.hex() for name in whole] if form == "hex" else whole


def _extra_keys(chunk: Description) -> list[Any] | None:
    """Extra keys of the blocks; None if there are none, or if one is invalid: neither a plain value nor a list of them."""
    if not chunk.extra_keys:
        return None
    try:
        found = _EXTRA_KEYS.decode(chunk.extra_keys)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    keys = [key for block in found for key in block or ()]
    values = [value for key in keys for value in (key if isinstance(key, list) else [key])]
    plain = all(isinstance(value, str | int | float | bytes | None) for value in values)
    return found if plain and len(found) == chunk.blocks else None
