"""Search for the end of a chain of objects, in few round trips.

Owns: which places to look at next. Refuses to know: what a place is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def chain_length(
    count: int, most_questions: int, exist: Callable[[Sequence[int]], Sequence[bool]], first_alone: bool = False
) -> int:
    """Number of leading places that exist, if those before one that exists do too; else less or more.

    A chain that fits into one round trip is looked at as a whole, so the answer is then exact. Of a longer one the places 0, 1,
    3, 7, ... and the last come first. Then come evenly distributed ones between the last that exists and the first that is
    missing.

    `first_alone`: the first place has a round trip of its own before these, so a chain that does not begin costs one question.
    """
    low, high = 0, count  # places below low exist; high is missing, or the end
    if first_alone and count > 1:
        if not exist([0])[0]:
            return 0
        low = 1
    places: Sequence[int] = (_galloping(count) if count > most_questions else range(count))[low:]
    while low < high:
        answers = exist(places)
        for place, there in zip(places, answers, strict=True):
            if not there:
                high = place
                break
            low = place + 1
        places = _evenly(low, high, most_questions)
    return low


def _galloping(count: int) -> list[int]:
    places = [(1 << step) - 1 for step in range(count.bit_length()) if (1 << step) - 1 < count - 1]
    return [*places, count - 1]


def _evenly(low: int, high: int, most: int) -> Sequence[int]:
    if high - low <= most:
        return range(low, high)
    return sorted({low + (high - low) * step // (most + 1) for step in range(1, most + 1)})
