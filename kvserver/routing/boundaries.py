"""Boundary that a lookup finds in one tier, for engines with other groups than one of full attention.

Owns: the translation of the index's owners into what `cache.Groups` searches, as the server does for its lookups. Refuses to
know: which owner is what, hashes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kvserver.cache import Groups
from kvserver.protocol import ObjectGroup


class _Unit(NamedTuple):
    ready: int  # bits of groups


def has_boundaries(groups: Sequence[ObjectGroup]) -> bool:
    """False if a hit is the length of the leading blocks that are there."""
    return len(groups) > 1 or any(group.kind != "full" for group in groups)


def unit_tokens(groups: Sequence[ObjectGroup]) -> int:
    """Tokens of which a hit in the engine's own memory is a multiple."""
    return math.lcm(*(group.block_tokens for group in groups))


def hit_units(groups: tuple[ObjectGroup, ...], tokens: int, owners: Sequence[int], owners_of: Sequence[int]) -> int:
    """Number of units of `tokens` tokens that a hit has.

    `owners` has bits of owners for each unit of the prompt, `owners_of` those of each group: in one of them is enough.
    """
    searched = _groups(groups, tokens)
    # Of thousands of units few differ.
    units = {
        bits: _Unit(sum(1 << number for number, of_group in enumerate(owners_of) if bits & of_group))
        for bits in set(owners)
    }
    found = [units[bits] for bits in owners]
    full = searched.full
    leading = next((number for number, unit in enumerate(found) if unit.ready & full != full), len(found))
    return searched.boundary(found[:leading])


@lru_cache(maxsize=256)
def _groups(groups: tuple[ObjectGroup, ...], tokens: int) -> Groups:
    return Groups(groups, 1, tokens)
