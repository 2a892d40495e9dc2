"""An SGLang whose linker interface is unknown starts all the same, and runs without cache."""

from __future__ import annotations

import abc
import inspect
import logging
from typing import Any

import pytest
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from kvserver.adapters.sglang.contract import differences, without_cache


class MoreMethods(UnifiedCacheLinker):
    @abc.abstractmethod
    def prefetch(self, rid: str) -> list[int]: ...


class AnotherArgument(UnifiedCacheLinker):
    @abc.abstractmethod
    def load(self, rid: str, transfers: list[Any], priority: int) -> bool: ...


def test_the_tested_interface_has_no_differences() -> None:
    assert differences(UnifiedCacheLinker) == []


@pytest.mark.parametrize(
    ("interface", "difference"),
    [(MoreMethods, "a new method prefetch"), (AnotherArgument, "load takes rid, transfers, priority")],
)
def test_an_unknown_interface_gives_a_linker_without_cache_and_one_warning(
    interface: type, difference: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert differences(interface) == [difference]
    linker = without_cache(interface, difference, lambda: LayerWiseLoadCounter(0))
    assert not inspect.isabstract(linker), "SGLang's factory refuses abstract linkers, and the engine would not start"
    with caplog.at_level(logging.WARNING, "kvserver"):
        made = linker(object(), object(), components=set(), extra_config={}, forward_stream=None, new_argument=1)
    assert [record.getMessage() for record in caplog.records] == [
        f"kvserver: this engine runs without cache: {difference}"
    ]
    assert made.lookup("r", []) == []
    assert made.load("r", [], 3) is False
    assert made.offload([], session_id=None) is False
    assert made.num_completed_offloads() == 0
    assert made.start_layer_wise_loading() == -1
    assert made.finish_layer_wise_loading(-1) is True
    assert made.reset() is None
    if interface is MoreMethods:
        assert made.prefetch("r") == []
