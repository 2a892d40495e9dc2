"""SGLang's own stream of KV events: the addresses at which a process of this machine reads it.

Owns: what `--kv-events-config` makes of them. Refuses to know: the events.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang.srt.disaggregation.kv_events import KVEventsConfig, ZmqEventPublisher, select_kv_publisher_dp_rank

from kvserver.adapters.common.addresses import local


class EventsAddress(NamedTuple):
    """Empty where SGLang publishes no events, or only its publisher knows where."""

    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""


def events_of(kv_events_config: str | None, data_parallel_rank: int | None) -> EventsAddress:
    config = KVEventsConfig.from_cli(kv_events_config) if kv_events_config else KVEventsConfig()
    if config.publisher != "zmq":
        return EventsAddress()
    rank = select_kv_publisher_dp_rank(1, 0, data_parallel_rank)
    endpoint, replay = (
        ZmqEventPublisher.offset_endpoint_port(address, rank) or ""
        for address in (config.endpoint, config.replay_endpoint)
    )
    listens = any(part in endpoint for part in ("*", "::", "0.0.0.0")) or endpoint.startswith("ipc://")
    if not (listens if config.bind is None else config.bind) or endpoint.endswith(":0"):
        return EventsAddress()
    return EventsAddress(local(endpoint), "" if replay.endswith(":0") else local(replay), config.topic)
