"""Notices of engines: counted, and not answered."""

from __future__ import annotations

import time

import pytest
from support.daemon import Daemon
from support.worker import Worker, ids, make_keys

from kvserver.protocol import MARK, ExactRecords, Heartbeat


def report(worker: Worker, records: bytes = b"", **changes: int) -> int:
    marks = MARK.pack(0, time.monotonic_ns()) if records else b""
    return worker.report(ExactRecords(records, marks, full=True), **changes)


def requests_of(daemon: Daemon) -> dict[str, int]:
    (instance,) = daemon.status()["instances"]
    found: dict[str, int] = instance["requests"]
    return found


def test_notices_are_not_answered_and_are_counted(daemon: Daemon, worker: Worker) -> None:
    keys = make_keys(2)
    worker.store(keys, worker.blocks_for(2))
    worker.lookup(keys, request_id="leased")
    sent = [
        report(worker, ids([1 | 4 << 29, 2, 3 | 1 << 29])),
        worker.end_request("leased"),
        worker.send(Heartbeat(boot_id=worker.hello.boot_id)),
        worker.send(worker.description(variant="v")),
        worker.send(worker.stats_message(running=3, waiting=4)),
    ]
    assert worker.lookup(make_keys(1)) == 0  # answered after them
    for number in sent:
        with pytest.raises(TimeoutError):
            worker.reply_to(number, 0.02)
    found = requests_of(daemon)
    assert (found["ended_requests"], found["sequence_gaps"]) == (1, 0)
    assert daemon.accounting()["leases"] == 0


def test_gaps_in_the_sequence_of_notices_are_counted(daemon: Daemon, worker: Worker) -> None:
    for sequence in (0, 1, 2, 5, 6, 6):  # two messages are missing, one comes twice
        report(worker, sequence=sequence)
    worker.end_request(sequence=9)
    worker.lookup(make_keys(1))
    assert requests_of(daemon)["sequence_gaps"] == 3
