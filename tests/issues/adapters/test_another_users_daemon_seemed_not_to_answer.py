"""An engine of another user than the daemon's was reported as `no_answer`, "restart the daemon": the socket is its user's alone. With
a runtime folder of another user, as after `su`, the link's thread ended, and the status stayed `starting`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from front_end import FrontEnd
from support.daemon import Daemon, wait_until

OTHER_UID = 65533
# Becomes another user, and prints the status that it finds. What it needs is imported before it has no right to read it.
STRANGER = """
import os, sys, time, encodings.idna, logging.handlers
from kvserver.adapters.common.link import Link, absence, failure
from kvserver.cli import checks_daemon
from kvserver.cli.checks import Machine
from kvserver.config import Settings
from kvserver.protocol import default_endpoint
from kvserver.protocol.client import Attachment, Client
what, where, token, uid = *sys.argv[1:4], int(sys.argv[4])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
if what == "link":
    link = Link(where or default_endpoint(), "stranger")
    link.start(5)
    print(*link.cache_status)
elif what == "doctor":
    found = checks_daemon.daemon(Machine(Settings(endpoint=where)))
    print("not_permitted" if found.level == "problem" and "as the daemon's user" in found.fix else found, found.text)
elif what == "command":
    try:
        Client(where, 1).hello()
    except OSError as error:
        print(*failure(where, error))
else:
    for _ in range(3):
        try:
            Attachment(where, token, [])
            print("attached")
        except Exception as error:
            print(*failure("ipc:///nowhere", error))
os._exit(0)
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def ask(what: str, where: str | Path, token: str = "", uid: int = OTHER_UID, **environment: str) -> list[str]:
    command = [sys.executable, "-u", "-c", STRANGER, what, str(where), token, str(uid)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", env=os.environ | environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def assert_not_permitted(line: str) -> None:
    assert line.startswith("not_permitted "), line
    assert f"user {OTHER_UID}" in line, line
    assert "user 0" in line.replace("user 0's", "user 0"), line


@pytest.fixture
def daemon(make_daemon) -> Daemon:
    daemon = make_daemon()
    daemon.folder.chmod(0o755)
    return daemon


@needs_root
@pytest.mark.parametrize("what", ["link", "command", "doctor"])
@pytest.mark.parametrize("folder_mode", [0o700, 0o755])
def test_a_socket_without_permission_is_reported_with_both_users(daemon, folder_mode, what):
    daemon.folder.chmod(folder_mode)
    (line,) = ask(what, daemon.endpoint)
    assert_not_permitted(line)
    assert str(daemon.folder) in line


@needs_root
@pytest.mark.parametrize("what", ["link", "command", "doctor"])
def test_a_daemon_that_refuses_the_peers_credentials_is_reported_with_both_users(daemon, what):
    """Where the operator made the socket writable for all."""
    for path in daemon.sockets:
        path.chmod(0o666)
    for _ in range(2):
        (line,) = ask(what, daemon.endpoint)
        assert_not_permitted(line)
    refusal = "refused a connection of another user"
    wait_until(lambda: refusal in daemon.log)
    assert daemon.log.count(refusal) == 1


@needs_root
def test_root_and_the_daemons_own_user_are_not_kept_from_it(daemon):
    assert ask("link", daemon.endpoint, uid=0) == ["connected "]


@needs_root
def test_a_runtime_folder_of_another_user_is_reported(tmp_path, make_daemon):
    """A folder that cannot be searched: whose the daemon's own folder is cannot be seen."""
    (tmp_path / "run" / "kvserver").mkdir(parents=True)
    (tmp_path / "run").chmod(0o700)
    (line,) = ask("link", "", XDG_RUNTIME_DIR=str(tmp_path / "run"))
    assert_not_permitted(line)


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_rank_that_may_not_attach_is_reported_and_the_daemons_log_has_one_line(daemon, make_worker, mode):
    daemon.sockets[1].chmod(mode)
    worker = make_worker(daemon)
    lines = ask("attach", daemon.sockets[1], worker.hello.token)
    assert len(lines) == 3
    for line in lines:
        assert_not_permitted(line)
    refusal = f"refused a connection of uid {OTHER_UID}"
    if mode == 0o666:
        wait_until(lambda: refusal in daemon.log)
        assert "this daemon is of uid 0" in daemon.log
    assert daemon.log.count(refusal) == (mode == 0o666), "its engine tries again and again"


def test_refused_connection_is_in_vllms_metrics_as_not_permitted(make_engine, make_daemon, monkeypatch):
    """Root passes every check of the kernel, so the refusal is injected here where the other tests meet the kernel's."""
    daemon = make_daemon()
    why = "user 1000 may not connect: /run/kv belongs to user 0 (Permission denied); run engine and daemon as one user"
    monkeypatch.setattr("kvserver.adapters.common.link.barrier", lambda endpoint: why)
    engine = make_engine(daemon)
    engine.run()
    front = FrontEnd(engine)
    try:
        wait_until(lambda: front.reason == "not_permitted", 10, "the reason")
        assert "user 1000" in front.reasons[0][1]
        assert "user 0" in front.reasons[0][1]
    finally:
        front.close()
