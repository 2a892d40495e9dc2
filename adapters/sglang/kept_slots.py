"""Slots of SGLang's that a load may still write after the wait for it has ended.

SGLang frees the slots of a refused load at once. A daemon that was stopped in the middle of a copy goes on writing when it
continues. So these slots must not be used until the copy has ended. They are taken out of the refused transfer, and belong to
`KeptSlots` until it returns them to SGLang's allocator. SGLang's idle check would take them for a leak and end the engine, so the
check only warns meanwhile.

Owns: those slots. Refuses to know: when a copy has ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

_STRICT = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"


class KeptSlots:
    def __init__(self, allocator: Any, page_tokens: int) -> None:
        self._allocator = allocator
        self._page_tokens = page_tokens
        self._kept: list[tuple[int, torch.Tensor]] = []  # the number of the copy that may write them, and the slots
        self._flushed = False
        self._strict: str | None = None  # the operator's setting

    @property
    def copies(self) -> list[int]:
        """The numbers of the copies, in the order in which their slots were kept."""
        return [copy_id for copy_id, _ in self._kept]

    def keep(self, copy_id: int, slots: torch.Tensor) -> None:
        if not self._kept:
            self._strict = os.environ.get(_STRICT)
            os.environ[_STRICT] = "false"
        self._kept.append((copy_id, slots))

    def release(self, ended: Sequence[bool]) -> None:
        """Return slots to SGLang. `ended`: by copy, as `copies` has them."""
        self.hold_back()
        was_empty, over = not self._kept, [slots for (_, slots), end in zip(self._kept, ended, strict=True) if end]
        self._kept = [kept for kept, end in zip(self._kept, ended, strict=True) if not end]
        for slots in over:
            self._allocator.free(slots)
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
        if self._flushed and self._kept:
            pages = torch.cat([slots for _, slots in self._kept]) // self._page_tokens
            free = self._allocator.free_pages
            self._allocator.free_pages = free[~torch.isin(free, pages)]
        self._flushed = False
