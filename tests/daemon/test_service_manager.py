"""What the daemon reports to a service manager, whose socket is the test's: `test_systemd.py` has a real systemd."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import KVSERVER, Daemon
from support.kept_l1 import hits, refusal, restart, store_prompt
from support.server import L1_BYTES, PAGE_BYTES, running_server
from support.simulators import FakeDevice

from kvserver._native import HostRegion
from kvserver.copy import Devices
from kvserver.service_manager import keep_descriptors, report_alive


class Manager:
    """The socket of NOTIFY_SOCKET."""

    def __init__(self, folder: Path, abstract: bool) -> None:
        name = str(folder / "notify")
        self.address = f"@{name}" if abstract else name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name if abstract else name)

    def next(self, seconds: float = 20.0) -> str:
        """TimeoutError if none arrives."""
        self._socket.settimeout(seconds)
        return self._socket.recv(4096).decode()

    def next_with_descriptors(self) -> tuple[str, list[int]]:
        self._socket.settimeout(20)
        message, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
        return message.decode(), fds

    def clear(self) -> None:
        """Drop what has arrived."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.next(0)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path, getattr(request, "param", "") == "an abstract name")
    yield made
    made.close()


def test_a_daemon_reports_each_second_that_it_is_ready(manager: Manager) -> None:
    daemon = Daemon(env={"NOTIFY_SOCKET": manager.address})
    try:
        daemon.start()
        assert [manager.next() for _ in range(2)] == ["READY=1\nWATCHDOG=1\nSTATUS=ready"] * 2
    finally:
        daemon.close()


@pytest.mark.parametrize("manager", ["a file", "an abstract name"], indirect=True)
def test_the_report_states_on_one_line_why_the_daemon_is_not_ready(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    report_alive("L2 tier file:///a is down:\nSTOPPING=1")
    assert manager.next() == "READY=1\nWATCHDOG=1\nSTATUS=not ready: L2 tier file:///a is down: STOPPING=1"


def test_a_reason_that_is_no_utf_8_is_reported(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    report_alive("L2 tier file:///\udcff is down")
    assert manager.next().endswith("STATUS=not ready: L2 tier file:///? is down")


def test_a_loop_that_hangs_reports_nothing(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    device = FakeDevice(HostRegion(L1_BYTES), PAGE_BYTES)
    with running_server(Devices(device)) as running:
        manager.next()
        with running.loop_stopped():
            manager.clear()
            with pytest.raises(TimeoutError):
                manager.next(2.0)
        manager.next()


# ---- descriptors that it keeps ------------------------------------------------------------------


def test_descriptors_are_sent_with_their_names(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    with open(tmp_path / "kept", "w+") as kept:
        keep_descriptors({"kvserver-l1": kept.fileno()})
        message, fds = manager.next_with_descriptors()
    assert message == "FDSTORE=1\nFDNAME=kvserver-l1"
    (fd,) = fds
    assert os.fstat(fd).st_ino == (tmp_path / "kept").stat().st_ino
    os.close(fd)


@pytest.mark.parametrize(("pid", "found"), [("$$", "{'a': 3, 'b': 4} [False, False] None"), ("1", "{} [] None")])
def test_descriptors_that_were_kept_are_found_by_name_if_they_are_for_this_process(pid: str, found: str) -> None:
    code = (
        "import os; from kvserver.service_manager import kept_descriptors; kept = kept_descriptors(); "
        "print(kept, [os.get_inheritable(fd) for fd in kept.values()], os.environ.get('LISTEN_FDS'))"
    )
    command = f'LISTEN_PID={pid} LISTEN_FDS=2 LISTEN_FDNAMES=a:b exec "$0" -c "$1" 3</dev/null 4</dev/null'
    ended = subprocess.run(["sh", "-c", command, sys.executable, code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == found, ended.stderr


def test_l1_in_the_descriptor_store_is_refused_without_a_service_manager() -> None:
    daemon = Daemon(l1_file="fdstore:")
    try:
        assert "start the daemon by systemd" in refusal(daemon)
    finally:
        daemon.close()


NAMES = ["kvserver-l1", "kvserver-l1-state"]


def pass_descriptors(daemon: Daemon, kept: list[int]) -> None:
    """Have the next starts get these, by the first names."""
    names = f"LISTEN_PID=$$ LISTEN_FDS={len(kept)} LISTEN_FDNAMES={':'.join(NAMES[: len(kept)])}"
    passed = " ".join(f"{3 + place}<>/proc/{os.getpid()}/fd/{fd}" for place, fd in enumerate(kept))
    daemon.program = ("sh", "-c", f'{names} exec {KVSERVER} "$@" {passed}', "kvserver")


def memories(daemon: Daemon) -> int:
    """Descriptors of memfds that the daemon has open."""
    assert daemon.process is not None
    folder = f"/proc/{daemon.process.pid}/fd"
    return sum("memfd:kvserver-l1" in os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder))


@pytest.mark.parametrize(("passed", "l1_file", "left"), [(2, "", 0), (1, "", 0), (1, "fdstore:", 2)])
def test_stored_l1_that_a_start_does_not_use_is_dropped(manager: Manager, passed: int, l1_file: str, left: int) -> None:
    daemon, kept = Daemon(env={"NOTIFY_SOCKET": manager.address}, l1_file="fdstore:"), list[int]()
    try:
        daemon.start()
        while len(kept) < 2:
            kept += manager.next_with_descriptors()[1]
        assert daemon.terminate() == 0
        assert "if the unit keeps them (FileDescriptorStoreMax=2): a stop of the unit frees them" in daemon.log
        manager.clear()
        pass_descriptors(daemon, kept[:passed])
        daemon.flags["l1_file"] = l1_file
        daemon.start()
        assert [manager.next() for _ in range(passed)] == [f"FDSTOREREMOVE=1\nFDNAME={n}" for n in NAMES[:passed]]
        assert memories(daemon) == left
    finally:
        daemon.close()
        for fd in kept:
            os.close(fd)


def test_l1_is_kept_by_a_restart_with_its_descriptors_and_ends_without_them(manager: Manager) -> None:
    """The test stands in for the service manager, which opens them anew; `test_systemd.py` has a real one."""
    kept: list[int] = []
    daemon = Daemon(env={"NOTIFY_SOCKET": manager.address}, l1_file="fdstore:")
    try:
        daemon.start()
        while len(kept) < 2:
            kept += manager.next_with_descriptors()[1]
        prompt, before = store_prompt(daemon), daemon.program
        pass_descriptors(daemon, kept)
        for _ in range(2):
            restart(daemon)
            assert hits(daemon, prompt) == 3
        daemon.kill()
        daemon.start()
        assert hits(daemon, prompt) == 0, "a crash leaves no state"
        prompt = store_prompt(daemon)
        daemon.program = before
        restart(daemon)
        assert hits(daemon, prompt) == 0
        assert "L1 begins empty: its file is new" in daemon.log
    finally:
        daemon.close()
        for fd in kept:
            os.close(fd)
