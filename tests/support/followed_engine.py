"""An index that follows an engine's KV events: how the engine is reported, and what the index then has of it."""

from __future__ import annotations

from typing import Any

import msgspec

from kvserver.kv_events.types import ReaderConnected
from kvserver.protocol import DescribeScheduler
from kvserver.routing import KVIndex

from .daemon import wait_until
from .engine_publisher import EnginePublisher

PREFIX = b"r" * 32
BLOCKS = [bytes([n]) * 32 for n in range(1, 200)]


def connected(engine: EnginePublisher, name: str = "engine", **more: Any) -> ReaderConnected:
    fields = {
        "instance_id": name,
        "incarnation": "1",
        "model_name": "model",
        "variant": "",
        "events_endpoint": engine.endpoint,
        "events_replay_endpoint": engine.replay_endpoint,
        "events_topic": engine.topic,
    }
    return ReaderConnected(1, 0, DescribeScheduler(**{**fields, **more}), PREFIX, 16, 16)


def leading(index: KVIndex, name: str = "engine", blocks: list[bytes] = BLOCKS) -> int:
    (match,) = index.match(index.known_engines(instance_ids=[name]), b"".join(blocks), len(blocks[0]))
    return match.l0


def status(index: KVIndex, name: str = "engine") -> dict[str, Any]:
    found = index.status().engines[name]
    return msgspec.to_builtins(found) if found is not None else {}


def exported(index: KVIndex, name: str) -> list[Any]:
    (family,) = (family for family in index.families() if family.name == f"kvserver_engine_events_{name}")
    return family.points


def wait_for(index: KVIndex, blocks: int, name: str = "engine") -> None:
    wait_until(lambda: leading(index, name) == blocks, what=f"{blocks} blocks; {status(index, name)}")


def wait_for_batch(index: KVIndex, number: int, name: str = "engine") -> None:
    wait_until(lambda: status(index, name).get("sequence") == number, what=f"batch {number}; {status(index, name)}")


def number_of(block: bytes) -> int:
    return int.from_bytes(block[-8:], "big")
