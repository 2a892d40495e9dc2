"""Slots of SGLang's that a load may still write after the wait for it has ended.

SGLang frees the slots of a refused load at once. A daemon that was stopped in the middle of a copy goes on writing when it
continues. So these slots must not be used until the copies have ended. They are taken out of the refused transfers, and belong to
`KeptSlots` until it returns them to SGLang's allocators. SGLang's idle check would take them for a leak and end the engine, so the
check only warns meanwhile.

Owns: those slots. Refuses to know: when a copy has ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_STRICT = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"


@dataclass(frozen=True)
class Allocator:
    """SGLang's allocator of one pool. It has a list of free pages, or of free states."""

    of: Any
    row_slots: int

    def take_out(self, slots: torch.Tensor) -> None:
        name = "free_slots" if hasattr(self.of, "free_slots") else "free_pages"
        free = getattr(self.of, name)
        setattr(self.of, name, free[~torch.isin(free, slots // self.row_slots)])


@dataclass(frozen=True)
class _Kept:
    copies: tuple[int, ...]  # that may write the slots
    slots: list[tuple[Allocator, torch.Tensor]]


class KeptSlots:
    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._flushed = False
        self._strict: str | None = None  # the operator's setting

    @property
    def copies(self) -> list[tuple[int, ...]]:
        """The numbers of each load's copies, in the order in which its slots were kept."""
        return [kept.copies for kept in self._kept]

    def keep(self, copies: Sequence[int], slots: Sequence[tuple[Allocator, torch.Tensor]]) -> None:
        if not self._kept:
            self._strict = os.environ.get(_STRICT)
            os.environ[_STRICT] = "false"
        self._kept.append(_Kept(tuple(copies), list(slots)))

    def release(self, ended: Sequence[bool]) -> None:
        """Return slots to SGLang. `ended`: by load, as `copies` has them."""
        self.hold_back()
        was_empty, over = not self._kept, [kept for kept, end in zip(self._kept, ended, strict=True) if end]
        self._kept = [kept for kept, end in zip(self._kept, ended, strict=True) if not end]
        for kept in over:
            for allocator, slots in kept.slots:
                allocator.of.free(slots)
        if not self._kept and not was_empty:
            if self._strict is None:
                del os.environ[_STRICT]
            else:
                os.environ[_STRICT] = self._strict

    def flushed(self) -> None:
        """SGLang is about to make all its slots free."""
        self._flushed = True

    def hold_back(self) -> None:
        """Take the slots out of the free ones again, where a flush has put them. REQUIRES: nothing was allocated since the flush."""
        if self._flushed:
            for kept in self._kept:
                for allocator, slots in kept.slots:
                    allocator.take_out(slots)
        self._flushed = False
