"""What `kvserver doctor` reports of the tiers of L2: folders that are well and that are not, servers that answer and that do not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.mooncake import MooncakeStore
from support.ports import reserved_port
from support.s3 import CREDENTIALS, S3Server
from support.valkey import ValkeyStore

from kvserver.cli import checks, checks_storage
from kvserver.cli.checks import Finding, Level
from kvserver.config import Settings
from kvserver.config.settings import GiB, MiB
from kvserver.l2.remote import mooncake, s3, valkey
from kvserver.protocol import ConfigError

LOCAL = "/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\nhost:/x /srv/our\\040files nfs4 rw 0 0\n"


class Machine(checks.Machine):
    def __init__(self, *urls: str, free: int = GiB, mounts: str = LOCAL, **values: Any) -> None:
        room = SimpleNamespace(f_frsize=4096, f_blocks=2 * free // 4096, f_bavail=free // 4096)
        super().__init__(Settings(l2=urls), environ={}, statvfs=lambda path: room, **values)
        self.mounts = mounts

    def read(self, path: str) -> str:
        return self.mounts if path == "proc/mounts" else ""


def finding(level: Level, machine: Machine, *words: str) -> Finding:
    found = checks_storage.storage(machine)
    assert found.level is level, found
    assert [word for word in words if word not in f"{found.text} -> {found.fix}"] == [], found
    assert bool(found.fix) == (level is not Level.OK)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "l2"
    path.mkdir(mode=0o700)
    return path


def url(folder: Path, parameters: str = "") -> str:
    return f"file://{folder}?size=512MiB{parameters}"


# ---- folders --------------------------------------------------------------------------------------


def test_without_tiers_all_is_well() -> None:
    finding(Level.OK, Machine(), "memory only")


def test_a_folder_with_space_is_well_whether_or_not_it_is_there(folder: Path) -> None:
    finding(Level.OK, Machine(url(folder)), "512 MiB of 1.0 GiB free, on ext4")
    folder.rmdir()
    finding(Level.OK, Machine(url(folder)), "512 MiB of 1.0 GiB free")
    assert not folder.exists(), "nothing is made"


def test_a_folder_that_cannot_be_made_is_a_problem(folder: Path) -> None:
    missing = folder / "a" / "b"
    finding(Level.PROBLEM, Machine(url(missing)), str(missing.parent), f"install -d -m 700 -o {os.getuid()} {missing}")
    closed = Machine(url(folder / "a"), access=lambda path, mode: False)
    finding(Level.PROBLEM, closed, "no folder in which it can be made")
    finding(Level.PROBLEM, Machine(url(missing, "&read_only=true")), "leave read_only away")


def test_too_little_space_is_a_problem_with_the_size_that_fits(folder: Path) -> None:
    finding(Level.PROBLEM, Machine(url(folder), free=100 * MiB), "100 MiB of 512 MiB", "?size=90MiB")
    (folder / "data").write_bytes(b"x" * (8 << 20))  # what the tier has itself is not missing
    finding(Level.PROBLEM, Machine(url(folder), free=503 * MiB), "511 MiB of 512 MiB")
    finding(Level.OK, Machine(url(folder), free=504 * MiB))


def test_a_folder_that_others_may_change_or_own_is_a_problem(folder: Path) -> None:
    folder.chmod(0o770)
    finding(Level.PROBLEM, Machine(url(folder)), "other users may write", f"chmod 700 {folder}")
    folder.chmod(0o700)
    finding(Level.PROBLEM, Machine(url(folder), uid=os.getuid() + 1), f"belongs to uid {os.getuid()}")


def test_a_link_or_a_file_is_no_folder(folder: Path, tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(folder)
    file.touch()
    for path in (link, file):
        finding(Level.PROBLEM, Machine(url(path)), "no folder")


def test_a_folder_that_cannot_be_written_serves_what_it_has(folder: Path) -> None:
    def access(path: Path, mode: int) -> bool:
        return False

    finding(Level.PROBLEM, Machine(url(folder), access=access), "not writable")
    finding(Level.PROBLEM, Machine(url(folder, "&read_only=true"), access=access), "no records")
    (folder / "data").write_bytes(b"x" * 4096)
    finding(Level.WARNING, Machine(url(folder), access=access), "nothing is written")
    finding(Level.OK, Machine(url(folder, "&read_only=true"), access=access), "read only")


@pytest.mark.parametrize(("kind", "words"), [("tmpfs", "which is memory"), ("nfs4", "no local disk")])
def test_memory_and_network_file_systems_are_warned_of(folder: Path, kind: str, words: str) -> None:
    finding(Level.WARNING, Machine(url(folder), mounts=f"{LOCAL}x {folder.parent} {kind} rw 0 0\n"), words)
    finding(Level.OK, Machine(url(folder), mounts=f"{LOCAL}x {folder.parent}-other {kind} rw 0 0\n"), "ext4")
    finding(Level.OK, Machine(url(folder), mounts=""), "a disk")


def test_several_tiers_are_as_bad_as_the_worst(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    both = Machine(url(folder), f"file://{other}?size=2GiB")
    finding(Level.PROBLEM, both, f"file://{folder}: 512 MiB of", f"file://{other}: 1.0 GiB of 2.0 GiB", "?size=921MiB")


# ---- servers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyStore]:
    found = ValkeyStore(tmp_path_factory.mktemp("valkey"), requirepass="right-secret")
    yield found
    found.close()


def test_valkey_that_answers_is_well_and_a_refused_password_is_a_warning(
    server: ValkeyStore, capfd: pytest.CaptureFixture[str]
) -> None:
    right = server.url_of("p")
    finding(Level.OK, Machine(right), "valkey://127.0.0.1:", "answers")
    wrong = finding(Level.WARNING, Machine(right.replace("right-secret", "wrong-secret")), "does not serve")
    assert "secret" not in f"{wrong.text} {wrong.fix} {capfd.readouterr()}"
    assert server.objects() == [], "nothing is written"


def test_mooncake_master_that_answers_is_well_and_a_silent_one_is_a_warning(tmp_path: Path) -> None:
    store = MooncakeStore(tmp_path)
    try:
        finding(Level.OK, Machine(store.url_of("p")), "mooncake://127.0.0.1:", "answers")
        assert store.names() == []
        store.kill()
        finding(
            Level.WARNING, Machine(store.url_of("p", "timeout=500ms")), "does not serve: the master does not answer"
        )
    finally:
        store.close()


def test_a_server_that_does_not_answer_is_a_warning_and_a_problem_if_it_is_required() -> None:
    reservation, port = reserved_port()
    with reservation:
        nobody = f"valkey://127.0.0.1:{port}/p?timeout=500ms"
        finding(Level.WARNING, Machine(nobody), "does not serve")
        finding(Level.PROBLEM, Machine(f"{nobody}&required=true"), "does not serve")


def test_bucket_that_answers_is_well_and_a_missing_one_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in CREDENTIALS.items():
        monkeypatch.setenv(variable, value)
    bucket = S3Server()
    try:
        there = bucket.url_of("p")
        finding(Level.OK, Machine(there), "s3://", "answers")
        name = there.split("/")[2]
        finding(Level.WARNING, Machine(there.replace(f"//{name}/", "//no-such-bucket/", 1)), "bucket does not exist")
        assert bucket.objects() == []
    finally:
        bucket.close()


@pytest.mark.parametrize("kind", ["valkey", "s3", "mooncake"])
def test_a_missing_client_is_a_problem_with_the_command(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    module = {"valkey": valkey, "s3": s3, "mooncake": mooncake}[kind]

    def missing(tier: Any) -> None:
        raise ConfigError(f"--l2 {tier.shown} needs a client: pip install its-client")

    monkeypatch.setattr(module, "require_client", missing)
    finding(Level.PROBLEM, Machine(f"{kind}://127.0.0.1/p"), "needs a client: pip install its-client")
