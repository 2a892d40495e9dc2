"""A daemon whose socket files were removed or replaced stayed ready, and its end removed the files of another daemon."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support.commands import run
from support.daemon import Daemon, fetch, wait_until
from support.kv_chunks import Prompt

from kvserver.config import SocketFile


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of the endpoint alone, as a logout removes it."""
    made = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield made / "run"
    shutil.rmtree(made)


def ready(daemon: Daemon) -> tuple[int, str]:
    return fetch(f"http://127.0.0.1:{daemon.http_port}/readyz")


@pytest.mark.parametrize("lost", ["kv.sock", "kv.sock.fd", "kv.sock.lock", ""])
def test_what_was_removed_is_bound_again_and_engines_stay_connected(make_daemon, make_worker, folder, lost):
    daemon: Daemon = make_daemon(endpoint=f"ipc://{folder}/kv.sock")
    worker = make_worker(daemon)
    if lost:
        (folder / lost).unlink()
    else:
        shutil.rmtree(folder)
    names = ("kv.sock", "kv.sock.fd", "kv.sock.lock")
    wait_until(lambda: all((folder / name).exists() for name in names), what="the files are there again")
    worker.round_trip()
    make_worker(daemon).round_trip()
    assert ready(daemon) == (200, "ready\n")
    assert (folder / "kv.sock").stat().st_mode & 0o777 == 0o600
    assert daemon.terminate() == 0
    assert sorted(path.name for path in folder.iterdir()) == ["kv.sock.lock"]


def test_daemon_whose_endpoint_another_daemon_took_leaves_it_and_is_not_ready(make_daemon, make_worker, folder):
    first: Daemon = make_daemon(endpoint=f"ipc://{folder}/kv.sock")
    first.freeze()
    shutil.rmtree(folder)
    second: Daemon = make_daemon(endpoint=f"ipc://{folder}/kv.sock")
    first.thaw()
    wait_until(lambda: ready(first)[0] == 503, what="the first one is no longer ready")
    assert "another kvserver already serves" in ready(first)[1]
    assert ready(second) == (200, "ready\n")
    assert first.terminate() == 0
    assert all(path.exists() for path in second.sockets), "the first one's end removed the second one's sockets"
    make_worker(second).round_trip()


def test_the_first_daemon_serves_again_once_the_second_one_has_ended(make_daemon, make_worker, folder):
    first: Daemon = make_daemon(endpoint=f"ipc://{folder}/kv.sock")
    first.freeze()
    shutil.rmtree(folder)
    second: Daemon = make_daemon(endpoint=f"ipc://{folder}/kv.sock")
    first.thaw()
    wait_until(lambda: ready(first)[0] == 503, what="the first one is no longer ready")
    assert second.terminate() == 0
    wait_until(lambda: ready(first)[0] == 200, what="the first one serves again")
    make_worker(first).round_trip()


def test_a_folder_that_cannot_be_made_is_not_ready_with_the_reason(make_daemon, make_worker, folder):
    daemon: Daemon = make_daemon(endpoint=f"ipc://{folder}/kv.sock")
    worker = make_worker(daemon)
    shutil.rmtree(folder)
    folder.write_text("no folder")
    wait_until(lambda: ready(daemon)[0] == 503, what="the daemon is not ready")
    assert "engines cannot connect" in ready(daemon)[1]
    assert str(folder) in ready(daemon)[1]
    worker.round_trip()
    folder.unlink()
    wait_until(lambda: ready(daemon)[0] == 200, what="the daemon is ready")
    make_worker(daemon).round_trip()


@pytest.mark.parametrize("name", ["kv.sock", "kv.sock.fd"])
def test_a_regular_file_at_the_endpoint_is_never_replaced(make_daemon, folder, name):
    folder.mkdir()
    (folder / name).write_text("notes")
    daemon: Daemon = make_daemon(start=False, endpoint=f"ipc://{folder}/kv.sock")
    ended = run(*daemon.command()[1:])
    assert ended.returncode == 2
    assert "there is a file that is no socket" in ended.stderr
    assert (folder / name).read_text() == "notes"


@pytest.mark.parametrize("name", ["kv.sock", "kv.sock.fd"])
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_that_another_program_serves_is_never_replaced(make_daemon, folder, name, kind):
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(folder / name))
        if kind == socket.SOCK_STREAM:
            other.listen(1)
        before = (folder / name).stat().st_ino
        daemon: Daemon = make_daemon(start=False, endpoint=f"ipc://{folder}/kv.sock")
        ended = run(*daemon.command()[1:])
        assert ended.returncode == 2
        assert "another process serves it" in ended.stderr
        assert (folder / name).stat().st_ino == before


def test_a_stream_of_kv_events_is_bound_again(make_daemon, make_worker, folder):
    folder.mkdir()
    daemon: Daemon = make_daemon(kv_events_endpoint=f"ipc://{folder}/events")
    worker = make_worker(daemon)
    worker.send(worker.description())
    prompt = Prompt(range(128), chunk_blocks=4, block=16)
    worker.store(prompt.keys, worker.blocks_for(2), contents=prompt.contents())
    path = folder / "events"
    wait_until(path.exists, what="the stream is bound")
    path.unlink()
    wait_until(path.exists, what="it is bound again")
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.connect(f"ipc://{path}")
        assert reader.poll(20_000), "a new subscriber gets nothing"
    assert daemon.terminate() == 0
    assert not path.exists()


def test_only_the_file_that_was_made_is_removed(folder):
    folder.mkdir()
    file = SocketFile(str(folder / "s"))
    with file.listen():
        assert file.is_ours
        os.unlink(folder / "s")
        assert not file.is_ours
        (folder / "s").write_text("another's")
        file.remove()
        assert (folder / "s").read_text() == "another's"
