"""Contract for handing memory to another process: `Exporter`, implemented by `host_memory` and `cuda_memory`.

Refuses to know: tensors, planes, and how any kind of memory is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from kvserver.protocol import Memory


class CannotShare(Exception):
    """The memory cannot be handed to the daemon; the message states what to change."""


@dataclass(frozen=True)
class Window:
    """A registered memory: `size` bytes from address `start` on, of the allocation that begins at `base`."""

    base: int
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size

    def contains(self, address: int) -> bool:
        return self.start <= address < self.end


@dataclass(frozen=True)
class Exported:
    """Result of an export. `fds` are sent in this order, and closed when the registration ends."""

    memory: list[Memory]
    fds: list[int]


class Exporter(Protocol):
    """Exporter of the storages of one KV cache. Constructing it moves nothing; it raises CannotShare instead."""

    windows: list[Window]  # each storage lies in one of them

    def export(self) -> Exported:
        """Export one memory for each window, in their order. Raises CannotShare."""


MakeExporter: TypeAlias = Callable[[Sequence[torch.UntypedStorage]], Exporter]
