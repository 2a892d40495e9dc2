"""`kvserver status` as an operator looks at it: the table, and the watch on pipes and on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess

import pytest
from msgspec.structs import replace
from support.commands import run
from support.daemon import KVSERVER, wait_until

from kvserver.cli import status as cli_status
from kvserver.protocol.status import (
    AccountingStatus,
    DaemonStatus,
    DirectionStatus,
    GpuStatus,
    InstanceStatus,
    L1Status,
    TierStatus,
    TotalsStatus,
)


@contextlib.contextmanager
def watching(daemon, *words, stdout=subprocess.PIPE):
    command = [KVSERVER, "status", "--http-port", str(daemon.http_port), "--watch", "0.2", *words]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
    try:
        process = subprocess.Popen(command, stdout=stdout, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def lines_of_table(daemon):
    shown = run("status", "--http-port", str(daemon.http_port))
    assert (shown.returncode, shown.stderr) == (0, "")
    return shown.stdout.splitlines()


def test_the_table_has_a_row_per_instance_under_its_headings(make_daemon, make_worker):
    daemon = make_daemon()
    workers = [make_worker(daemon), make_worker(daemon)]
    workers[0].round_trip()
    workers[0].end_request(prompt_tokens=1000, local_tokens=250, loaded_tokens=600)
    wait_until(lambda: daemon.status()["totals"]["prompt_tokens"]["computed"] == 150)
    lines = lines_of_table(daemon)
    assert "prompts 1000 tokens: 25.0% L0, 60.0% L1, 15.0% computed" in lines
    number = next(number for number, line in enumerate(lines) if line.startswith("instance "))
    heads = lines[number].split()
    assert heads == [
        "instance",
        "model",
        "engine",
        "ranks",
        "running",
        "waiting",
        "prompt",
        "tokens",
        "L0",
        "L1",
        "computed",
        "stored",
        "loaded",
        "failed",
        "seen",
    ]
    rows = {line.split()[0]: line.split() for line in lines[number + 1 :]}
    assert rows.keys() == {worker.instance_id for worker in workers}
    counts = next(i for i in daemon.status()["instances"] if i["instance_id"] == workers[0].instance_id)["requests"]
    row = rows[workers[0].instance_id]
    assert row[1:10] == [
        "test/model",
        "-",
        "1/1",
        "-",
        "-",
        "1000",
        "25.0%",
        "60.0%",
        "15.0%",
    ]  # it reported no engine stats
    assert cli_status.size(counts["stored_bytes"]) in " ".join(row)
    assert rows[workers[1].instance_id][6:10] == ["0", "-", "-", "-"]  # no prompt was reported, which is no share of 0%


def test_a_daemon_without_engines_states_so(make_daemon):
    assert lines_of_table(make_daemon())[-1] == "no engine is connected"


def test_an_instance_that_waits_for_its_ranks_is_marked(make_daemon, make_worker):
    daemon = make_daemon()
    make_worker(daemon, world_size=2)
    assert "1/2 WAITING" in lines_of_table(daemon)[-1]


def test_a_watch_on_a_pipe_prints_table_after_table_and_ctrl_c_ends_it_well(make_daemon):
    daemon = make_daemon()
    with watching(daemon) as process:
        heads = [line for line, _ in zip(process.stdout, range(18), strict=False) if f"boot {daemon.boot_id}" in line]
        assert len(heads) >= 3
        assert "\x1b" not in "".join(heads)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 0


def test_a_watch_in_json_is_one_object_per_line(make_daemon):
    daemon = make_daemon()
    with watching(daemon, "--json") as process:
        for _ in range(3):
            assert json.loads(process.stdout.readline())["boot_id"] == daemon.boot_id


def test_a_watch_on_a_terminal_redraws_in_place(make_daemon):
    daemon = make_daemon()
    reader, terminal = pty.openpty()
    seen = ""

    def drawn():
        nonlocal seen
        seen += os.read(reader, 65536).decode()
        return seen.count("\x1b[H\x1b[J") >= 3

    with watching(daemon, stdout=terminal) as process:
        wait_until(drawn)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 0
    os.close(terminal)
    os.close(reader)
    assert daemon.boot_id in seen.split("\x1b[H\x1b[J")[1]


def test_a_watch_outlives_the_daemon_and_finds_the_next_one(make_daemon):
    daemon = make_daemon()
    with watching(daemon) as process:
        daemon.kill()
        assert any("no daemon answers" in line for line, _ in zip(process.stdout, range(40), strict=False))
        daemon.flags["http_port"] = daemon.http_port
        daemon.start()
        assert any(daemon.boot_id in line for line, _ in zip(process.stdout, range(40), strict=False))


def test_a_watch_whose_reader_goes_away_ends_quietly(make_daemon):
    daemon = make_daemon()
    command = f"{KVSERVER} status --http-port {daemon.http_port} --watch 0.1 | head -n 1"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=20)
    assert daemon.boot_id in ended.stdout
    assert ended.stderr == ""


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan"])
def test_a_watch_of_no_sensible_interval_is_refused(seconds):
    ended = run("status", "--watch", seconds)
    assert ended.returncode == 2
    assert "--watch" in ended.stderr


def status_with(**changes):
    l1 = L1Status(size_bytes=4096, used_bytes=1024, pinned_bytes=1024, chunks=1, policy="lru")
    return replace(DaemonStatus(version="1", ready=True, uptime_seconds=90061, boot_id="b", l1=l1), **changes)


def test_the_accounting_is_shown_only_when_it_does_not_balance():
    assert "AUDIT" not in cli_status.table(status_with())
    assert "AUDIT  the accounting did not balance in 2 audits" in cli_status.table(
        status_with(books=AccountingStatus(unbalanced=2, tickets=3))
    )


def test_each_tier_has_a_line_that_states_its_use_or_why_it_is_out_of_use():
    tier = TierStatus(
        name="file", state="ready", size_bytes=4096, used_bytes=1024, objects=3, hits=5, misses=7, corrupt=1, timeouts=2,
        errors=3, written_bytes=2048, read_bytes=10, queue_bytes=5, dropped={"queue": 2, "space": 4},
    )  # fmt: skip
    remote = TierStatus(name="valkey", state="read_only", objects=9)
    out = TierStatus(name="s3", state="unavailable", failure="no route")
    opening = TierStatus(name="s3-2", state="opening")
    lines = cli_status.table(status_with(l2=[tier, remote, out, opening])).splitlines()
    assert lines[2:6] == [
        "L2     [#####...............] 1.0 KiB of 4.0 KiB, file: 3 objects, 2.0 KiB written, 10 B read, 5 hits, 7 misses, "
        "1 corrupt, 5 failed, 6 dropped, 5 B queued",
        "L2     valkey, read only: 9 objects, 0 B written, 0 B read, 0 hits, 0 misses, 0 corrupt, 0 failed, 0 dropped, 0 B queued",
        "L2     s3 is UNAVAILABLE: no route",
        "L2     s3-2 is OPENING",
    ]


def test_l2_is_shown_where_something_came_from_there():
    tokens = {"l0": 1, "l1": 1, "l2": 2, "computed": 4}
    shown = cli_status.table(status_with(totals=TotalsStatus(prompt_tokens=tokens)))
    assert "prompts 8 tokens: 12.5% L0, 12.5% L1, 25.0% L2, 50.0% computed" in shown


def test_an_engine_whose_kv_stays_on_its_machine_is_named_beside_a_tier_of_many():
    engine = InstanceStatus(instance_id="e", machine_only="weights: samples of the files name them")
    file, remote = (TierStatus(name=kind, kind=kind, state="ready") for kind in ("file", "valkey"))
    assert "LOCAL" not in cli_status.table(status_with(instances=[engine], l2=[file]))
    shown = cli_status.table(status_with(instances=[engine], l2=[file, remote]))
    assert "LOCAL  e uses L2 in files only: weights: samples of the files name them" in shown


def test_a_status_that_is_old_states_so():
    shown = cli_status.table(status_with(ready=False, stale_seconds=7.25))
    assert "NOT READY" in shown
    assert "STALE  the event loop has not answered for 7.2 s" in shown


def test_numbers_are_shown_as_people_read_them():
    assert "[#####...............] 1.0 KiB of 4.0 KiB" in cli_status.table(status_with())
    assert "up 1 d 1 h" in cli_status.table(status_with())
    assert [cli_status.duration(s) for s in (5.2, 65, 3700)] == ["5 s", "1 min 5 s", "1 h 1 min"]


def test_a_gpu_has_a_line_that_states_which_way_its_bytes_went():
    store, load = DirectionStatus(dma_bytes=2048), DirectionStatus(dma_bytes=2048, staged_bytes=3)
    gpu = GpuStatus(device="GPU-0", mapped_bytes=1 << 20, store=store, load=load)
    lost = replace(gpu, device="GPU-1", lost="Xid 79")
    lines = cli_status.table(status_with(gpus=[gpu, lost])).splitlines()
    assert (
        "GPU    GPU-0: 1.0 MiB mapped; stored 2.0 KiB by DMA, 0 B staged; loaded 2.0 KiB by DMA, 3 B staged; L1 25.0% pinned"
        in lines
    )
    assert "GPU    GPU-1 is LOST: Xid 79" in lines
