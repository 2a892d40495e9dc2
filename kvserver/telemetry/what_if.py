"""Effect of more memory: the tokens that lookups would have found in an L1 of other sizes.

**It models L1's policy**, lru or slru; any other policy as LRU. LRU is exact but for the differences below. The order in which
slru demoted chunks is known within a few hundredths of the cache.

Differences from L1:
- L1 does not evict chunks that requests lease.
- Single blocks of tails are as old as their store; in L1 they are as old as the chunk before them. They count where a size's hit
  ends at L1's own.
- Chunks of a namespace that was cleared still count as used after older ones, until they are older themselves.
- A store is no use of its chunks that were resident already.
- Events that the bus dropped are missing (`kvserver_events_dropped_total`).

Of hybrid models a chunk's objects age together, as in L1. A size that stores a chunk again has the windows and states that an
engine would keep for it, where L1 or another size has them, too. Where older chunks are sampled, those that are not in the sample
count as having them.

Owns: what is known of namespaces and of instances' groups, and the lookups whose request has not ended. Refuses to know: the
order of chunks (`csrc/tables/what_if.h`), what L1 has. Runs in the bus's thread; any thread may call `status()`.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvserver._native import HitRules, WhatIf, WhatIfHits
from kvserver.events import (
    ChunksEvicted,
    ChunksStored,
    Event,
    InstanceDisconnected,
    L1Cleared,
    LookupEnded,
    NamespaceFormed,
    RequestEnded,
    Subscriber,
)
from kvserver.protocol import ObjectGroup
from kvserver.protocol.status import WhatIfEngine, WhatIfSize, WhatIfStatus

SIZES = (0.25, 0.5, 1, 2, 4, 8)  # times L1
_MOST_NAMESPACES = 1024
_MOST_SALTS = 1 << 15  # without its salt all that is listed of a namespace is unknown
_MOST_OPEN = 1024  # requests whose keys are kept until they end
_MOST_OPEN_BYTES = 1 << 19
_MOST_CHUNKS = 1 << 32
_MOST_KINDS = 8  # of engines; further ones count as unnamed
_ONE_GROUP = HitRules(1, 1, [])
_LRU = "lru"
_PROTECTS = {_LRU: False, "slru": True}  # the policies that the table knows


class _Open(NamedTuple):
    """A lookup whose request has not ended: L1 uses what was found when its lease ends."""

    salt: int
    keys: bytes
    rules: HitRules
    hits: WhatIfHits
    found: int
    pages: int


class WhatIfCurve(Subscriber):
    name = "what_if"
    handles = frozenset(
        {LookupEnded, ChunksStored, RequestEnded, ChunksEvicted, L1Cleared, NamespaceFormed, InstanceDisconnected}
    )

    def __init__(self, l1_pages: int, page_bytes: int, policy: str = _LRU, boundary_interval: int = 0) -> None:
        self._page_bytes = page_bytes
        self._pages = [int(size * l1_pages) for size in SIZES]
        self._policy = policy if policy in _PROTECTS else _LRU
        self._table = WhatIf(secrets.randbits(64), self._pages, _PROTECTS[self._policy])
        self._boundary_interval = boundary_interval
        self._rules: dict[str, HitRules] = {}  # by instance; of others one full group
        # By namespace, and -1 - group of single blocks: pages of an object, all ranks together.
        self._objects: OrderedDict[bytes, dict[int, int]] = OrderedDict()
        self._open: OrderedDict[tuple[str, str], _Open] = OrderedDict()  # by instance and request
        self._open_bytes = 0
        # By namespace, and whether of single blocks: a cleared namespace has new ones.
        self._salts: OrderedDict[tuple[bytes, bool], int] = OrderedDict()
        self._looked_up_tokens = 0
        self._kinds: dict[str, str] = {}  # by instance
        self._by_kind: dict[str, tuple[int, list[float]]] = {}  # tokens looked up, and found by size
        self._shown = WhatIfStatus()

    def handle(self, event: Event) -> None:
        match event:
            case LookupEnded():
                before = self._table.hit_tokens()
                self._looked_up(event)
                self._count_kind(event, before)
            case ChunksStored():
                self._stored(event)
            case RequestEnded():
                self._request_ended((event.instance_id, event.request_id))
            case ChunksEvicted() if event.group is not None and event.group.number >= 0:
                number = event.group.number
                pages = self._objects.get(event.namespace, {}).get(number, 0)
                self._table.remove(self._salt(event.namespace, False), event.keys, 1 << number, pages)
            case L1Cleared():
                self._cleared(event.namespace)
            case NamespaceFormed():
                spec = event.ranks[0]
                self._kinds[event.instance_id] = spec.engine_names[0]
                self._rules[event.instance_id] = rules_of(
                    spec.object_groups, spec.chunk_tokens, self._boundary_interval
                )
            case InstanceDisconnected():
                self._rules.pop(event.instance_id, None)
                self._kinds.pop(event.instance_id, None)
                for owner in [owner for owner in self._open if owner[0] == event.instance_id]:
                    self._request_ended(owner)

    def tick(self) -> None:
        """Once a second, in the bus's thread: what status() reads of the table. No other thread touches the table."""
        self._shown = WhatIfStatus(
            listed_chunks=len(self._table),
            sample_rate=self._table.sample_rate,
            memory_bytes=self._table.memory_bytes,
        )

    def status(self) -> WhatIfStatus:
        return replace(
            self._shown,
            policy=self._policy,
            looked_up_tokens=self._looked_up_tokens,
            sizes=self._sizes(self._table.hit_tokens()),
            engines=[
                WhatIfEngine(engine=kind, looked_up_tokens=tokens, sizes=self._sizes(hits))
                for kind, (tokens, hits) in sorted(self._by_kind.copy().items())
            ],
        )

    # ---- inside -------------------------------------------------------------------------------

    def _sizes(self, hit_tokens: Sequence[float]) -> list[WhatIfSize]:
        sizes = [
            WhatIfSize(size=f"{size:g}", size_bytes=pages * self._page_bytes, would_hit_tokens=round(tokens))
            for size, pages, tokens in zip(SIZES, self._pages, hit_tokens, strict=False)
        ]
        return [*sizes, WhatIfSize(size="unlimited", would_hit_tokens=round(hit_tokens[-1]))]

    def _count_kind(self, event: LookupEnded, before: list[float]) -> None:
        after, kind = self._table.hit_tokens(), self._kinds.get(event.instance_id, "")
        if kind not in self._by_kind and len(self._by_kind) >= _MOST_KINDS:
            kind = ""
        tokens, hits = self._by_kind.get(kind, (0, [0.0] * len(after)))
        found = [had + now - was for had, now, was in zip(hits, after, before, strict=True)]
        self._by_kind[kind] = tokens + event.tokens, found

    def _looked_up(self, event: LookupEnded) -> None:
        outcome, namespace = event.outcome, event.namespace
        if namespace:
            objects = self._objects.get(namespace, {})
            pages = sum([pages for number, pages in objects.items() if number >= 0])
            rules, salt = self._rules.get(event.instance_id, _ONE_GROUP), self._salt(namespace, False)
            owner = event.instance_id, event.request_id
            if owner in self._open:
                self._request_ended(owner)
            hits = self._table.lookup(salt, event.keys, rules, event.chunk_tokens)
            self._open[owner] = _Open(salt, event.keys, rules, hits, outcome.hit_chunks, pages)
            self._open_bytes += len(event.keys)
            if event.tail_keys:
                self._tail_looked_up(event, hits, sum(pages for number, pages in objects.items() if number < 0))
            while self._open_bytes > _MOST_OPEN_BYTES or len(self._open) > _MOST_OPEN:
                self._request_ended(next(iter(self._open)))
        self._looked_up_tokens += event.tokens

    def _tail_looked_up(self, event: LookupEnded, behind: WhatIfHits, pages: int) -> None:
        salt, keys, outcome = self._salt(event.namespace, True), event.tail_keys, event.outcome
        hits = self._table.lookup_tail(salt, keys, _ONE_GROUP, event.block_tokens, behind, outcome.hit_chunks)
        self._table.use(salt, keys, _ONE_GROUP, hits, outcome.tail_blocks, pages)

    def _request_ended(self, owner: tuple[str, str]) -> None:
        lookup = self._open.pop(owner, None)
        if lookup is not None:
            self._open_bytes -= len(lookup.keys)
            self._table.use(*lookup)

    def _stored(self, event: ChunksStored) -> None:
        if not event.pages:
            return
        objects = self._objects.setdefault(event.namespace, {})
        objects[event.group.number] = event.pages
        self._objects.move_to_end(event.namespace)
        if len(self._objects) > _MOST_NAMESPACES:
            self._objects.popitem(last=False)
        salt = self._salt(event.namespace, event.group.number < 0)
        rules = self._rules.get(event.instance_id, _ONE_GROUP)
        self._table.add(salt, event.keys, rules, 1 << event.group.place, event.pages)

    def _salt(self, namespace: bytes, tails: bool) -> int:
        salt = self._salts.get((namespace, tails))
        if salt is None:
            salt = self._salts[namespace, tails] = secrets.randbits(64)
        self._salts.move_to_end((namespace, tails))
        if len(self._salts) > _MOST_SALTS:
            self._salts.popitem(last=False)
        return salt

    def _cleared(self, prefix: bytes) -> None:
        for namespace, tails in [key for key in self._salts if key[0].startswith(prefix)]:
            del self._salts[namespace, tails]
        if not prefix:
            self._table.clear()


def rules_of(groups: Sequence[ObjectGroup], chunk_tokens: int, boundary_interval: int) -> HitRules:
    full, others, far = 0, [], _MOST_CHUNKS
    for number, group in enumerate(groups):
        if group.kind == "full":
            full |= 1 << number
        elif group.kind == "local":
            others.append((1 << number, 0, group.tokens))
        else:
            others.append((1 << number, far - group.first_needed(far, chunk_tokens), 0))
    return HitRules(full, chunk_tokens, others, interval=boundary_interval // chunk_tokens)
