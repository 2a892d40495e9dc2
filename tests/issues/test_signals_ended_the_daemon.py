"""SIGHUP, which log rotation sends, ended the daemon bare, and so did SIGQUIT, SIGUSR1 and SIGUSR2."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest
from support.daemon import Daemon, wait_until
from support.kv_chunks import Prompt
from support.worker import Worker, make_keys


def store(worker: Worker, number: int) -> None:
    """A prompt of two chunks, which KV events name."""
    prompt = Prompt(range(128 * number, 128 * number + 128), chunk_blocks=4, block=16)
    worker.store(prompt.keys, worker.blocks_for(2), contents=prompt.contents())


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_hup_reopens_the_files_that_are_written(make_daemon, make_worker, tmp_path):
    events, record = tmp_path / "events", tmp_path / "record"
    daemon: Daemon = make_daemon(kv_events_file=events, record=record)
    worker = make_worker(daemon)
    worker.send(worker.description())
    for number in range(2):
        if number:
            for path in (events, record):
                path.rename(path.with_suffix(".1"))
            os.kill(daemon.pid, signal.SIGHUP)
        store(worker, number)
        worker.lookup(make_keys(2), f"r{number}")
        worker.end_request(f"r{number}")
        wait_until(lambda: lines(events)[-1:] and lines(events)[-1]["type"] == "stored", what="the store is written")
        wait_until(lambda: lines(record), what="the lookup is written")
    old, new = lines(events.with_suffix(".1")), lines(events)
    assert [line["type"] for line in old + new] == ["reader_came", "stored", "stored"], "a line is lost"
    assert len(lines(record.with_suffix(".1"))) == len(lines(record)) == 1
    assert daemon.terminate() == 0


def test_a_full_recording_goes_on_in_the_next_file(make_daemon, make_worker, tmp_path):
    record = tmp_path / "record"
    daemon: Daemon = make_daemon(record=record, record_size=400)
    worker = make_worker(daemon)

    def look_up(number: int) -> None:
        worker.lookup(make_keys(2, seed=number), f"r{number}")
        worker.end_request(f"r{number}")

    def full() -> bool:
        return daemon.status()["recording"]["full"]

    for number in range(10):
        if full():
            break
        look_up(number)
        # None is left for the next file, which it could fill.
        wait_until(lambda past=number: len(lines(record)) > past or full(), what="it is written, or the file is full")
    assert full()
    record.rename(record.with_suffix(".1"))
    os.kill(daemon.pid, signal.SIGHUP)
    wait_until(record.exists, what="the file is reopened without a request")
    look_up(11)
    wait_until(lambda: lines(record), what="it is written")
    assert not full()


def test_a_path_that_cannot_be_opened_leaves_the_old_file(make_daemon, make_worker, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    daemon: Daemon = make_daemon(kv_events_file=folder / "events")
    folder.rename(tmp_path / "moved")
    os.kill(daemon.pid, signal.SIGHUP)
    worker = make_worker(daemon)
    worker.send(worker.description())
    store(worker, 0)
    wait_until(lambda: lines(tmp_path / "moved" / "events"), what="the line is written to the old file")
    assert "cannot reopen" in daemon.log


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_without_a_meaning_is_logged(make_daemon, make_worker, number):
    daemon: Daemon = make_daemon()
    os.kill(daemon.pid, number)
    wait_until(lambda: f"{number.name} has no meaning here" in daemon.log, what="the log names the signal")
    make_worker(daemon).round_trip()
    assert daemon.terminate() == 0


def test_quit_drains_as_term_does(make_daemon):
    daemon: Daemon = make_daemon()
    os.kill(daemon.pid, signal.SIGQUIT)
    assert daemon.process.wait(20.0) == 0
    assert not any(path.exists() for path in daemon.sockets)
    assert "SIGQUIT: draining" in daemon.log


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signal_does_not_end_a_daemon_that_is_starting(make_daemon, number):
    daemon: Daemon = make_daemon(start=False, l1_size="1GiB")
    with open(daemon.folder / "log", "a") as log:
        daemon.process = subprocess.Popen(daemon.command(), stdout=subprocess.PIPE, stderr=log, text=True)
    lock = daemon.sockets[0].with_suffix(".sock.lock")
    wait_until(lock.exists, what="it has begun to start")
    os.kill(daemon.pid, number)
    assert " ready: " in daemon.process.stdout.readline(), daemon.log
    assert daemon.terminate() == 0
