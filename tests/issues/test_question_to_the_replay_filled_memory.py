"""A question to the sockets of KV events, which may be open to a network, could have any size: the daemon took it into memory whole."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.daemon import Daemon
from support.kv_chunks import Prompt
from support.kv_subscriber import Subscriber
from support.worker import Worker

from kvserver.config.settings import MiB

HUGE = 512 << 20


def peak_bytes(daemon: Daemon) -> int:
    lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def ask_hugely(endpoint: str, socket_type: bytes) -> None:
    """Speak ZMTP 3.0 by hand, a library would not send such a subscription. Returns when the daemon has taken all or hung up."""
    ready = b"\5READY\13Socket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(endpoint.removeprefix("ipc://"))
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\3\0NULL" + bytes(48))
        connection.sendall(bytes([4, len(ready)]) + ready)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"\2" + HUGE.to_bytes(8, "big") + b"\1")
            for _ in range(HUGE // MiB - 1):  # never the end of it: memory is what it is about
                connection.sendall(bytes(MiB))


@pytest.mark.parametrize("kind", ["replay", "subscription"])
def test_a_huge_question_uses_no_memory_and_others_are_answered(
    make_daemon: Callable[..., Daemon],
    make_worker: Callable[..., Worker],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
) -> None:
    folder = tmp_path_factory.mktemp("kv")  # its name is short
    events, replay = f"ipc://{folder}/e", f"ipc://{folder}/r"
    daemon = make_daemon(kv_events_endpoint=events, kv_events_replay_endpoint=replay)
    worker = make_worker(daemon)
    worker.send(worker.description(hash_form="bytes"))
    prompt = Prompt(list(range(64)), chunk_blocks=4, block=16)
    subscriber = Subscriber(events, replay)
    try:
        worker.store(prompt.keys, worker.blocks_for(1), contents=prompt.contents())
        subscriber.follow(lambda: len(subscriber.blocks.resident) == 4)
        before = peak_bytes(daemon)
        ask_hugely(*((replay, b"DEALER") if kind == "replay" else (events, b"SUB")))
        assert peak_bytes(daemon) - before < 100 << 20
        assert subscriber.replay(0)
        more = Prompt(list(range(100, 164)), chunk_blocks=4, block=16)
        worker.store(more.keys, worker.blocks_for(1, first=9), contents=more.contents())
        subscriber.follow(lambda: len(subscriber.blocks.resident) == 8)
    finally:
        subscriber.close()
