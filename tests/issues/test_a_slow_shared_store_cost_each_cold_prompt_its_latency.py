"""Each prompt waited for the shared store's answer, also where the store had had nothing for any prompt: 0.6 to 1.8 s of a store that
answers in 600 ms, for prompts that an engine computes in a tenth of that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from support.daemon import wait_until
from support.faulty_store import FaultyClient, FaultyStore
from support.l1_memory import within
from support.server import L1_BYTES, PAGE_BYTES, Running, running_server
from support.worker import Worker, make_keys

from kvserver._native import CpuDevice, HostRegion
from kvserver.config import parse_tiers
from kvserver.copy import Devices
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.store import StoreError
from kvserver.l2.remote.tier import RemoteTier
from kvserver.protocol import LookupReply
from kvserver.tiering import ConfiguredTier
from kvserver.tiering.probes import MOST_BESIDE

SLOW_SECONDS, CHUNKS = 0.03, 8
TO_LEARN = MOST_BESIDE + 4  # prompts: all but the first three are probed for beside


class SlowStore(FaultyStore):
    """A store that states after so many seconds which objects it has."""

    seconds = 0.0

    def connect(self, buffer: LaneBuffer) -> FaultyClient:
        return SlowClient(self)


class SlowClient(FaultyClient):
    def __init__(self, store: SlowStore) -> None:
        super().__init__(store)
        self._seconds = lambda: store.seconds

    def exist(self, names: Sequence[str]) -> list[bool | StoreError]:
        time.sleep(self._seconds())
        return super().exist(names)


class Machine(NamedTuple):
    running: Running
    tier: RemoteTier
    worker: Worker

    def fill(self, keys: list[bytes]) -> int:
        """The hit's chunks."""
        self.worker.ask(self.worker.lookup_message(keys), LookupReply)
        found = self.worker.fill(keys, wait_ms=5000)
        self.worker.end_request()
        return found

    def learn(self, store: SlowStore) -> None:
        """Probe in vain."""
        store.seconds = SLOW_SECONDS
        for _ in range(TO_LEARN):
            assert self.fill(make_keys(CHUNKS)) == 0
            self.idle()

    def assert_no_wait(self, store: SlowStore) -> None:
        """A prompt is answered while the store hangs, before the probe's deadline ends its ticket."""
        store.hang(True)
        assert self.fill(make_keys(CHUNKS)) == 0
        assert self.open_tickets() == 1
        store.hang(False)
        self.idle()

    def open_tickets(self) -> int:
        return self.running.call(lambda: self.running.parts.storage.tiers.open_tickets)

    def idle(self) -> None:
        wait_until(lambda: not self.open_tickets())


@contextlib.contextmanager
def machine(store: FaultyStore) -> Iterator[Machine]:
    (url,) = parse_tiers(["s3://bucket/prefix"])
    region = HostRegion(8 * L1_BYTES)
    tier = RemoteTier(url, "prefix", region, PAGE_BYTES, store.connect, 3)
    devices = Devices(CpuDevice(region, PAGE_BYTES, 1))
    try:
        with (
            running_server(devices, 8 * L1_BYTES, tiers=[ConfiguredTier(tier, url)]) as running,
            contextlib.closing(Worker(running.endpoint)) as worker,
        ):
            wait_until(lambda: tier.state == "ready")
            yield Machine(running, tier, worker)
    finally:
        tier.close(within(5))


def stored_by_another(store: FaultyStore) -> list[bytes]:
    keys = make_keys(CHUNKS)
    with machine(store) as other:
        other.worker.store(keys, other.worker.blocks_for(CHUNKS))
        wait_until(lambda: len(store.values) >= CHUNKS)
        other.idle()
    return keys


def test_no_prompt_waits_for_a_slow_store_that_has_had_nothing() -> None:
    store = SlowStore()
    with machine(store) as here:
        here.learn(store)
        here.assert_no_wait(store)


def test_answers_from_memory_do_not_make_a_slow_store_fast() -> None:
    store = SlowStore()
    with machine(store) as here:
        here.learn(store)
        keys = make_keys(CHUNKS)
        for _ in range(4):
            assert here.fill(keys) == 0
            here.idle()
        here.assert_no_wait(store)


def test_a_probe_beside_the_prefill_serves_the_next_request() -> None:
    store = SlowStore()
    keys = stored_by_another(store)
    with machine(store) as here:
        here.learn(store)
        assert here.fill(keys) == 0
        here.idle()
        assert here.fill(keys) == CHUNKS


def test_probes_beside_prefills_have_a_bound_while_the_store_hangs() -> None:
    store = SlowStore()
    with machine(store) as here:
        here.learn(store)
        store.hang(True)
        for _ in range(MOST_BESIDE + 4):
            assert here.fill(make_keys(CHUNKS)) == 0
        assert here.open_tickets() == MOST_BESIDE
        store.hang(False)
        here.idle()


def test_a_fast_store_that_has_had_nothing_is_waited_for() -> None:
    store = SlowStore()
    keys = stored_by_another(store)
    with machine(store) as here:
        here.learn(store)
        store.seconds = 0.0
        for _ in range(3):
            assert here.fill(make_keys(CHUNKS)) == 0
            here.idle()
        assert here.fill(keys) == CHUNKS


def test_a_slow_store_that_has_what_prompts_need_is_waited_for() -> None:
    store = SlowStore()
    first, then = stored_by_another(store), stored_by_another(store)
    store.seconds = SLOW_SECONDS
    with machine(store) as here:
        for _ in range(2):
            assert here.fill(make_keys(CHUNKS)) == 0
        assert here.fill(first) == CHUNKS
        assert here.fill(then) == CHUNKS
