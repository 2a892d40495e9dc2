"""Waits of lookups for stores: one engine stores a prompt, and another one wants it before the store has ended.

The stores of a prompt end in any order, and each by its own deadline. So a request waits while an object that its hit lacks is
being filled, and no longer than its engine's own limit. What is in L2 has been read before that.

A store may also not have arrived yet: an engine answers a request before it sends the request's last store. The answer then is a
hand-over (`Lookup.handed_over`). What it promises must arrive within half of the request's limit, so that the other half is left
for the copy. The wait ends sooner if a promised store fails, or if the engine that promised it disconnects. A client can make a
hand-over up: it costs the client's own request that wait, and others one of MOST_PROMISED places.

Owns: the requests that wait, and which object each waits for. Refuses to know: stores and fills (an object's state shows both),
leases and replies (`lookups`), L2 (`tiering`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvserver.cache import Cache, Chunk, tails_of
from kvserver.engines import Instances
from kvserver.protocol import KEY_BYTES, Lookup

MOST_WAITS = 1024  # further requests do not wait
MOST_PROMISED = 512  # of these, for stores that have not arrived

Owner = tuple[str, str]  # (instance id, request id)


@dataclass(slots=True)
class _Wait:
    lookup: Lookup
    namespace: bytes
    place: int  # of the first chunk or block that was not seen whole
    due_ns: int
    promised: int = 0  # chunks and blocks before this place may be stored by an engine that has not begun
    promised_until_ns: int = 0
    then: Callable[[], None] = lambda: None
    seen_filling: int = -1  # a place


@dataclass(slots=True)
class StoreWaits:
    """Waits for stores. REQUIRES: the loop's thread uses it."""

    cache: Cache
    instances: Instances
    clock: Callable[[], float] = time.monotonic
    _waits: dict[Owner, _Wait] = field(default_factory=dict)

    def coming_chunks(self, namespace: bytes, lookup: Lookup, hit_chunks: int, tail_blocks: int) -> int:
        """Chunks that the hit could have once stores have ended. One more than it has stands for blocks of its tail."""
        chunks = len(lookup.keys) // KEY_BYTES
        now_ns = int(self.clock() * 1e9)
        wait = self._wait(namespace, lookup, hit_chunks + (tail_blocks if hit_chunks == chunks else 0), now_ns + 10**9)
        if not self._is_coming(wait):
            return hit_chunks
        coming = max(wait.place + 1, wait.promised)
        while coming < chunks and self._object(wait, coming) is not None:
            coming += 1
        return max(hit_chunks + 1, min(coming, chunks))

    def begin(self, namespace: bytes, lookup: Lookup, due_ns: int, then: Callable[[], None]) -> bool:
        """Call `then` once no store brings what the hit lacks, or at `due_ns`. False, and no call, if there is none now."""
        owner = (lookup.instance_id, lookup.request_id)
        self.end(owner)  # the request asks anew: what was found before may have left L1
        wait = self._wait(namespace, lookup, self.cache.leading(namespace, lookup.keys), due_ns)
        wait.then = then
        if len(self._waits) >= MOST_WAITS or not self._is_coming(wait):
            self._count(wait)
            return False
        self._waits[owner] = wait
        if (instance := self.instances.by_id.get(lookup.instance_id)) is not None:
            instance.counts.store_waits += 1
        return True

    def end(self, owner: Owner) -> None:
        """The request waits no longer, and is answered."""
        if (wait := self._waits.pop(owner, None)) is not None:
            wait.then()

    def step(self) -> None:
        """Go on with requests whose wait is over, at the end of a turn. An object is looked at once in a turn for each wait."""
        now_ns = int(self.clock() * 1e9)
        for owner, wait in list(self._waits.items()):
            if not self._is_coming(wait) or wait.due_ns <= now_ns:
                del self._waits[owner]
                self._count(wait)
                wait.then()

    @property
    def next_due_ns(self) -> int | None:
        """Time at which the next wait may end by itself; None without waits."""
        waits = self._waits.values()
        return min((min(wait.due_ns, wait.promised_until_ns or wait.due_ns) for wait in waits), default=None)

    def _wait(self, namespace: bytes, lookup: Lookup, place: int, due_ns: int) -> _Wait:
        wait, by = _Wait(lookup, namespace, place, due_ns), self.instances.by_id.get(lookup.instance_id)
        if lookup.handed_over is None or by is None:
            return wait
        chunk_tokens = by.any_worker().spec.chunk_tokens
        of_chunks, of_blocks = self._promised(lookup, chunk_tokens)
        wait.promised = of_chunks // chunk_tokens + of_blocks * lookup.chunk_blocks // chunk_tokens
        if sum(other.promised_until_ns > 0 for other in self._waits.values()) < MOST_PROMISED:
            wait.promised_until_ns = (int(self.clock() * 1e9) + due_ns) // 2
        return wait

    def promised_tokens(self, lookup: Lookup, chunk_tokens: int) -> int:
        """Tokens of the lookup's chunks and blocks that its hand-over promises."""
        return sum(self._promised(lookup, chunk_tokens)) if lookup.handed_over is not None else 0

    def _promised(self, lookup: Lookup, chunk_tokens: int) -> tuple[int, int]:
        """Tokens of whole chunks, and of whole blocks behind the last chunk, which stay on their machine."""
        assert lookup.handed_over is not None
        tokens, chunks = lookup.handed_over.tokens, len(lookup.keys) // KEY_BYTES
        if tokens < chunks * chunk_tokens:
            return tokens // chunk_tokens * chunk_tokens, 0
        if lookup.handed_over.instance_id not in self.instances.by_id:
            return chunks * chunk_tokens, 0
        block_tokens = chunk_tokens // lookup.chunk_blocks
        blocks = min(len(lookup.tail_keys) // KEY_BYTES, (tokens - chunks * chunk_tokens) // block_tokens)
        return chunks * chunk_tokens, blocks * block_tokens

    def _is_coming(self, wait: _Wait) -> bool:
        """True while what the hit lacks is being filled, or was promised and has not arrived."""
        if not self._is_promised(wait):
            wait.promised_until_ns = 0
        while (chunk := self._object(wait, wait.place)) is not None:
            groups = chunk.namespace.groups
            if _is_filling(chunk):
                wait.seen_filling = wait.place
                return True
            needed = (1 << len(groups.masks)) - 1 if wait.place == wait.promised - 1 else groups.full
            if chunk.ready & needed != needed:
                break
            wait.place += 1
        failed = chunk is None and wait.place == wait.seen_filling
        if failed or wait.place >= wait.promised:
            wait.promised_until_ns = 0
        return wait.promised_until_ns > 0

    def _is_promised(self, wait: _Wait) -> bool:
        """True while the engine that made the promise may still keep it."""
        made, until_ns = wait.lookup.handed_over, wait.promised_until_ns
        return made is not None and until_ns > int(self.clock() * 1e9) and made.instance_id in self.instances.by_id

    def _count(self, wait: _Wait) -> None:
        """Count a hand-over that brought less than it promised."""
        instance = self.instances.by_id.get(wait.lookup.instance_id)
        if wait.place >= wait.promised or instance is None:
            return
        chunk = self._object(wait, wait.place)
        if chunk is not None and _is_filling(chunk):
            instance.counts.late_handovers += 1
        else:
            instance.counts.lost_handovers += 1

    def _object(self, wait: _Wait, place: int) -> Chunk | None:
        """The chunk of this number, or the block of the tail behind the last chunk."""
        chunks = len(wait.lookup.keys) // KEY_BYTES
        of_chunks = place < chunks
        keys, id = (
            (wait.lookup.keys, wait.namespace) if of_chunks else (wait.lookup.tail_keys, tails_of(wait.namespace))
        )
        first = (place if of_chunks else place - chunks) * KEY_BYTES
        key = keys[first : first + KEY_BYTES]
        return self.cache.index.find_chunks(id, key)[0] if key else None


def _is_filling(chunk: Chunk) -> bool:
    return any(chunk.is_filling(group) for group in range(len(chunk.namespace.groups.masks)))
