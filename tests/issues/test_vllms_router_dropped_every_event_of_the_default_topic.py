"""vllm-router 0.1.17 drops each batch of KV events whose topic is not empty, without a warning: the daemon's default was `kv-events`.

The router itself is in daemon/test_routers.py.
"""

from __future__ import annotations

from support.kv_chunks import Prompt
from support.kv_subscriber import Subscriber


def test_the_default_topic_is_empty_as_vllms(make_daemon, make_worker) -> None:
    daemon = make_daemon(start=False)
    endpoint = daemon.flags["kv_events_endpoint"] = f"ipc://{daemon.folder}/events"
    daemon.start()
    subscriber, one = Subscriber(endpoint), Prompt(range(64), chunk_blocks=4, block=16)
    try:
        worker = make_worker(daemon)
        worker.send(worker.description(hash_form="int"))
        worker.store(one.keys, worker.blocks_for(1), contents=one.contents())
        subscriber.follow(lambda: len(subscriber.blocks.resident) == 4)
    finally:
        subscriber.close()
    assert {topic for topic, _, _ in subscriber.received} == {b""}
