"""Chunks of a request that are stored, by object group.

A hit ends at a boundary, the end of a chunk. Full attention needs all chunks before it, so all are stored. A window needs only
the last ones, a state only the one at the boundary. They are stored for the boundaries at which later requests are likely to
continue.

Owns: the rule of kept boundaries. Refuses to know: requests, block ids, the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvserver.protocol import ObjectGroup

_FAR = 1 << 30  # a boundary with a whole window before it


@dataclass(slots=True)
class Boundaries:
    """Kept boundaries of one request, as numbers of chunks: the ends of its prompt, the junction, multiples of `interval`.

    While the request generates, each boundary is kept until the request has passed the next one.
    """

    prompt: tuple[int, int]  # the end of the prompt for a request that goes on from it, and for one that repeats it
    junction: int = 0  # where full attention's chunks of earlier requests ended
    interval: int = 0  # 0: none
    generated: int = 0  # the last boundary behind the prompt; 0: none yet

    def kept(self, first: int, end: int) -> Iterable[int]:
        """Kept boundaries in [first, end), without those of the generated tokens."""
        multiples = range(-(-first // self.interval) * self.interval, end, self.interval) if self.interval else ()
        return sorted({at for at in (*self.prompt, self.junction, *multiples) if max(1, first) <= at < end})

    def next_kept(self, chunks: int, known: int) -> int:
        """The first kept boundary behind `chunks`. Behind the prompt, the last of the `known` ones: all are computed at once."""
        return next(iter(self.kept(chunks + 1, max(self.prompt) + 1)), max(chunks + 1, known))

    def wanted(self, group: ObjectGroup, first: int, end: int, chunk_tokens: int) -> list[int]:
        """The chunks of [first, end), which a step has completed, whose objects a kept boundary needs."""
        if group.kind == "full":
            return list(range(first, end))
        kept = [*self.kept(first + 1, self._last_that_needs(group, end, chunk_tokens)), *self._behind_prompt(end)]
        needed = {chunk for at in kept for chunk in range(group.first_needed(at, chunk_tokens), at)}
        return sorted(chunk for chunk in needed if first <= chunk < end)

    def superseded(self, group: ObjectGroup, end: int, chunk_tokens: int) -> list[int]:
        """The chunks whose objects only the last boundary behind the prompt needed, once boundary `end` has passed too."""
        if group.kind == "full" or not self.generated or end <= self.generated:
            return []
        before = range(group.first_needed(self.generated, chunk_tokens), self.generated)
        kept = [*self.kept(1, self._last_that_needs(group, self.generated, chunk_tokens)), end]
        needed = {chunk for at in kept for chunk in range(group.first_needed(at, chunk_tokens), at)}
        return [chunk for chunk in before if chunk not in needed]

    def passed(self, end: int) -> None:
        """The chunks up to `end` are complete, and planned."""
        for at in self._behind_prompt(end):
            self.generated = at

    def _behind_prompt(self, end: int) -> Sequence[int]:
        return (end,) if end > max(self.prompt) else ()

    def _last_that_needs(self, group: ObjectGroup, end: int, chunk_tokens: int) -> int:
        """Behind each boundary that may need a chunk before `end`."""
        if group.kind == "local":
            return end + group.tokens // chunk_tokens + 1
        return end + _FAR - group.first_needed(_FAR, chunk_tokens)
