"""In /tmp any user could make the folder of a user's default endpoint first, and answer engines in the daemon's place."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.daemon import Daemon

from kvserver.protocol import default_endpoint, stranger_at


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the default endpoint."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "kvserver").mkdir(mode=0o700)
    return tmp_path / "kvserver"


def refusal(make_daemon: Callable[..., Daemon]) -> str:
    daemon = make_daemon(start=False, endpoint=default_endpoint())
    ended = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_another_user_made_is_refused(make_daemon: Callable[..., Daemon], folder: Path) -> None:
    os.chown(folder, 65534, 65534)
    assert f"{folder} belongs to user 65534" in refusal(make_daemon)
    assert "65534" in stranger_at(default_endpoint()), "which engines ask, too"
    away = folder.with_name("away")
    folder.rename(away)
    folder.symlink_to(away)
    os.lchown(folder, 65534, 65534)
    os.chown(away, 0, 0)
    assert f"{folder} belongs to user 65534" in refusal(make_daemon), "a link may be turned later"


def test_a_folder_that_every_user_may_write_to_is_refused(make_daemon: Callable[..., Daemon], folder: Path) -> None:
    folder.chmod(0o777)
    assert "may be written by all users" in refusal(make_daemon)


def test_default_folder_of_our_own_and_a_named_folder_are_accepted(folder: Path, tmp_path: Path) -> None:
    assert stranger_at(default_endpoint()) == ""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    assert stranger_at(f"ipc://{tmp_path}/shared/kv.sock") == ""
    folder.rmdir()
    assert stranger_at(default_endpoint()) == "", "the daemon makes it"
