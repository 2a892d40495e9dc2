"""The what-if curve kept 1,024 salts, of which a namespace with single blocks needs two. Of more than 512 namespaces, of LoRAs for
instance, it forgot the salt that was used longest ago, and with it all chunks of that namespace.
"""

from __future__ import annotations

import pytest

from kvserver.cache import Groups, LookupOutcome
from kvserver.events import ChunksStored, LookupEnded, RequestEnded
from kvserver.protocol import KEY_BYTES, ObjectGroup
from kvserver.telemetry import WhatIfCurve

TOKENS = 256
(GROUP,) = Groups((ObjectGroup("full", (0,), TOKENS),), 1, TOKENS).objects


@pytest.mark.parametrize("tails", [False, True])
def test_curve_finds_prompts_of_1100_namespaces_again(tails: bool) -> None:
    curve = WhatIfCurve(100_000, 4096)
    key, tail = bytes([1]) * KEY_BYTES, {"tail_keys": bytes([2]) * KEY_BYTES, "block_tokens": 16} if tails else {}
    for again in (False, True):
        for number in range(1100):
            namespace, request = number.to_bytes(32, "big"), f"{again}{number}"
            found = LookupOutcome(1, int(again))
            curve.handle(LookupEnded(0, "i", "m", request, TOKENS, key, found, TOKENS, namespace, **tail))
            if not again:
                curve.handle(ChunksStored(0, "i", "m", namespace, key, GROUP, 1))
            curve.handle(RequestEnded(0, "i", "m", request))
    curve.tick()
    assert {one.would_hit_tokens for one in curve.status().sizes} == {1100 * TOKENS}
