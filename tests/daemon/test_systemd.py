"""`deploy/kvserver.service` under a real systemd, which confines the daemon as the unit states."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import wait_until
from support.systemd import PACKAGES, Machine, missing

ROOT = Path(__file__).parents[2]
MISSING = missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no systemd of its own: {MISSING}")

LOG = "/run/kvserver.log"
# The one change of the unit for all tests: there is no journal.
TO_A_FILE = f"""install -d /etc/systemd/system/kvserver.service.d
printf '[Service]\\nStandardOutput=append:{LOG}\\nStandardError=append:{LOG}\\n' >/etc/systemd/system/kvserver.service.d/log.conf"""
SUDO = 'sudo() { if [ "$1" = -u ]; then setpriv --reuid="$2" --regid="$2" --clear-groups "${@:3}"; else "$@"; fi; }'
WORKER = f"""import sys; sys.path.insert(0, {str(ROOT / "tests")!r})
from support.worker import Worker
Worker("ipc:///run/kvserver/kvserver.sock").round_trip()"""


KEPT = f"""import sys; sys.path.insert(0, {str(ROOT / "tests")!r})
import hashlib
from support.worker import Worker, make_keys
worker, keys = Worker("ipc:///run/kvserver/kvserver.sock"), make_keys(3, "kept")
blocks, found = worker.blocks_for(3), worker.lookup(keys)
if found:
    worker.memory.fill()
    worker.load(keys, blocks)
else:
    worker.store(keys, blocks)
print(found, hashlib.sha256(b"".join(worker.memory.blocks(blocks))).hexdigest())"""


def commands_of_the_readme() -> str:
    """The block of deploy/README.md that installs and starts the unit, with less L1, and without pip."""
    text = (ROOT / "deploy/README.md").read_text().partition("\n## systemd\n")[2]
    lines = text.partition("```sh\n")[2].partition("```")[0].splitlines()
    kept = [line for line in lines if "pip install" not in line]
    assert len(kept) == len(lines) - 1
    return "\n".join(kept).replace("KVSERVER_L1_SIZE=20GiB", "KVSERVER_L1_SIZE=64MiB")


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with contextlib.closing(Machine()) as made:
        made.run(f"{TO_A_FILE}\n{SUDO}\ncd {ROOT}\n{commands_of_the_readme()}")
        yield made


def shown(machine: Machine, name: str) -> str:
    return machine.run(f"systemctl show -P {name} kvserver").strip()


def as_its_user(command: str) -> str:
    return f"{SUDO}\nsudo -u kvserver {command}"


RESTART = (
    "systemctl reset-failed kvserver; systemctl restart kvserver"  # systemd refuses a sixth start within 10 s otherwise
)


def set_up(machine: Machine, *settings: str) -> None:
    """Restart it with these settings beside those of README."""
    lines = "\n".join(("KVSERVER_L1_SIZE=64MiB", *settings))
    machine.run(f"printf '{lines}\n' >/etc/kvserver/environment; {RESTART}", check=False)


def test_the_commands_of_the_readme_start_a_daemon_that_reports_itself_ready(machine: Machine) -> None:
    assert (shown(machine, "ActiveState"), shown(machine, "SubState")) == ("active", "running")
    wait_until(lambda: shown(machine, "StatusText") == "ready")
    assert " ready: " in machine.run(f"cat {LOG}")
    assert shown(machine, "NRestarts") == "0"


def test_an_engine_stores_and_loads_beside_the_confined_daemon(machine: Machine) -> None:
    machine.run(as_its_user(f"/opt/kvserver/bin/python -c {shlex.quote(WORKER)}"))


def test_the_folder_of_the_readmes_file_tier_can_be_written_to(machine: Machine) -> None:
    (url,) = set(re.findall(r"file:///var/lib/kvserver(?=\?)", (ROOT / "README.md").read_text()))
    set_up(machine, f"KVSERVER_L2={url}?size=64MiB")

    def tier() -> dict[str, str]:
        found: dict[str, str] = json.loads(machine.run("/opt/kvserver/bin/kvserver status --json"))["l2"][0]
        return found

    wait_until(lambda: tier()["state"] == "ready", what="the tier is ready")
    assert machine.run("stat -c '%U %a' /var/lib/kvserver").split() == ["kvserver", "700"]


def test_another_folder_is_refused_as_read_only_and_the_unit_stays_failed(machine: Machine) -> None:
    machine.run("install -d -m 700 -o kvserver /opt/kv")
    set_up(machine, "KVSERVER_L2=file:///opt/kv?size=64MiB")
    assert (shown(machine, "ActiveState"), shown(machine, "ExecMainStatus")) == ("failed", "2")
    assert "Read-only file system" in machine.run(f"tail -n 1 {LOG}")
    assert shown(machine, "NRestarts") == "0"


def test_the_part_for_gpus_starts_the_daemon_without_one(machine: Machine) -> None:
    """The devices of a driver are not here; the rest of what it allows is."""
    machine.run(
        f"install -D -m 644 {ROOT}/deploy/kvserver-gpu.conf /etc/systemd/system/kvserver.service.d/gpu.conf; systemctl daemon-reload"
    )
    set_up(machine)
    assert (shown(machine, "ActiveState"), shown(machine, "DevicePolicy")) == ("active", "closed")
    machine.run("rm /etc/systemd/system/kvserver.service.d/gpu.conf; systemctl daemon-reload")


def test_a_required_tier_that_is_down_is_stated_and_does_not_hold_up_the_start(machine: Machine) -> None:
    set_up(machine, "KVSERVER_L2=valkey://127.0.0.1:1/0?required=true")
    assert shown(machine, "ActiveState") == "active"
    wait_until(lambda: shown(machine, "StatusText").startswith("not ready: "))


def test_a_daemon_that_hangs_is_ended_with_its_stacks_in_the_log_and_started_again(machine: Machine) -> None:
    machine.run(
        "printf '[Service]\nWatchdogSec=2\n' >/etc/systemd/system/kvserver.service.d/soon.conf; systemctl daemon-reload"
    )
    set_up(machine)
    first = shown(machine, "MainPID")
    time.sleep(2.5)
    assert shown(machine, "MainPID") == first, "a daemon that reports is left alone"
    machine.run(f"kill -STOP {first}")
    wait_until(lambda: shown(machine, "NRestarts") == "1" and shown(machine, "ActiveState") == "active", 30)
    assert shown(machine, "MainPID") != first
    assert "Fatal Python error: Aborted" in machine.run(f"cat {LOG}")
    assert "loop.py" in machine.run(f"cat {LOG}")


@pytest.mark.parametrize("file", ["fdstore:", "/dev/shm/kvserver/l1"])
def test_restart_of_the_unit_keeps_l1_and_a_stop_frees_what_systemd_keeps(machine: Machine, file: str) -> None:
    def found() -> tuple[int, str]:
        """Chunks that are found, and a digest of their bytes. They are stored if none is."""
        command = as_its_user(f"/opt/kvserver/bin/python -c {shlex.quote(KEPT)}")
        chunks, digest = machine.run(command).split()[-2:]
        return int(chunks), digest

    def adopted() -> bool:
        return "L1 kept 3 chunks" in machine.run(f"tail -n 20 {LOG}")

    set_up(machine, f"KVSERVER_L1_FILE={file}")
    chunks, digest = found()
    assert chunks == 0
    for _ in range(2):
        machine.run(RESTART)
        wait_until(adopted, what="L1 is adopted")
        assert found() == (3, digest)
        machine.run(f": >{LOG}")
    machine.run("systemctl kill -s KILL kvserver")
    wait_until(lambda: "no daemon left a state" in machine.run(f"cat {LOG}"), what="it begins empty after a crash")
    chunks, digest = found()
    assert chunks == 0
    descriptors = 2 if file == "fdstore:" else 0
    assert shown(machine, "NFileDescriptorStore") == str(descriptors)
    machine.run("systemctl stop kvserver")
    assert shown(machine, "NFileDescriptorStore") == "0"
    machine.run("systemctl start kvserver")
    if descriptors:
        assert "L1 begins empty: its file is new" in machine.run(f"cat {LOG}")
        assert found()[0] == 0
    else:
        wait_until(adopted, what="L1 is adopted")
        assert found() == (3, digest)
    machine.run("systemctl stop kvserver; rm -rf /dev/shm/kvserver", check=False)
    set_up(machine)


def test_a_reload_keeps_the_process_and_a_stop_is_a_success(machine: Machine) -> None:
    before = shown(machine, "MainPID")
    machine.run("systemctl reload kvserver; systemctl is-active kvserver")
    assert shown(machine, "MainPID") == before
    machine.run("systemctl stop kvserver")
    assert (shown(machine, "Result"), shown(machine, "ExecMainStatus")) == ("success", "0")


def test_the_venv_of_the_test_runs_the_sources(machine: Machine) -> None:
    """So that the tests above mean something."""
    command = "/opt/kvserver/bin/python -c 'import kvserver; print(kvserver.__file__)'"
    ours = subprocess.run([f"{Path(PACKAGES).parents[2]}/bin/python", "-c", "import kvserver; print(kvserver.__file__)"],
                          capture_output=True, text=True, cwd="/", check=True)  # fmt: skip
    assert machine.run(command) == ours.stdout
