"""What an engine without a model publishes, as a router that hears everything sees it.

Owns: a publisher that keeps vLLM's batches. Refuses to know: where the events come from.
"""

from __future__ import annotations

from typing import Any

from modelless import Engine
from vllm.config import VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, EventBatch, EventPublisher
from vllm.v1.kv_cache_interface import KVCacheConfig


def events_on(config: VllmConfig, caches: KVCacheConfig) -> None:
    """For `make_engine(adjust=...)`."""
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")


class Log(EventPublisher):
    """In the place of the engine's publisher. Of the daemon's tiers no block is stored twice, or removed if it is not there."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.clears = 0
        self._held: dict[str, set[Any]] = {}  # by medium
        engine.scheduler.kv_event_publisher = self

    def publish(self, events: EventBatch) -> None:
        media = [getattr(event, "medium", "GPU") for event in events.events]
        assert media == sorted(media, key=lambda medium: medium != "GPU"), "the engine's own stand first"
        for event in events.events:
            self._take(event)
        self.events += events.events

    def _take(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self._held.clear()
            self.clears += 1
            return
        held, hashes = self._held.setdefault(event.medium, set()), set(event.block_hashes)
        if event.medium != "GPU":
            assert len(hashes) == len(event.block_hashes)
            assert not hashes & held if isinstance(event, BlockStored) else hashes <= held
        self._held[event.medium] = held | hashes if isinstance(event, BlockStored) else held - hashes

    def held(self, medium: str) -> set[Any]:
        return self._held.get(medium, set())

    def stored(self, medium: str) -> list[BlockStored]:
        return [event for event in self.events if isinstance(event, BlockStored) and event.medium == medium]

    def shutdown(self) -> None:
        pass
