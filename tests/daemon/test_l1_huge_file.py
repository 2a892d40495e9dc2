"""A daemon whose --l1-file is on hugetlbfs leaves L1 to the next one; its state is beside the endpoint."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until
from support.kept_l1 import hits, refusal, restart, start, store_prompt

from kvserver.config.settings import MiB

Make = Callable[..., Daemon]
COUNT = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
FREE = COUNT.with_name("free_hugepages")
PAGES = 48


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """Huge pages are the machine's: one run of these tests at a time, also from other checkouts."""
    with open(Path(tempfile.gettempdir()) / "kvserver-test-huge-pages.lock", "a") as lock:

        def locked() -> bool:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        wait_until(locked, 300, "no other run has huge pages")
        yield


@pytest.fixture(scope="module")
def mount(alone: None) -> Iterator[Path]:
    """A mounted hugetlbfs with PAGES free pages. Skipped where this process may not mount one, or reserve them."""
    folder, before = Path(tempfile.mkdtemp(prefix="kvs-")), int(COUNT.read_text()) if COUNT.exists() else 0
    reserved = False
    mounted = subprocess.run(["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", folder], capture_output=True)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"no huge pages: hugetlbfs cannot be mounted: {mounted.stderr.decode().strip()}")
    try:
        try:
            COUNT.write_text(str(before + PAGES))
            reserved = True
        except OSError as error:
            pytest.skip(f"no huge pages: they cannot be reserved: {error}")
        if int(COUNT.read_text()) < before + PAGES:
            pytest.skip("no huge pages: the kernel has too few whole ones")
        yield folder
    finally:
        if reserved:
            COUNT.write_text(str(max(0, int(COUNT.read_text()) - PAGES)))
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


@pytest.fixture
def path(mount: Path) -> Iterator[Path]:
    """Path of no file yet. REQUIRES: make_daemon is a later fixture of the test, as the pages are free once no process has the file."""
    before = FREE.read_text()
    yield mount / "l1"
    (mount / "l1").unlink(missing_ok=True)
    wait_until(lambda: FREE.read_text() == before, what="the pages are free")


@pytest.fixture
def make_daemon(make_daemon: Make) -> Make:
    return partial(make_daemon, l1_huge_pages="auto")


def state_of(daemon: Daemon, path: Path) -> Path:
    return daemon.folder / f"{str(path).strip('/').replace('/', '-')}.state"


def test_chunks_in_huge_pages_are_found_after_restarts_with_other_sizes(path: Path, make_daemon: Make) -> None:
    daemon = make_daemon(l1_file=path)
    assert daemon.status()["l1"]["huge_pages"] == "2MiB"
    prompts = [store_prompt(daemon) for _ in range(3)]
    for size in ("64MiB", "33MiB", "80MiB"):
        restart(daemon, l1_size=size)
        assert [hits(daemon, prompt) for prompt in prompts] == [3, 3, 3]
        assert path.stat().st_size == -(-daemon.status()["l1"]["size_bytes"] // (2 * MiB)) * 2 * MiB
        assert not state_of(daemon, path).exists()
    daemon.audit()
    assert daemon.terminate() == 0
    assert f"rm {path} {state_of(daemon, path)} frees them" in daemon.log
    assert state_of(daemon, path).stat().st_mode & 0o777 == 0o600


def test_crash_begins_empty_in_the_same_pages(path: Path, make_daemon: Make) -> None:
    daemon = make_daemon(l1_file=path)
    prompt = store_prompt(daemon)
    daemon.kill()
    daemon.start()
    assert hits(daemon, prompt) == 0
    daemon.audit()


def test_daemon_with_another_endpoint_voids_the_state(path: Path, make_daemon: Make) -> None:
    first = make_daemon(l1_file=path)
    prompt = store_prompt(first)
    assert first.terminate() == 0
    second = make_daemon(l1_file=path)
    assert second.http("/cache/clear", "POST")[0] == 200
    assert second.terminate() == 0
    start(first)
    assert hits(first, prompt) == 0
    assert "another daemon used the file after it" in first.log


def test_auto_size_is_that_of_before(path: Path, make_daemon: Make) -> None:
    daemon = make_daemon(l1_file=path)
    prompt = store_prompt(daemon)
    restart(daemon, l1_size="auto")
    assert daemon.status()["l1"]["size_bytes"] == 64 * MiB
    assert hits(daemon, prompt) == 3


def test_doctor_counts_the_pages_that_l1_has_already(path: Path, make_daemon: Make) -> None:
    daemon = make_daemon(l1_file=path)
    assert daemon.terminate() == 0
    command = [*daemon.program, "doctor", "--json", "--endpoint", daemon.endpoint, "--l1-file", str(path)]
    ended = subprocess.run([*command, "--l1-size", "90MiB"], capture_output=True, text=True, timeout=120)
    texts = {row["check"]: row["text"] for row in json.loads(ended.stdout)}
    assert texts["L1 memory"] == "--l1-size 90MiB is 90 MiB in huge pages of 2MiB that are reserved"
    assert f"rm {path} {state_of(daemon, path)} frees it" in texts["L1 file"]


def test_too_few_huge_pages_are_refused_with_the_number_that_is_missing(path: Path, make_daemon: Make) -> None:
    line = refusal(make_daemon(start=False, l1_file=path, l1_size="1GiB"))
    assert "needs 512 huge pages" in line
    assert "nr_hugepages" in line


@pytest.mark.parametrize("pages", ["off", "transparent", "1GiB"])
def test_other_pages_than_those_of_the_file_system_are_refused(path: Path, make_daemon: Make, pages: str) -> None:
    line = refusal(make_daemon(start=False, l1_file=path, l1_huge_pages=pages))
    assert f"its huge pages have {2 * MiB} bytes" in line


def test_endpoint_without_a_folder_for_the_state_is_refused(path: Path, make_daemon: Make) -> None:
    path.touch(0o600)
    line = refusal(make_daemon(start=False, l1_file=path, endpoint="tcp://127.0.0.1:0"))
    assert "beside the endpoint" in line


def test_memory_is_free_again_once_the_file_is_removed(path: Path, make_daemon: Make) -> None:
    before = int(FREE.read_text())
    daemon = make_daemon(l1_file=path)
    assert daemon.terminate() == 0
    assert int(FREE.read_text()) == before - 32
    os.unlink(path)
    assert int(FREE.read_text()) == before
