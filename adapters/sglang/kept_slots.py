"""Slots of SGLang's that a load may still write after the wait for it has ended.

SGLang frees the slots of a refused load at once. A daemon that was stopped in the middle of a copy goes on writing when it
continues. So these slots must not be used until the copy has ended. They are taken out of the refused transfer, and belong to
`KeptSlots` until it returns them to SGLang's allocator. SGLang's idle check would take them for a leak and end the engine, so the
check only warns meanwhile.

Owns: those slots. Refuses to know: when a copy has ended.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_STRICT = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"


class KeptSlots:
    def __init__(self, allocator: Any, page_tokens: int) -> None:
        self._allocator = allocator
        self._page_tokens = page_tokens
        self._slots: dict[int, torch.Tensor] = {}  # by the number of the copy that may write them
        self._flushed = False
        self._strict: str | None = None  # the operator's setting

    def __bool__(self) -> bool:
        return bool(self._slots)

    @property
    def copies(self) -> list[int]:
        return list(self._slots)

    def keep(self, copy_id: int, slots: torch.Tensor) -> None:
        if not self._slots:
            self._strict = os.environ.get(_STRICT)
            os.environ[_STRICT] = "false"
        self._slots[copy_id] = slots

    def release(self, copy_id: int) -> None:
        """Return the slots to SGLang: the copy has ended."""
        self.hold_back()
        self._allocator.free(self._slots.pop(copy_id))
        if not self._slots:
            if self._strict is None:
                del os.environ[_STRICT]
            else:
                os.environ[_STRICT] = self._strict

    def flushed(self) -> None:
        """SGLang is about to make all its slots free."""
        self._flushed = True

    def hold_back(self) -> None:
        """Take the slots out of the free ones again, where a flush has put them. REQUIRES: nothing was allocated since the flush."""
        if self._flushed and self._slots:
            pages = torch.cat(list(self._slots.values())) // self._page_tokens
            free = self._allocator.free_pages
            self._allocator.free_pages = free[~torch.isin(free, pages)]
        self._flushed = False
