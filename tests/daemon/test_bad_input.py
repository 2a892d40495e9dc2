"""A bad input hurts no other peer: one for each code of an error, and those that only a process can show.

All that is refused, and with which words, is in `unit/server/test_refusals.py`, `unit/engines/test_lifeline.py` and `unit/protocol/`.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable

import pytest
from support.daemon import Daemon, wait_until
from support.raw import REQUEST_ID, RawPeer
from support.refusals import REFUSALS
from support.worker import Worker, make_keys

from kvserver.config.descriptors import FOR_ENGINES
from kvserver.protocol import (
    PROTOCOL_VERSION,
    ChunkContents,
    ErrorCode,
    Hello,
    HelloReply,
    ObjectGroup,
)

MakeDaemon = Callable[..., Daemon]
MakeWorker = Callable[..., Worker]

# ---- each code --------------------------------------------------------------------------------

ERRORS, REFUSED_REGISTRATIONS = "kvserver_rpc_errors_total", "kvserver_refused_registrations_total"
REGISTERING = {  # codes whose first row is of a registration, or of what precedes it
    ErrorCode.VERSION_MISMATCH, ErrorCode.BAD_TOKEN, ErrorCode.UNKNOWN_ATTACHMENT, ErrorCode.UNKNOWN_RANK,
    ErrorCode.RANKS_DISAGREE, ErrorCode.BAD_PLANES, ErrorCode.BAD_MEMORY,
}  # fmt: skip


def counts(daemon: Daemon) -> Counter[tuple[str, str]]:
    """By name and code."""
    found: Counter[tuple[str, str]] = Counter()
    for sample in daemon.samples(ERRORS, REFUSED_REGISTRATIONS):
        found[sample.name, sample.labels["reason"]] += int(sample.value)
    return found


@pytest.mark.parametrize("code", REFUSALS)
def test_an_error_is_counted_once_and_ends_neither_the_connection_nor_the_daemon(
    daemon: Daemon, worker: Worker, code: ErrorCode
) -> None:
    refused, _ = REFUSALS[code][0]
    before = counts(daemon)
    assert refused(worker).code == code.value
    names = {ERRORS: code is not ErrorCode.BAD_TOKEN, REFUSED_REGISTRATIONS: code in REGISTERING}
    assert counts(daemon) - before == Counter((name, code.value) for name, counted in names.items() if counted)
    worker.round_trip()


# ---- a process --------------------------------------------------------------------------------


def test_a_message_far_over_the_limit_ends_only_its_own_connection(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    with RawPeer(daemon.endpoint) as peer:
        before = daemon.rss_bytes()
        for _ in range(3):
            peer.send(REQUEST_ID, bytes(64 * 2**20 + 1))
        with pytest.raises(TimeoutError):
            peer.receive(0.3)
        assert daemon.rss_bytes() - before < 50 * 2**20
    worker.round_trip()


def connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(5)
    wait_until(lambda: connection.connect_ex(path) != errno.EAGAIN, what="room in the backlog")
    return connection


def test_a_daemon_without_free_descriptors_refuses_connections_and_serves_on(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    held = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (held + 40, held + 40))
    connections = [connect(worker.hello.fd_path) for _ in range(60)]
    worker.round_trip()
    assert len(os.listdir(f"/proc/{daemon.pid}/fd")) <= held + 40 - FOR_ENGINES + 2, "the last one, and its process"
    refused = [c for c in connections[40:] if c.recv(1) == b""]
    assert len(refused) == 20
    assert daemon.log.count("refused a connection") < 200
    for connection in connections:
        connection.close()
    wait_until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= held)
    make_worker(daemon).round_trip()


# ---- served all the same ----------------------------------------------------------------------


def test_the_previous_version_is_served_and_shares_with_this_one(daemon: Daemon, make_worker: MakeWorker) -> None:
    keys = make_keys(2)
    cold = make_worker(daemon, connect_now=False)
    assert cold.client.ask(Hello(PROTOCOL_VERSION - 1), HelloReply).protocol_version == PROTOCOL_VERSION - 1
    cold.attach()
    cold.register()
    cold.store(keys, cold.blocks_for(2))
    here = make_worker(daemon, connect_now=False)
    here.attach()
    here.register(groups=(ObjectGroup("full", (0,), here.geometry.block_tokens),))
    assert here.lookup(keys) == 2


def test_contents_that_belong_to_other_keys_do_not_keep_a_chunk_from_being_stored(
    daemon: Daemon, worker: Worker
) -> None:
    keys = make_keys(2)
    contents = ChunkContents(32, bytes(8 * 32), bytes(8 * 16 * 4), extra_keys=b"\xc1")
    before = daemon.status()["kv_events"]["unannounced"]["mismatched"]
    assert worker.store(keys, worker.blocks_for(2), contents=contents).stored == 2
    worker.round_trip()
    wait_until(lambda: daemon.status()["kv_events"]["unannounced"]["mismatched"] == before + 2)
