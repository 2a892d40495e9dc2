"""The ranks of one engine: each has a scheduler of its own, and all must decide alike.

SGLang's schedulers run in step. A load that one rank has and another has not, or a slot that only one may use, would part them, and the
next collective would wait for ever. So results are reduced, over the groups that SGLang itself reduces over.

Owns: the reduction. Refuses to know: what is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed


class Ranks:
    """`groups`: process groups of which each has several ranks; none for an engine of one rank."""

    def __init__(self, number: int = 0, size: int = 1, groups: Sequence[Any] = ()) -> None:
        self.number, self.size, self._groups = number, size, groups

    def least(self, values: Sequence[int]) -> list[int]:
        """Reduce each value to the least of all ranks. REQUIRES: all ranks call this, with equally many values."""
        if not self._groups:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.int)
        for group in self._groups:
            distributed.all_reduce(reduced, op=distributed.ReduceOp.MIN, group=group)
        found: list[int] = reduced.tolist()
        return found

    def of_first(self, text: str) -> str:
        """Take the ASCII text of the first rank. REQUIRES: all ranks call this, with texts of one length."""
        taken = torch.tensor(list(text.encode("ascii")), dtype=torch.uint8)
        for group in self._groups:
            distributed.broadcast(taken, distributed.get_global_rank(group, 0), group)
        return bytes(taken.tolist()).decode("ascii")


def ranks_of(params: Any, number: int, size: int) -> Ranks:
    """The ranks that share requests: those of SGLang's own reductions of its tree (`_all_reduce_attn_groups`)."""
    groups = [
        group
        for group in (params.attn_cp_cache_group, params.attn_tp_cache_group)
        if group is not None and distributed.get_world_size(group=group) > 1
    ]
    if not groups and size > 1:
        groups = [params.tp_cache_group]
    return Ranks(number, size, groups)
