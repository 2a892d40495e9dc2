"""Events of L1 had no `locality`, while vLLM's own CPU tier states LOCAL. `ownership` is not set: Dynamo 1.6.1 drops each event that
has one."""

from __future__ import annotations

import msgspec
import pytest
from support.kv_feed import describe

from kvserver.kv_events.types import Tier
from kvserver.kv_events.wire import Writer
from kvserver.protocol import KVGroup

GROUPS = ((0, KVGroup("full_attention")),)


@pytest.mark.parametrize(("tier", "locality"), [(Tier.L1, "LOCAL"), (Tier.L2, None)])
def test_maps_of_l1_are_local_and_a_folder_may_be_anywhere(tier: Tier, locality: str | None) -> None:
    writer, chunk = Writer("int", arrays=False), describe("a")
    for raw in (*writer.stored(chunk, tier, GROUPS), *writer.removed(chunk.hashes, 32, tier, GROUPS)):
        event = msgspec.msgpack.decode(raw)
        assert event.get("locality") == locality
        assert "ownership" not in event


def test_arrays_end_with_the_fields_of_vllm_0_25() -> None:
    writer, chunk = Writer("int", arrays=True), describe("a")
    (stored,) = writer.stored(chunk, Tier.L1, GROUPS)
    (removed,) = writer.removed(chunk.hashes, 32, Tier.L1, GROUPS)
    assert [len(msgspec.msgpack.decode(raw)) for raw in (stored, removed)] == [12, 4]
