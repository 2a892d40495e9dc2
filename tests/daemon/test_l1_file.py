"""A daemon with --l1-file leaves L1 to the next one: what it keeps, what it drops, and that no wrong byte is served."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.kept_l1 import hits, refusal, restart, start, state_of, store_prompt, tail_blocks
from support.memory import two_groups
from support.registration import identity
from support.worker import Worker, make_keys

from kvserver._native import HostRegion
from kvserver.protocol import Durability, ObjectGroup
from kvserver.restart import L1File

Make = Callable[..., Daemon]


# ---- kept ---------------------------------------------------------------------------------------


def test_chunks_are_found_with_their_bytes_after_a_restart(kept: Daemon) -> None:
    prompts = [store_prompt(kept) for _ in range(3)]
    used = kept.status()["l1"]["used_bytes"]
    for _ in range(3):
        restart(kept)
        l1 = kept.status()["l1"]
        assert (l1["chunks"], l1["used_bytes"]) == (9, used)
        assert [hits(kept, prompt) for prompt in prompts] == [3, 3, 3]
    kept.audit()


def test_oldest_chunks_still_leave_first_after_a_restart(make_daemon: Make, path: Path) -> None:
    daemon = make_daemon(l1_file=path, l1_size="256KiB", eviction_policy="lru")
    old, young = store_prompt(daemon), store_prompt(daemon)
    restart(daemon)
    while daemon.status()["l1"]["evictions"] < 3:
        store_prompt(daemon, 1)
    assert (hits(daemon, old) < 3, hits(daemon, young)) == (True, 3)
    daemon.audit()


def test_chunks_of_several_ranks_and_groups_are_kept(kept: Daemon) -> None:
    groups = (ObjectGroup("full", (0,), 16), ObjectGroup("window", (1,), 16, 17))
    engine: dict[str, Any] = {"geometry": two_groups(), "groups": groups, "world_size": 2}
    keys = make_keys(2)

    def ranks() -> list[Worker]:
        return [Worker(kept.endpoint, rank=rank, instance_id="e", incarnation="i", **engine) for rank in range(2)]

    def close(workers: list[Worker]) -> None:
        for worker in workers:
            worker.close()

    workers = ranks()
    blocks = {group: list(range(1, 1 + 2 * workers[0].object_blocks(group))) for group in range(2)}
    for worker in workers:
        for group in range(2):
            worker.store(keys, blocks[group], group=group)
    close(workers)
    restart(kept)
    workers = ranks()
    assert workers[0].lookup(keys) == 2
    for worker in workers:
        for group in range(2):
            assert worker.load(keys, blocks[group], group=group).chunks == 2
    close(workers)
    kept.audit()


def test_engine_stores_and_evicts_beside_adopted_chunks(make_daemon: Make, path: Path) -> None:
    daemon = make_daemon(l1_file=path, l1_size="1MiB")
    for _ in range(12):
        store_prompt(daemon)
    restart(daemon)
    assert daemon.status()["l1"]["chunks"] > 12
    prompts = [store_prompt(daemon) for _ in range(12)]
    assert hits(daemon, prompts[-1]) == 3
    daemon.audit()
    daemon.clear_and_check()


def test_chunks_that_are_kept_are_matched_and_counted(kept: Daemon) -> None:
    prompt = store_prompt(kept)
    restart(kept)
    with Worker(kept.endpoint) as worker:
        worker.send(worker.description())
        key = prompt.keys[0]
        wait_until(lambda: kept.metric("kvserver_l1_chunks") == 3, what="the chunks are counted")
        assert worker.lookup([key]) == 1
    assert kept.status()["events"]["published_types"]["ChunksStored"] == 1


def test_second_restart_right_after_ready_loses_nothing(make_daemon: Make, path: Path) -> None:
    daemon = make_daemon(l1_file=path)
    prompts = [store_prompt(daemon, 15) for _ in range(6)]
    for _ in range(3):
        assert daemon.terminate() == 0
        daemon.start()
    restart(daemon)
    assert [hits(daemon, prompt) for prompt in prompts] == [15] * 6
    daemon.audit()


def test_memory_that_stays_is_named_by_the_last_line_and_by_doctor(kept: Daemon, path: Path) -> None:
    store_prompt(kept)
    assert kept.terminate() == 0
    last = kept.log.splitlines()[-1]
    assert f"{os.stat(path).st_blocks * 512} bytes of memory stay in {path}, with 3 chunks" in last
    command = [*kept.program, "doctor", "--json", "--l1-file", str(path), "--l1-size", "64MiB"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120).stdout)
    (text,) = [row["text"] for row in found if row["check"] == "L1 file"]
    assert f"{path} has 64 MiB of memory" in text
    assert f"rm {path} {state_of(path)} frees it" in text


def huge_bytes(pid: int, file: Path) -> int:
    """Memory of the file that this process maps by huge pages."""
    maps = Path(f"/proc/{pid}/smaps").read_text()
    mapped = re.search(rf" {file}\n.*?ShmemPmdMapped: +(\d+) kB", maps, re.DOTALL)
    assert mapped
    return int(mapped[1]) << 10


@pytest.fixture
def huge_folder(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs that has huge pages on advice."""
    options = "huge=advise,size=64m,mode=700"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "kvs", tmp_path], capture_output=True).returncode:
        pytest.skip("no huge pages: this user may not mount a tmpfs with them")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_tmpfs_that_has_huge_pages_on_advice_gives_them_to_l1(make_daemon: Make, huge_folder: Path) -> None:
    probe, size = huge_folder / "probe", 32 << 20
    probe.touch()
    os.truncate(probe, size)
    fd = os.open(probe, os.O_RDWR)
    region = HostRegion(size, fd=fd)
    os.close(fd)
    if not region.populate(0, size) or huge_bytes(os.getpid(), probe) < size:
        pytest.skip("no huge pages: the kernel has no 32 MiB of them left for a tmpfs")
    del region
    probe.unlink()

    daemon = make_daemon(l1_file=huge_folder / "l1", l1_size=size)
    assert daemon.process is not None
    assert huge_bytes(daemon.process.pid, huge_folder / "l1") >= size // 2
    prompt = store_prompt(daemon)
    restart(daemon)
    assert hits(daemon, prompt) == 3


# ---- dropped ------------------------------------------------------------------------------------


def test_nothing_is_kept_after_a_crash(kept: Daemon, path: Path) -> None:
    prompt = store_prompt(kept)
    restart(kept)
    assert not state_of(path).exists()
    kept.kill()
    start(kept)
    assert hits(kept, prompt) == 0
    assert "no daemon left a state" in kept.log


def test_chunks_that_only_one_start_of_an_engine_could_use_are_dropped(kept: Daemon) -> None:
    other = {"identity": identity(model="other@1")}
    private, durable = store_prompt(kept, durability=Durability.PROCESS), store_prompt(kept, **other)
    restart(kept)
    assert (hits(kept, private), hits(kept, durable, **other)) == (0, 3)
    kept.audit()


def test_cleared_chunks_do_not_return(kept: Daemon) -> None:
    prompt = store_prompt(kept)
    assert kept.http("/cache/clear", "POST")[0] == 200
    restart(kept)
    assert hits(kept, prompt) == 0


@pytest.mark.parametrize("size", ["32MiB", "128MiB"])
def test_other_size_keeps_what_fits(kept: Daemon, path: Path, size: str) -> None:
    prompt = store_prompt(kept)
    restart(kept, l1_size=size)
    assert hits(kept, prompt) == 3
    assert os.stat(path).st_size == kept.status()["l1"]["size_bytes"]
    kept.audit()


def test_chunks_beyond_a_smaller_l1_are_dropped(make_daemon: Make, path: Path) -> None:
    daemon = make_daemon(l1_file=path, l1_size="1MiB")
    prompts = [store_prompt(daemon) for _ in range(12)]
    restart(daemon, l1_size="512KiB")
    found = [hits(daemon, prompt) for prompt in prompts]
    assert 0 < sum(found) < 36
    restart(daemon, l1_size="1MiB")
    assert [hits(daemon, prompt) for prompt in prompts] == found
    daemon.audit()


@pytest.mark.parametrize(("before", "after"), [("lru", "slru"), ("slru", "lru")])
def test_other_policy_keeps_chunks(make_daemon: Make, path: Path, before: str, after: str) -> None:
    daemon = make_daemon(l1_file=path, eviction_policy=before)
    prompt = store_prompt(daemon)
    assert hits(daemon, prompt) == 3
    restart(daemon, eviction_policy=after)
    assert hits(daemon, prompt) == 3
    daemon.audit()


@pytest.mark.parametrize("flags", [{"l1_huge_pages": "off"}, {"share": "test/model=0.5"}, {"serving": "stores-off"}])
def test_other_settings_keep_chunks(kept: Daemon, flags: dict[str, str]) -> None:
    prompt = store_prompt(kept)
    restart(kept, **flags)
    assert hits(kept, prompt) == 3
    kept.audit()


def test_storage_that_comes_and_goes_keeps_chunks(kept: Daemon) -> None:
    prompt = store_prompt(kept)
    restart(kept, l2=f"file://{kept.folder}/tier?size=16MiB")
    assert hits(kept, prompt) == 3
    del kept.flags["l2"]
    restart(kept)
    assert hits(kept, prompt) == 3
    kept.audit()


@pytest.mark.parametrize("numa", ["off", "bind:0"])
def test_other_memory_nodes_keep_chunks(kept: Daemon, numa: str) -> None:
    prompt = store_prompt(kept)
    restart(kept, l1_numa=numa)
    assert hits(kept, prompt) == 3
    kept.audit()


def test_blocks_of_a_last_chunk_are_kept_and_dropped_once_tails_are_off(kept: Daemon) -> None:
    engine: dict[str, Any] = {"groups": (ObjectGroup("full", (0,), 16),)}
    prompt, tail = store_prompt(kept, 2, **engine), make_keys(3)
    with Worker(kept.endpoint, tails=True, **engine) as worker:
        worker.store(tail, [20, 30, 40], group=1, first_chunk=8, after=prompt.keys[1])

    assert tail_blocks(kept, prompt, tail, **engine) == 3
    restart(kept)
    assert tail_blocks(kept, prompt, tail, **engine) == 3
    restart(kept, tails="off")
    assert kept.status()["l1"]["tail_blocks"] == 0
    assert "3 of 5 chunks of L1 are of no use with other --chunk-tokens or --tails" in kept.log
    assert hits(kept, prompt, **engine) == 2
    restart(kept, tails="on")
    assert (hits(kept, prompt, **engine), tail_blocks(kept, prompt, tail, **engine)) == (2, 0)
    kept.audit()


def test_late_store_of_an_engine_that_became_private_costs_no_chunks(kept: Daemon) -> None:
    prompt = store_prompt(kept)
    late = store_prompt(kept, durability=Durability.PROCESS)
    restart(kept)
    assert (hits(kept, prompt), hits(kept, late)) == (3, 3)
    kept.audit()


def test_chunks_of_another_chunk_size_are_dropped(kept: Daemon) -> None:
    store_prompt(kept)
    restart(kept, chunk_tokens=32)
    assert kept.status()["l1"]["chunks"] == 0
    assert "no use with other --chunk-tokens" in kept.log
    kept.audit()


# ---- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [4, pytest.param(25, marks=pytest.mark.long)])
def test_chunks_with_flipped_bits_are_not_served(kept: Daemon, path: Path, rounds: int) -> None:
    source = random.Random(rounds)
    for _ in range(rounds):
        prompts = [store_prompt(kept, 1) for _ in range(80)]
        used = kept.status()["l1"]["used_bytes"]
        assert kept.terminate() == 0
        for _ in range(40):
            flip(path, source.randrange(used * 8))
        start(kept)
        lost = 80 - sum(hits(kept, prompt) for prompt in prompts)
        assert 20 < lost <= 40
        assert f"{lost} of them damaged" in kept.log
        kept.clear_and_check()


def test_state_with_a_flipped_bit_is_not_believed(kept: Daemon, path: Path) -> None:
    for seed in range(3):
        prompt = store_prompt(kept)
        assert kept.terminate() == 0
        flip(state_of(path), random.Random(seed).randrange(state_of(path).stat().st_size * 8))
        start(kept)
        assert hits(kept, prompt) == 0
        assert "L1 begins empty" in kept.log


def flip(file: Path, bit: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(bit // 8)
        (byte,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def test_truncated_file_begins_empty(kept: Daemon, path: Path) -> None:
    prompt = store_prompt(kept)
    assert kept.terminate() == 0
    os.truncate(path, 0)
    start(kept)
    assert hits(kept, prompt) == 0
    kept.audit()


def test_replaced_file_begins_empty(kept: Daemon, path: Path) -> None:
    prompt = store_prompt(kept)
    assert kept.terminate() == 0
    path.rename(path.with_name("old"))
    start(kept)
    assert "the file was replaced" in kept.log
    assert hits(kept, prompt) == 0


def test_state_is_void_once_another_daemon_used_the_file_with_a_state_elsewhere(
    kept: Daemon, make_daemon: Make, path: Path
) -> None:
    prompt = store_prompt(kept)
    assert kept.terminate() == 0
    (path.parent / "other").mkdir(0o700)
    other_path = path.parent / "other" / "l1"
    other_path.hardlink_to(path)
    other = make_daemon(l1_file=other_path)
    assert other.http("/cache/clear", "POST")[0] == 200
    assert other.terminate() == 0
    start(kept)
    assert hits(kept, prompt) == 0
    assert "another daemon used the file after it" in kept.log
    prompt = store_prompt(kept)
    restart(kept)
    assert hits(kept, prompt) == 3


def test_start_that_is_refused_costs_no_chunk(kept: Daemon, make_daemon: Make) -> None:
    prompt = store_prompt(kept)
    assert kept.terminate() == 0
    port = make_daemon().http_port
    for flags in (
        {"http_port": port},
        {"http_port": port, "l1_size": "80MiB"},
        {"http_port": port, "l1_size": "48MiB"},
    ):
        before = dict(kept.flags)
        kept.flags |= flags
        assert "http" in refusal(kept)
        kept.flags = before
    start(kept)
    assert hits(kept, prompt) == 3


# ---- refused ------------------------------------------------------------------------------------


def test_second_daemon_on_the_file_is_refused(kept: Daemon, make_daemon: Make, path: Path) -> None:
    prompt = store_prompt(kept)
    assert "another daemon uses it" in refusal(make_daemon(start=False, l1_file=path))
    assert hits(kept, prompt) == 3


def test_file_on_a_disk_is_refused(make_daemon: Make) -> None:
    daemon = make_daemon(start=False)
    daemon.flags["l1_file"] = daemon.folder / "l1"
    assert "name a file on tmpfs or hugetlbfs" in refusal(daemon)


def test_file_that_others_may_use_is_refused(make_daemon: Make, path: Path) -> None:
    path.touch(0o600)
    path.chmod(0o640)
    assert "chmod 600" in refusal(make_daemon(start=False, l1_file=path))


def test_link_is_refused(make_daemon: Make, path: Path) -> None:
    path.symlink_to(path.with_name("other"))
    assert f"--l1-file {path}" in refusal(make_daemon(start=False, l1_file=path))


def test_file_system_without_the_memory_is_refused(make_daemon: Make, path: Path) -> None:
    left = os.statvfs(path.parent)
    line = refusal(make_daemon(start=False, l1_file=path, l1_size=left.f_blocks * left.f_frsize + (1 << 30)))
    assert "--l1-size" in line


def test_start_that_is_refused_leaves_a_larger_file_as_it_is(path: Path) -> None:
    first = L1File(str(path))
    first.resize(4 << 20)
    os.close(first.fd)
    second = L1File(str(path))
    second.resize(1 << 20)
    assert path.stat().st_size == 4 << 20
    second.shrink()
    assert path.stat().st_size == 1 << 20
    os.close(second.fd)


def test_state_that_finds_no_room_leaves_no_part_of_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = L1File(str(path))

    def no_room(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match="No space"):
        file.write_state([b"state"])
    assert sorted(path.parent.iterdir()) == [path]
    os.close(file.fd)
