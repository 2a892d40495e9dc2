"""What the metrics must be, worked out slowly: a dict of blocks, a list of owners, a list of all that was observed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvserver.protocol import RESIDENCY_SECONDS

from .block_lifetimes import HISTOGRAMS


@dataclass
class Lifetime:
    born: int | None
    accessed: int | None
    released: int | None = None
    content: int = 0


@dataclass
class Block:
    lifetime: Lifetime | None = None
    owners: list[str] = field(default_factory=list)


class Model:
    """One instance. Times are ns; an exact engine's owners have no names."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.observed: dict[str, list[int]] = {name: [] for name in HISTOGRAMS}
        self.pools: dict[int, dict[int, Block]] = {}

    # ---- what is compared ---------------------------------------------------------------------

    def metrics(self) -> dict[str, int]:
        """Counters and gauges that are not 0."""
        blocks = [block for pool in self.pools.values() for block in pool.values()]
        gauges = {
            "active_blocks": sum(bool(block.owners) for block in blocks),
            "released_blocks": sum(block.lifetime is not None and not block.owners for block in blocks),
            "tracked_blocks": sum(block.lifetime is not None or bool(block.owners) for block in blocks),
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
        lifetime, block.lifetime = block.lifetime, None
        if lifetime is None:
            return
        self.counts[how] += 1
        self._observe("lifetime", lifetime.born, now)
        self._observe("since_last_access", lifetime.accessed, now)
        self._observe("idle_before_evict", now if block.owners else lifetime.released, now)

    def _access(self, block: Block, now: int) -> None:
        if block.lifetime is not None:
            self.counts["shared_accesses" if block.owners else "reuses"] += 1
            self._observe("reuse_gap", block.lifetime.accessed, now)
            block.lifetime.accessed, block.lifetime.released = now, None

    def _leave(self, block: Block, owner: str, now: int) -> None:
        if owner in block.owners:
            block.owners.remove(owner)
            if not block.owners and block.lifetime is not None:
                block.lifetime.released = now

    def lose(self, pool: int | None = None) -> None:
        """Nothing is known any more of that pool, or of all."""
        for number in [pool] if pool is not None else list(self.pools):
            blocks = self.pools.pop(number, {})
            self.counts["lost"] += sum(block.lifetime is not None for block in blocks.values())

    # ---- exact --------------------------------------------------------------------------------

    def record(self, pool: int, operation: str, id: int, now: int) -> None:
        if operation == "cleared":
            for block in self.pools.get(pool, {}).values():
                self.counts["cleared"] += block.lifetime is not None
                block.lifetime = None
        elif id:
            getattr(self, "_" + operation)(self._block(pool, id), now)

    def _allocated(self, block: Block, now: int) -> None:
        self._end(block, "recycled", now)
        block.lifetime, block.owners = Lifetime(now, now), ["?"]
        self.counts["allocations"] += 1

    def _accessed(self, block: Block, now: int) -> None:
        self._access(block, now)
        block.owners.append("?")

    def _released(self, block: Block, now: int) -> None:
        self._leave(block, "?", now)

    def _evicted(self, block: Block, now: int) -> None:
        self._end(block, "evictions", now)

    def _present(self, block: Block, now: int) -> None:
        self.counts["lost"] += block.lifetime is not None
        block.lifetime, block.owners = Lifetime(None, None), []

    def _owned(self, block: Block, now: int) -> None:
        block.owners.append("?")

    # ---- reported -----------------------------------------------------------------------------

    def hold(self, owner: str, group: int, ids: Sequence[int], contents: Sequence[int], now: int, state: bool) -> None:
        for at, id in enumerate(ids):
            content = contents[at] * 1000 + group if at < len(contents) and contents[at] else 0
            if id:
                self._hold(self._block(0, id), owner, content, now, state)

    def _hold(self, block: Block, owner: str, content: int, now: int, state: bool) -> None:
        lifetime = block.lifetime
        if lifetime is not None and owner in block.owners and not (lifetime.content and content):
            lifetime.content = lifetime.content or content
        elif lifetime is not None and content and lifetime.content == content:
            if owner not in block.owners:
                if not state:
                    self._access(block, now)
                lifetime.released = None
                block.owners.append(owner)
        else:
            self._end(block, "evictions" if lifetime is not None and lifetime.content else "recycled", now)
            since = None if state else now
            block.lifetime, block.owners = Lifetime(since, since, content=content), [owner]
            self.counts["allocations"] += not state

    def release(self, owner: str, ids: Sequence[int], now: int) -> None:
        for id in ids:
            if id:
                self._leave(self._block(0, id), owner, now)

    def end_request(self, owner: str, now: int) -> None:
        for block in self.pools.get(0, {}).values():
            self._leave(block, owner, now)
