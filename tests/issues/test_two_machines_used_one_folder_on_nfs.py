"""Two machines could use one folder on NFS, which shows other machines no lock of a folder; where folders have no locks none could."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest
from support.file_tiers import PAGE, FileRig, name_of

from kvserver.l2 import TierOutcome
from kvserver.protocol import ConfigError


def flock_of_nfs(monkeypatch: pytest.MonkeyPatch, folder_error: int, file_error: int = 0) -> None:
    """A file system whose folders (or files, too) cannot be locked: each flock of one ends with this errno."""
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if number := folder_error if stat.S_ISDIR(os.fstat(fd).st_mode) else file_error:
            raise OSError(number, os.strerror(number))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_folder_that_cannot_be_locked_is_locked_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    flock_of_nfs(monkeypatch, number)
    rig = FileRig(tmp_path / "tier").opened()
    assert rig.put(name_of(1), PAGE) is TierOutcome.DONE
    with pytest.raises(ConfigError, match="another daemon uses it"):
        FileRig(tmp_path / "tier")
    rig.close()
    rig = FileRig(tmp_path / "tier").opened()
    assert rig.holds(1) == [1]
    rig.close()


def test_a_daemon_that_sees_only_the_lock_of_the_file_is_refused(tmp_path: Path) -> None:
    """As another machine on NFS: the lock of the folder is seen on its own machine only."""
    rig = FileRig(tmp_path / "tier").opened()
    with (tmp_path / "tier/lock").open("r+") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    rig.close()
    with (tmp_path / "tier/lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(ConfigError, match="another daemon uses it"):
            FileRig(tmp_path / "tier")


def test_a_daemon_of_an_earlier_version_is_refused_by_the_lock_of_the_folder(tmp_path: Path) -> None:
    rig = FileRig(tmp_path / "tier").opened()
    folder = os.open(tmp_path / "tier", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(folder)
        rig.close()


def test_a_folder_without_any_locks_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock_of_nfs(monkeypatch, errno.ENOLCK, errno.ENOLCK)
    with pytest.raises(ConfigError, match="its file system has no locks"):
        FileRig(tmp_path / "tier")
    opened = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not any(os.path.realpath(path).startswith(str(tmp_path)) for path in opened), "a descriptor is left open"
