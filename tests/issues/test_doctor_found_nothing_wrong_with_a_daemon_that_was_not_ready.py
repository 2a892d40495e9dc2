"""`kvserver doctor` reported a daemon whose required tier was down as one that answers, and `kvserver status` exited with 0: scripts went on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import faulty_daemon
from support.commands import run
from support.daemon import Daemon, wait_until
from support.doctor import flags, rows
from support.worker import Worker, make_keys


def without_its_folder(make_daemon: Callable[..., Daemon], folder: Path, parameters: str = "") -> Daemon:
    daemon = make_daemon(l2=f"file://{folder}/l2?size=16MiB{parameters}")
    (folder / "l2").rename(folder / "moved")
    wait_until(lambda: daemon.tier()["state"] == "unavailable", what="the tier is unavailable")
    return daemon


def test_a_required_tier_that_is_down_is_in_doctor_status_and_top_and_their_exit_codes(make_daemon, tmp_path):
    daemon = without_its_folder(make_daemon, tmp_path, "&required=true")
    reason = daemon.http("/readyz")[1].strip()
    assert "required tier" in reason
    code, found = rows(*flags(daemon))
    assert (code, found["daemon"]["level"], found["storage"]["level"]) == (1, "problem", "problem")
    assert f"is NOT READY: {reason}" in found["daemon"]["text"]
    assert "becomes ready by itself" in found["daemon"]["fix"]
    assert f"the daemon's file://{tmp_path}/l2: unavailable: " in found["storage"]["text"]
    where = ["--http-port", str(daemon.http_port)]
    status, shown = run("status", *where), run("status", "--json", *where)
    assert (status.returncode, shown.returncode) == (3, 3)
    assert f"NOT READY  {reason}" in status.stdout
    assert json.loads(shown.stdout)["not_ready"] == reason
    assert "NOT READY  the required tier" in run("top", "--once", *where).stdout


def test_a_tier_that_is_not_required_is_a_warning_and_the_daemon_is_ready(make_daemon, tmp_path):
    daemon = without_its_folder(make_daemon, tmp_path)
    _, found = rows(*flags(daemon))
    assert (found["daemon"]["level"], found["storage"]["level"]) == ("ok", "warning")
    status = run("status", "--http-port", str(daemon.http_port))
    assert (status.returncode, "NOT READY" in status.stdout) == (0, False)


@pytest.mark.parametrize(("arguments", "code"), [([], 1), (["--http-port", "many"], 2)])
def test_status_without_a_daemon_and_with_a_bad_argument_has_other_codes(arguments, code):
    assert run("status", "--http-port", "1", *arguments).returncode == code


def test_status_of_a_loop_that_hangs_exits_as_not_ready_and_doctor_blames_no_token(make_daemon):
    method = "kvserver.server.lookups.L1Lookups.answer"
    daemon = make_daemon(program=(sys.executable, faulty_daemon.__file__, method, "hang"))
    worker = Worker(daemon.endpoint)
    worker.send(worker.lookup_message(make_keys(1)))
    wait_until(lambda: daemon.http("/readyz")[0] == 503, 60, "the loop has not turned for a while")
    ended = run("status", "--http-port", str(daemon.http_port))
    assert (ended.returncode, "503" in ended.stderr) == (3, True)
    assert "token" not in rows(*flags(daemon))[1]["HTTP port"]["text"]
    worker.close()
