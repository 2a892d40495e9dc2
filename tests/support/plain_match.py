"""What a match must be, walked block by block as csrc/tables/prefix_index.h states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Reader = tuple[int, int, int, int]  # the owners of L0, L1 and L2, or -1, and the blocks of a chunk


def plain_match(prompt: list[bytes], counts: Sequence[Counter[bytes]], reader: Reader) -> tuple[int, int, int, int]:
    """`counts`: for each owner, how often it has each block."""
    *owners, chunk = reader

    def has(owner: int, block: int) -> bool:
        return owner >= 0 and block < len(prompt) and counts[owner][prompt[block]] > 0

    l0 = next((i for i in range(len(prompt)) if not has(owners[0], i)), len(prompt))
    chunks = [range(end - chunk, end) for end in range(chunk, len(prompt) + 1, chunk)]
    tiers = [next((c.start for c in chunks if not has(h, c[-1])), len(chunks) * chunk) for h in owners[1:]]
    covered = {block for c in chunks if any(has(h, c[-1]) for h in owners[1:]) for block in c}
    best = next((i for i in range(len(prompt)) if i not in covered and not has(owners[0], i)), len(prompt))
    return l0, tiers[0], tiers[1], best
