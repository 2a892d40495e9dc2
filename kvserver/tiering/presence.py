"""Presence: how far a hit would go with the objects of L2's tiers, which of them L1 lacks, and whether they are worth reading.

In memory only; nothing here changes state.

Owns: that search, and the comparison of reading with computing. Refuses to know: how objects are brought (`fills`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvserver.cache import Cache, Chunk, Groups
from kvserver.engines import Instance
from kvserver.l2 import Coverage
from kvserver.protocol import KEY_BYTES, Durability, ObjectGroup
from kvserver.tiering.rates import ReadRates, TierReads
from kvserver.tiering.tiers import Tiers


@dataclass(frozen=True, slots=True)
class MissingObjects:
    """Objects of one group that L1 lacks. `places`: indexes of their keys, ascending."""

    group: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Attainable:
    """A hit at boundary `chunks` of the keys, once L1 has `missing`: windows and states first, then what all hits need."""

    chunks: int
    missing: tuple[MissingObjects, ...]
    reads: tuple[TierReads, ...] = ()  # by tier: each object is read from the first one that has it


@dataclass(frozen=True, slots=True)
class InL2:
    """Chunks that a hit would have with L2: `known` by what is known of L2, and the `most` for which a fill is worth its time."""

    known: int
    most: int
    slow: bool = False  # the engine computes the tokens sooner


class Presence:
    """Search over L1 and the tiers. REQUIRES: the loop's thread uses it."""

    def __init__(self, cache: Cache, tiers: Tiers, rates: ReadRates) -> None:
        self._cache = cache
        self._tiers = tiers
        self._rates = rates

    def attainable(
        self,
        instance: Instance,
        namespace: bytes,
        keys: bytes,
        hit_chunks: int,
        durability: Durability,
        most: int | None = None,
    ) -> Attainable | None:
        """The greatest hit at boundary `most` or before that a fill would give; None unless it is beyond `hit_chunks`.

        `durability`: of the variant, as Instance.durability() has it.
        """
        if not self._tiers.all or durability is Durability.PROCESS:
            return None
        worker = instance.any_worker()
        specs = worker.spec.object_groups
        first = 0 if len(specs) > 1 else hit_chunks  # of one group, L1 has all before the hit
        wanted = keys[first * KEY_BYTES :]
        by_tier = [
            [bits << first for bits in self._tiers.present(namespace, group, wanted, durability)]
            for group in range(len(specs))
        ]
        in_l2 = [_union(bits) for bits in by_tier]
        if not any(in_l2):
            return None
        resident = self._cache.index.find_chunks(namespace, keys)
        found = hit_with(worker.layout, specs, worker.spec.chunk_tokens, resident, in_l2, most)
        if found.chunks <= hit_chunks:
            return None
        return replace(found, reads=_reads_of(found, by_tier, instance.coverages))

    def with_l2(
        self, instance: Instance, namespace: bytes, keys: bytes, hit_chunks: int, of_variant: Durability
    ) -> InL2:
        """Chunks that a fill could add to the hit.

        Where other daemons write to a tier, what they wrote is not known without asking: all chunks could be there.
        """
        durability = instance.durability(of_variant)
        found = self.attainable(instance, namespace, keys, hit_chunks, durability)
        known = most = found.chunks if found is not None else hit_chunks
        reads = list(found.reads) if found is not None else [TierReads(0, 0)] * len(self._tiers)
        unknown = self._tiers.unknown_to(durability) if durability is not Durability.PROCESS else []
        if unknown:
            most = len(keys) // KEY_BYTES
            size = sum(each.bytes for each in instance.coverages[:1] if each is not None)
            objects, bytes = reads[unknown[0]]
            reads[unknown[0]] = TierReads(objects + most - known, bytes + (most - known) * size)
        if most > hit_chunks and self.is_slow(instance, most - hit_chunks, reads):
            return InL2(known, hit_chunks, slow=True)
        return InL2(known, most)

    def is_slow(self, instance: Instance, chunks: int, reads: Sequence[TierReads]) -> bool:
        """True if the engine is expected to compute the chunks before they are read; False if either time is not known."""
        speed, seconds = instance.expected_speed, self._rates.expected_seconds(reads)
        return (
            bool(speed) and seconds is not None and chunks * instance.any_worker().spec.chunk_tokens < seconds * speed
        )


def _union(bits_of_tiers: Sequence[int]) -> int:
    bits = 0
    for each in bits_of_tiers:
        bits |= each
    return bits


def _reads_of(
    found: Attainable, by_tier: Sequence[Sequence[int]], coverages: Sequence[Coverage | None]
) -> tuple[TierReads, ...]:
    """`by_tier`: by group, for each tier a bit for each key whose object it holds."""
    objects, sizes = [0] * len(by_tier[0]), [0] * len(by_tier[0])
    for missing in found.missing:
        coverage = coverages[missing.group]
        assert coverage is not None, "a tier holds objects of groups with a coverage only"
        left = sum([1 << place for place in missing.places])
        for tier, bits in enumerate(by_tier[missing.group]):
            here = (left & bits).bit_count()
            left &= ~bits
            objects[tier] += here
            sizes[tier] += here * coverage.bytes
    return tuple(map(TierReads, objects, sizes))


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


def most_within(
    bound: int, found: Attainable, specs: Sequence[ObjectGroup], coverages: Sequence[Coverage | None]
) -> int:
    """The leading chunks of `found` that can be read within `bound` bytes beside its windows and states: fewer than it has.

    REQUIRES: it reads more than that.
    """
    sizes: Counter[int] = Counter()  # of what all hits need, by place
    for missing in found.missing:
        coverage = coverages[missing.group]
        assert coverage is not None, "a tier holds objects of groups with a coverage only"
        if specs[missing.group].kind == "full":
            for place in missing.places:
                sizes[place] += coverage.bytes
        else:
            bound -= coverage.bytes * len(missing.places)
    if not sizes:
        return found.chunks // 2  # not one by one: each try looks at all chunks
    for place in sorted(sizes):
        bound -= sizes[place]
        if bound < 0:
            return place
    return found.chunks - 1


def _has(chunk: Chunk | None, group: int) -> bool:
    return chunk is not None and bool(chunk.ready >> group & 1)


def keys_of(keys: bytes, places: Sequence[int]) -> bytes:
    return b"".join([keys[place * KEY_BYTES : (place + 1) * KEY_BYTES] for place in places])
