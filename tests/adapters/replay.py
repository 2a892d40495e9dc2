"""An obvious model of block records, and a real vLLM block pool at random work to compare it with."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvserver.adapters.common.notices import Records
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.protocol import (
    MARK,
    RECORD_ACCESSED,
    RECORD_ALLOCATED,
    RECORD_CLEARED,
    RECORD_EVICTED,
    RECORD_OPERATION_SHIFT,
    RECORD_OWNED,
    RECORD_PRESENT,
    RECORD_RELEASED,
    ExactRecords,
    ReportBlockAllocations,
)

BLOCK = 16


def unpack(records: bytes) -> list[tuple[int, int]]:
    """(operation, block id) of each."""
    numbers = array("I")
    numbers.frombytes(records)
    return [(n >> RECORD_OPERATION_SHIFT, n & ((1 << RECORD_OPERATION_SHIFT) - 1)) for n in numbers]


def timed(records: bytes, marks: bytes) -> Iterator[tuple[int, int, int]]:
    """(time, operation, block id) of each; the marks must be as the protocol specifies."""
    when = list(MARK.iter_unpack(marks))
    numbers, times = [mark[0] for mark in when], [mark[1] for mark in when]
    assert numbers[:1] == [0] * bool(records or marks)
    assert numbers == sorted(set(numbers)), "two marks of one record"
    assert max(numbers, default=0) < max(1, len(records) // 4), "a mark beyond the records"
    assert times == sorted(times)
    for number, (operation, block) in enumerate(unpack(records)):
        while len(when) > 1 and when[1][0] <= number:
            when.pop(0)
        yield when[0][1], operation, block


class Replay:
    """What follows from records: who owns blocks, and which blocks have, or may have, content that a record has reported."""

    def __init__(self) -> None:
        self.owners: Counter[int] = Counter()
        self.live: set[int] = set()

    def apply(self, records: bytes) -> Replay:
        for operation, block in unpack(records):
            match operation:
                case _ if operation == RECORD_ALLOCATED:
                    assert not self.owners[block], f"block {block} was allocated while it had an owner"
                    self.owners[block] = 1
                    self.live.add(block)
                case _ if operation in (RECORD_ACCESSED, RECORD_OWNED):
                    assert block in self.live
                    self.owners[block] += 1
                case _ if operation == RECORD_RELEASED:
                    assert self.owners[block], f"block {block} was released without an owner"
                    self.owners[block] -= 1
                case _ if operation == RECORD_EVICTED:
                    assert block in self.live
                    self.live.discard(block)
                case _ if operation == RECORD_CLEARED:
                    assert not +self.owners
                    self.live.clear()
                case _ if operation == RECORD_PRESENT:
                    assert block not in self.live
                    self.live.add(block)
        return self

    def apply_reports(self, reports: Iterable[ReportBlockAllocations]) -> Replay:
        for report in reports:
            assert isinstance(report.payload, ExactRecords)
            if report.payload.full:
                self.owners.clear()
                self.live.clear()
            assert all(timed(report.payload.records, report.payload.marks))
            self.apply(report.payload.records)
        return self

    def agrees_with(self, pool: BlockPool, pinned: Set[int] = frozenset()) -> bool:
        """Owners alike; a live block that is free in the pool contains what it was allocated for, but uncached."""
        free = {b.block_id for b in pool.free_block_queue.get_all_free_blocks()}
        assert {b.block_id for b in pool.blocks[1:]} - free == pinned | set(+self.owners)
        assert all(b.ref_cnt == self.owners[b.block_id] for b in pool.blocks[1:] if b.block_id not in pinned)
        cached = {b.block_id for b in pool.blocks[1:] if b.block_hash is not None}
        assert cached <= self.live, "a block that can be found was reported as removed"
        return True


class Churn:
    """A pool at work: requests that share prefixes allocate, share, cache and free its blocks."""

    def __init__(self, blocks: int = 40, clock: Any = None, caching: bool = True) -> None:
        init_none_hash(sha256)
        self.pool = BlockPool(blocks, caching, BLOCK)
        self.hook = PoolHook(*([clock] if clock else []))
        self.hook.install(self.pool)
        self.running: list[list[Any]] = []  # the blocks of each request that runs
        self.pins: list[list[int]] = []
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._names = 0

    def request(self, family: int, length: int) -> Request:
        self._names += 1
        tokens = [3 + (family * 97 + i * i) % 900 for i in range(length * BLOCK)]
        return Request(f"r{self._names}", tokens, SamplingParams(max_tokens=1), None, block_hasher=self._hasher)

    def begin(self, family: int, length: int, cached: int | None = None) -> list[Any] | None:
        """A request of so many blocks, the first `cached` of which can be found later. None: no room."""
        request = self.request(family, length)
        hits: list[Any] = []
        for block_hash in request.block_hashes:
            found = self.pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            hits += found
        fresh = length - len(hits)
        if fresh > self.pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in hits):
            return None
        self.pool.touch(hits)
        blocks = hits + self.pool.get_new_blocks(fresh)
        full = max(len(hits), length if cached is None else cached)
        if self.pool.enable_caching:
            self.pool.cache_full_blocks(request, blocks, len(hits), full, BLOCK, 0)
        self.running.append(blocks)
        return blocks

    def end(self, blocks: list[Any]) -> None:
        self.running.remove(blocks)
        self.pool.free_blocks(iter(reversed(blocks)))

    def act(self, dice: random.Random) -> None:
        """One thing that may happen."""
        choice = dice.random()
        if choice < 0.45:
            length = dice.randint(1, 8)
            self.begin(dice.randrange(4), length, dice.choice([None, length // 2]))
        elif choice < 0.80 and self.running:
            self.end(dice.choice(self.running))
            self.pool.free_blocks([])
        elif choice < 0.85:
            self.pool.evict_blocks({dice.randrange(1, len(self.pool.blocks)) for _ in range(3)})
        elif choice < 0.92 and self.running:
            self.pins.append([b.block_id for b in dice.choice(self.running)])
            self.hook.pin(self.pins[-1])
        elif choice < 0.97 and self.pins:
            self.hook.unpin(self.pins.pop())
        elif choice > 0.985:
            while self.running:
                self.end(self.running[-1])
            while self.pins:
                self.hook.unpin(self.pins.pop())
            assert self.pool.reset_prefix_cache()

    def agrees(self, replay: Replay) -> bool:
        pinned = {block for pin in self.pins for block in pin}
        assert self.hook.kept == pinned - {block.block_id for blocks in self.running for block in blocks}
        return replay.agrees_with(self.pool, pinned)

    def drain_records(self) -> Records:
        return self.hook.drain_records()
