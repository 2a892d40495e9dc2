"""`/status` keeps its keys and the types of their values: dashboards and scripts of others read them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from support.collector import over_http
from support.daemon import GPUS, wait_until
from support.kv_chunks import Prompt
from support.worker import make_keys

SHAPE = Path(__file__).with_name("status_shape.txt").read_text().splitlines()
EVENT_TYPES = {".events.published_types", ".events.dropped_types"}  # the keys are the types of the present version


def collect(value: Any, path: str, found: dict[str, set[str]]) -> None:
    """The keys of all objects with the types of their values, and the types of the elements of all lists, by path."""
    if isinstance(value, dict):
        for key, one in value.items():
            found[path].add(f"{key} {type(one).__name__}")
            collect(one, f"{path}.{key}", found)
    elif isinstance(value, list):
        for one in value:
            found[path].add(type(one).__name__)
            collect(one, path + "[]", found)


def shape(status: dict[str, Any]) -> list[str]:
    found: dict[str, set[str]] = defaultdict(set)
    collect(status, "", found)
    return [f"{path}: {', '.join(sorted(keys))}" for path, keys in sorted(found.items()) if path not in EVENT_TYPES]


def test_a_daemon_with_everything_on_shows_all_keys(make_daemon, make_worker, tmp_path):
    events = {"kv_events_endpoint": f"ipc://{tmp_path}/e", "kv_events_replay_endpoint": f"ipc://{tmp_path}/r"}
    events["record"] = f"{tmp_path}/trace"
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, simulated_gpus=1, **events)
        left = make_worker(daemon, instance_id="left")
        left.lookup(make_keys(1))
        left.close()
        prompt = Prompt(range(128), chunk_blocks=4, block=16)
        worker = make_worker(daemon, instance_id="engine", model_name="model", gpu=GPUS[0])
        worker.send(worker.description(events_endpoint="tcp://127.0.0.1:1"))
        worker.store(prompt.keys, worker.blocks_for(2), contents=prompt.contents())
        worker.load(prompt.keys, worker.blocks_for(2, first=20))
        worker.send(worker.stats_message(running=1, kv_cache_usage=0.5))
        with contextlib.suppress(AssertionError):  # observers are shown a second later
            wait_until(lambda: shape(daemon.status()) == SHAPE)
        assert shape(daemon.status()) == SHAPE


def test_without_a_collector_and_a_recording_only_their_keys_are_missing(make_daemon):
    head = shape(make_daemon().status())[0].removeprefix(": ").split(", ")
    assert {*SHAPE[0].removeprefix(": ").split(", ")} - {*head} == {"otlp dict", "traces dict", "recording dict"}
