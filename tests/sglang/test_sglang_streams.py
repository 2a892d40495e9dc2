"""Copies of a GPU wait for all that SGLang has queued on their pages. No GPU is needed: what counts is the order of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvserver.adapters.sglang.streams import BothStreams


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    made: list[tuple[str, Any]] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Any) -> None:
            self.stream = stream
            made.append(("record", stream))

        def synchronize(self) -> None:
            made.append(("synchronize", self.stream))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return made


def test_a_copy_waits_for_the_current_stream_and_for_the_forwards(calls: list[tuple[str, Any]]) -> None:
    event = BothStreams("forward")
    event.record()
    event.synchronize()
    assert calls == [("record", None), ("record", "forward"), ("synchronize", None), ("synchronize", "forward")]


def test_a_copy_waits_for_the_current_stream_where_it_is_the_only_one(calls: list[tuple[str, Any]]) -> None:
    event = BothStreams(None)
    event.record()
    event.synchronize()
    assert calls == [("record", None), ("synchronize", None)]
