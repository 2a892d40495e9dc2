"""What an engine without a model publishes, as a router that receives every event sees it.

Owns: a publisher in the place of the engine's own. Refuses to know: where the events come from.
"""

from __future__ import annotations

from modelless import Engine
from support.kv_audience import Audience
from vllm.config import VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import EventBatch, EventPublisher
from vllm.v1.kv_cache_interface import KVCacheConfig


def events_on(config: VllmConfig, caches: KVCacheConfig) -> None:
    """For `make_engine(adjust=...)`."""
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")


class Log(EventPublisher, Audience):
    def __init__(self, engine: Engine) -> None:
        EventPublisher.__init__(self)
        Audience.__init__(self)
        engine.scheduler.kv_event_publisher = self

    def publish(self, events: EventBatch) -> None:
        media = [getattr(event, "medium", "GPU") for event in events.events]
        assert media == sorted(media, key=lambda medium: medium != "GPU"), "the engine's own come first"
        self.read(events.events)

    def shutdown(self) -> None:
        pass
