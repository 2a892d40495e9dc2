"""What the figures must be, worked out slowly: a dict of blocks, a list of owners, a list of all that was observed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvserver.protocol import RESIDENCY_SECONDS

from .lives import HISTOGRAMS


@dataclass
class Life:
    born: int | None
    accessed: int | None
    released: int | None = None
    content: int = 0


@dataclass
class Block:
    life: Life | None = None
    owners: list[str] = field(default_factory=list)


class Model:
    """One instance. Times are ns; an exact engine's owners have no names."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.observed: dict[str, list[int]] = {name: [] for name in HISTOGRAMS}
        self.pools: dict[int, dict[int, Block]] = {}

    # ---- what is compared ---------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        """Counters and gauges that are not 0."""
        blocks = [block for pool in self.pools.values() for block in pool.values()]
        gauges = {
            "active_blocks": sum(bool(block.owners) for block in blocks),
            "released_blocks": sum(block.life is not None and not block.owners for block in blocks),
            "tracked_blocks": sum(block.life is not None or bool(block.owners) for block in blocks),
        }
        return {name: count for name, count in {**self.counts, **gauges}.items() if count}

    def buckets(self, name: str) -> list[int]:
        counts = [0] * (len(RESIDENCY_SECONDS) + 1)
        for ns in self.observed[name]:
            counts[bisect_left(RESIDENCY_SECONDS, ns / 1e9)] += 1
        return counts

    def sum(self, name: str) -> float:
        return sum(self.observed[name]) / 1e9

    # ---- both ways ----------------------------------------------------------------------------

    def _block(self, pool: int, id: int) -> Block:
        return self.pools.setdefault(pool, {}).setdefault(id, Block())

    def _observe(self, name: str, since: int | None, now: int) -> None:
        if since is not None:
            self.observed[name].append(max(0, now - since))

    def _end(self, block: Block, how: str, now: int) -> None:
        life, block.life = block.life, None
        if life is None:
            return
        self.counts[how] += 1
        self._observe("lifetime", life.born, now)
        self._observe("since_last_access", life.accessed, now)
        self._observe("idle_before_evict", now if block.owners else life.released, now)

    def _access(self, block: Block, now: int) -> None:
        if block.life is not None:
            self.counts["shared_accesses" if block.owners else "reuses"] += 1
            self._observe("reuse_gap", block.life.accessed, now)
            block.life.accessed, block.life.released = now, None

    def _leave(self, block: Block, owner: str, now: int) -> None:
        if owner in block.owners:
            block.owners.remove(owner)
            if not block.owners and block.life is not None:
                block.life.released = now

    def lose(self, pool: int | None = None) -> None:
        """Nothing is known any more of that pool, or of all."""
        for number in [pool] if pool is not None else list(self.pools):
            blocks = self.pools.pop(number, {})
            self.counts["lost"] += sum(block.life is not None for block in blocks.values())

    # ---- exact --------------------------------------------------------------------------------

    def record(self, pool: int, operation: str, id: int, now: int) -> None:
        if operation == "cleared":
            for block in self.pools.get(pool, {}).values():
                self.counts["cleared"] += block.life is not None
                block.life = None
        elif id:
            getattr(self, "_" + operation)(self._block(pool, id), now)

    def _allocated(self, block: Block, now: int) -> None:
        self._end(block, "recycled", now)
        block.life, block.owners = Life(now, now), ["?"]
        self.counts["allocations"] += 1

    def _accessed(self, block: Block, now: int) -> None:
        self._access(block, now)
        block.owners.append("?")

    def _released(self, block: Block, now: int) -> None:
        self._leave(block, "?", now)

    def _evicted(self, block: Block, now: int) -> None:
        self._end(block, "evictions", now)

    def _present(self, block: Block, now: int) -> None:
        self.counts["lost"] += block.life is not None
        block.life, block.owners = Life(None, None), []

    def _held(self, block: Block, now: int) -> None:
        block.owners.append("?")

    # ---- reported -----------------------------------------------------------------------------

    def hold(self, owner: str, group: int, ids: Sequence[int], contents: Sequence[int], now: int, state: bool) -> None:
        for at, id in enumerate(ids):
            content = contents[at] * 1000 + group if at < len(contents) and contents[at] else 0
            if id:
                self._hold(self._block(0, id), owner, content, now, state)

    def _hold(self, block: Block, owner: str, content: int, now: int, state: bool) -> None:
        life = block.life
        if life is not None and owner in block.owners and not (life.content and content):
            life.content = life.content or content
        elif life is not None and content and life.content == content:
            if owner not in block.owners:
                if not state:
                    self._access(block, now)
                life.released = None
                block.owners.append(owner)
        else:
            self._end(block, "evictions" if life is not None and life.content else "recycled", now)
            since = None if state else now
            block.life, block.owners = Life(since, since, content=content), [owner]
            self.counts["allocations"] += not state

    def release(self, owner: str, ids: Sequence[int], now: int) -> None:
        for id in ids:
            if id:
                self._leave(self._block(0, id), owner, now)

    def end_request(self, owner: str, now: int) -> None:
        for block in self.pools.get(0, {}).values():
            self._leave(block, owner, now)
