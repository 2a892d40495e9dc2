"""The end of SGLang's own work on pages of a GPU.

The scheduler's stream chose the pages. The forward's stream may still write them: with overlap scheduling a step runs while the
scheduler plans the next one, and its slots may be free by then. So a copy waits for both.
"""

from __future__ import annotations

from typing import Any

import torch


class BothStreams:
    """A `WorkEvent` of the current stream and of the forward's, if that is another."""

    def __init__(self, forward_stream: Any) -> None:
        self._streams = [None] if forward_stream is None else [None, forward_stream]
        self._events = [torch.cuda.Event(blocking=True) for _ in self._streams]

    def record(self) -> None:
        for event, stream in zip(self._events, self._streams, strict=True):
            event.record(stream)

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()
