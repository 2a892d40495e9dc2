"""A put had two seconds whatever its size: 84 MB over a connection of 38 MB/s never ended, each was sent in vain, and the breaker opened.

A request has a constant, and the time of its bytes at the least rate worth having. A put that moves keeps that time whatever it waited before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from support.faulty_store import FaultyClient, FaultyStore
from support.l1_memory import PAGE, Ends, L1Memory, name, within

from kvserver.config import parse_tiers
from kvserver.config.tiers import LEAST_BYTES_PER_SECOND
from kvserver.l2 import LaneBuffer, TierOutcome
from kvserver.l2.remote.store import StoreClient, StoreError
from kvserver.l2.remote.tier import RemoteTier

SIZE = 8_400_000
TIMEOUT = 0.2


class SlowClient(FaultyClient):
    def put(self, names: Sequence[str], values: Sequence[memoryview]) -> list[StoreError | None]:
        time.sleep(sum(map(len, values)) / (2 * LEAST_BYTES_PER_SECOND))  # twice its time-out
        return super().put(names, values)


class SlowStore(FaultyStore):
    def connect(self, buffer: LaneBuffer) -> StoreClient:
        return SlowClient(self)


@pytest.mark.parametrize("waits", [False, True])
def test_put_that_still_moves_bytes_at_its_deadline_ends_done(waits: bool) -> None:
    (url,) = parse_tiers([f"s3://b/p?timeout={TIMEOUT * 1000:.0f}ms"])
    l1, store = L1Memory(8192), SlowStore()
    tier = RemoteTier(url, "p", l1.region, PAGE, store.connect, 2)
    ends = Ends(tier)
    try:
        ends.until("ready")
        memory = l1.object(SIZE, whole=True)
        seconds = 2 * TIMEOUT if waits else TIMEOUT
        tickets = [tier.put(name(number), memory, b"", within(seconds)) for number in range(1 + waits)]
        outcomes = [end.outcome for end in ends.all(tickets)]
        assert outcomes[0] is TierOutcome.DONE
        assert outcomes[1:] == [TierOutcome.TIMEOUT] * waits, "the one that still waited at its deadline"
        assert (tier.state, tier.status().breaks) == ("ready", 0)
    finally:
        tier.close(within(5))


def test_slow_get_times_out_at_its_deadline() -> None:
    class Client(FaultyClient):
        def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[memoryview | StoreError | None]:
            time.sleep(1.0)
            return super().get(names, buffers)

    class Store(FaultyStore):
        def connect(self, buffer: LaneBuffer) -> StoreClient:
            return Client(self)

    (url,) = parse_tiers(["s3://b/p"])
    l1, store = L1Memory(8192), Store()
    tier = RemoteTier(url, "p", l1.region, PAGE, store.connect, 2)
    ends = Ends(tier)
    try:
        ends.until("ready")
        memory = l1.object(SIZE, whole=True)
        assert ends.of(tier.put(name(1), memory, b"", within(5))).outcome is TierOutcome.DONE
        began = time.monotonic()
        assert ends.of(tier.get(name(1), memory, within(0.3))).outcome is TierOutcome.TIMEOUT
        assert time.monotonic() - began < 0.9, "a request waits for it"
    finally:
        tier.close(within(5))


def test_the_clients_time_outs_grow_with_what_is_sent() -> None:
    sizes: list[int] = []

    class Store(FaultyStore):
        def connect(self, buffer: LaneBuffer) -> StoreClient:
            sizes.append(buffer.covers)
            return FaultyClient(self)

    (url,) = parse_tiers(["s3://b/p"])
    l1 = L1Memory(8192)
    tier = RemoteTier(url, "p", l1.region, PAGE, Store().connect, 2)
    ends = Ends(tier)
    try:
        ends.until("ready")
        ends.of(tier.put(name(1), l1.object(SIZE, whole=True), b"", within(5)))
        assert max(sizes) >= SIZE
        assert url.seconds_for(SIZE) == url.timeout_seconds + SIZE / LEAST_BYTES_PER_SECOND
    finally:
        tier.close(within(5))
