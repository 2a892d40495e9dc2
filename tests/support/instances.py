"""Registered workers without processes, for the tables of instances."""

from __future__ import annotations

from typing import Any

from kvserver.engines.instances import Instances
from kvserver.engines.worker import Worker

from .registration import registration


class _Nothing:
    """Stands for what a worker only keeps: connection, device, memory."""

    registration: int | None = None


def add_worker(
    instances: Instances, instance_id: str, model_name: str = "m", incarnation: str = "one", **changes: Any
) -> Worker:
    """One without a process registers."""
    spec = registration(instance_id=instance_id, model_name=model_name, incarnation=incarnation, **changes)
    nothing: Any = _Nothing()
    return instances.add_worker(spec, nothing, nothing, [], nothing)
