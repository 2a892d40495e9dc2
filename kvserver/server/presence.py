"""How far a hit would go if L1 had what the tiers of L2 hold, and which objects it lacks for that.

Owns: that search. Refuses to know: how objects are brought (`fills`). In memory only; nothing here changes state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvserver.cache import Cache, Chunk, Groups
from kvserver.protocol import KEY_BYTES, ObjectGroup
from kvserver.server.instances import Instance
from kvserver.server.tiers import Tiers


@dataclass(frozen=True, slots=True)
class MissingObjects:
    """Objects of one group that L1 lacks. `places`: of their keys, ascending."""

    group: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Attainable:
    """A hit at boundary `chunks` of the keys, once L1 has `missing`: windows and states first, then what all hits need."""

    chunks: int
    missing: tuple[MissingObjects, ...]


class Presence:
    """REQUIRES: the loop's thread uses it."""

    def __init__(self, cache: Cache, tiers: Tiers) -> None:
        self._cache = cache
        self._tiers = tiers

    def attainable(
        self, instance: Instance, namespace: bytes, keys: bytes, hit_chunks: int, most: int | None = None
    ) -> Attainable | None:
        """The greatest hit at boundary `most` or before that a fill would give; None unless it is beyond `hit_chunks`."""
        if not self._tiers.all or not instance.coverages or instance.private:
            return None
        worker = instance.any_worker()
        specs = worker.spec.object_groups
        first = 0 if len(specs) > 1 else hit_chunks  # of one group, L1 has all before the hit
        in_l2 = [self._present(namespace, group, keys[first * KEY_BYTES :]) << first for group in range(len(specs))]
        if not any(in_l2):
            return None
        resident = self._cache.index.find_chunks(namespace, keys)
        found = hit_with(worker.layout, specs, worker.spec.chunk_tokens, resident, in_l2, most)
        return found if found.chunks > hit_chunks else None

    def with_l2(self, instance: Instance, namespace: bytes, keys: bytes, hit_chunks: int) -> tuple[int, int]:
        """The chunks that a hit would have with what L2 is known to have, and the most that it could have.

        The most is all chunks where other daemons write to a tier: what they wrote is not known without asking.
        """
        found = self.attainable(instance, namespace, keys, hit_chunks)
        known = found.chunks if found is not None else hit_chunks
        unknown = self._tiers.shared and instance.coverages and not instance.private
        return known, len(keys) // KEY_BYTES if unknown else known

    def _present(self, namespace: bytes, group: int, keys: bytes) -> int:
        bits = 0
        for each in self._tiers.present(namespace, group, keys):
            bits |= each
        return bits


@dataclass(slots=True)
class _Ready:
    ready: int


def hit_with(
    layout: Groups,
    specs: Sequence[ObjectGroup],
    chunk_tokens: int,
    resident: Sequence[Chunk | None],
    in_l2: Sequence[int],
    most: int | None = None,
) -> Attainable:
    """The greatest hit at boundary `most` or before. `resident`: what L1 has of each key; `in_l2`: by group, a bit for each key
    whose object a tier holds."""
    end = len(resident) if most is None else most
    found: list[_Ready | None] = []
    for place in range(end):
        chunk = resident[place]
        ready = chunk.ready if chunk is not None else 0
        for group, bits in enumerate(in_l2):
            ready |= (bits >> place & 1) << group
        if ready & layout.full != layout.full:
            break
        found.append(_Ready(ready))
    boundary = layout.boundary(found)
    missing = []
    order = sorted(range(len(specs)), key=lambda group: specs[group].kind == "full")
    for group in order:
        first = specs[group].first_needed(boundary, chunk_tokens)
        lacks = tuple(place for place in range(first, boundary) if not _has(resident[place], group))
        if lacks:
            missing.append(MissingObjects(group, lacks))
    return Attainable(boundary, tuple(missing))


def _has(chunk: Chunk | None, group: int) -> bool:
    return chunk is not None and bool(chunk.ready >> group & 1)


def keys_of(keys: bytes, places: Sequence[int]) -> bytes:
    return b"".join([keys[place * KEY_BYTES : (place + 1) * KEY_BYTES] for place in places])
