"""`kvserver bench` on this machine: all parts, a folder, a shared store and storage that is not there.

Whether a ratio is normal depends on the machine and on what else runs: what is tested is that each is there, and follows from its numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.commands import run
from support.daemon import KVSERVER, wait_until
from support.ports import reserved_port
from support.valkey import ValkeyStore

SMALL = ("--memory", "16MiB")


def bench(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run("bench", *SMALL, *words, env=env, timeout=120)


def report(*words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Of which the exit code and the verdict agree."""
    ended = bench("--json", *words, env=env)
    assert ended.stderr == ""
    found: dict[str, Any] = json.loads(ended.stdout)
    verdicts = [one["normal"] for one in found["measurements"]]
    assert found["normal"] is (False not in verdicts) is (ended.returncode == 0)
    assert ended.returncode in (0, 1)
    for one in found["measurements"]:
        if one["ratio"] is not None:
            assert one["ceiling"]
            words_of_bound, number = one["bound"].rsplit(" ", 1)
            within = one["ratio"] >= float(number) if words_of_bound == "at least" else one["ratio"] <= float(number)
            assert one["normal"] is within
    return found


def test_memcpy_every_layout_and_lookups_are_measured_beside_ceilings() -> None:
    found = report("--copy-threads", "2")["measurements"]
    assert [one["what"] for one in found if one["part"] == "memcpy"] == ["1 thread, 16 MiB", "2 threads"]
    copies = [one["what"] for one in found if one["part"] == "copies"]
    for layout in ("per layer", "K and V apart", "head-major", "cross-layer", "MLA"):
        assert [what.split(",")[0] for what in copies if layout in what] == ["store", "load"]
    assert [one["ceiling"][:10] for one in found if one["part"] == "lookup"] == ["an echo of", "an echo of"]
    assert all(one["value"] > 0 for one in found)


def test_a_folder_is_measured_beside_its_own_file_system_and_left_as_it_was(tmp_path: Path, make_daemon) -> None:
    """Also where a running daemon has locked it."""
    url = f"file://{tmp_path}/tier?size=64MiB"
    daemon = make_daemon(l2=url)
    daemon.wait_for_tiers()
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    found = report("--only", "storage", env={"KVSERVER_L2": url})["measurements"]
    assert [one["what"].split(",")[0] for one in found] == ["put", "get"]
    assert all(one["value"] > 0 and "threads that write or read and hash" in one["ceiling"] for one in found)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert daemon.tier()["state"] == "ready"


def test_a_shared_store_is_measured_and_what_was_written_is_deleted(tmp_path: Path) -> None:
    with contextlib.closing(ValkeyStore(tmp_path)) as valkey:
        found = report("--only", "storage", "--l2", valkey.url_of("kvserver"))["measurements"]
        assert [one["what"].split(",")[0] for one in found] == ["put", "get"]
        assert all(one["value"] > 0 and "plain clients" in one["ceiling"] for one in found)
        assert not [name for name in valkey.objects() if "generations" not in name]


def test_storage_that_does_not_answer_is_not_normal_and_its_password_is_not_shown() -> None:
    reservation, port = reserved_port()
    with reservation:
        ended = bench("--only", "storage", "--l2", f"valkey://user:opensesame@127.0.0.1:{port}/0")
    assert ended.returncode == 1
    assert "NOT MEASURED" in ended.stdout
    assert "NOT normal: 1 of 1" in ended.stdout
    assert "opensesame" not in ended.stdout + ended.stderr


def test_storage_that_is_read_only_is_not_written_to(tmp_path: Path) -> None:
    ended = bench("--only", "storage", "--l2", "s3://bucket/prefix?endpoint=http://127.0.0.1:9&region=r&read_only=true")
    assert ended.returncode == 1
    assert "configured read-only" in ended.stdout


@pytest.mark.parametrize(
    "words", [("--memory", "100TiB"), ("--memory", "much"), ("--only", "all"), ("--l2", "ftp://x")]
)
def test_bad_arguments_and_too_little_memory_have_an_exit_code_of_their_own(words: tuple[str, str]) -> None:
    ended = bench(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr


def test_a_bench_that_is_ended_leaves_no_daemon_and_no_folder(tmp_path: Path) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = subprocess.Popen([KVSERVER, "bench", "--only", "lookup"], env=os.environ | {"TMPDIR": str(tmp_path)})
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda at=children: len(at.read_text().split()) == 2, what="its daemon and its echo run")
        pids = children.read_text().split()
        process.send_signal(number)
        assert process.wait(30) == code
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert list(tmp_path.iterdir()) == []
