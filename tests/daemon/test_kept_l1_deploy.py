"""deploy/: what makes a new container of the daemon find the L1 of the last one, carried out without containers."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from support.containers import NEWEST, OVERLAYS, container, with_component
from support.daemon import Daemon
from support.kept_l1 import hits, restart, store_prompt

from kvserver.config import field_types, variable

DEPLOY = OVERLAYS.parents[1]
Make = Callable[..., Daemon]
LEAST_END_SECONDS = 45  # the unit's TimeoutStopSec, too


@pytest.fixture
def shm() -> Iterator[Path]:
    """Folder on tmpfs that stands for one of the node's /dev/shm."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def keeps_l1(make_daemon: Make, path: Path) -> bool:
    daemon = make_daemon(l1_file=path)
    prompt = store_prompt(daemon)
    restart(daemon)
    return hits(daemon, prompt) == 3


@pytest.mark.parametrize("base", ["node", "node-gpu"])
def test_component_for_a_kept_l1_gives_the_daemon_a_folder_of_the_nodes_memory(
    base: str, tmp_path: Path, shm: Path, make_daemon: Make
) -> None:
    objects = with_component(tmp_path, f"overlays/{base}", "components/kept-l1")
    for found in objects:
        for version in ("1.29", NEWEST):
            kubernetes_validate.validate(found, version, strict=True)
    daemon, first = container(objects, "kvserver"), container(objects, "l1-folder")
    assert daemon.pod["terminationGracePeriodSeconds"] >= LEAST_END_SECONDS
    (volume,) = (volume["hostPath"] for volume in daemon.pod["volumes"] if volume["name"] == "l1")
    assert volume["path"].startswith("/dev/shm/")
    where = daemon.mounts["l1"]["mountPath"]
    assert first.mounts["l1"]["mountPath"] == where
    assert {"socket", "http-token"} < daemon.mounts.keys(), "what it had is still there"
    path = Path(daemon.environment["KVSERVER_L1_FILE"].replace(where, str(shm), 1))
    if os.getuid() == 0:  # only root can give a folder away
        few = ["setpriv", "--bounding-set=-all,+chown", "--inh-caps=-all", "--no-new-privs"]
        for _ in range(2):  # a second pod finds the folder of the first
            subprocess.run(
                [*few, *(w.replace(where, str(shm)) for w in first.spec["command"])], check=True, timeout=120
            )
        found = path.parent.stat()
        owner = daemon.setting("runAsUser"), daemon.setting("runAsGroup"), 0o700
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == owner
    assert keeps_l1(make_daemon, path)


def test_compose_file_for_a_kept_l1_gives_the_daemon_a_folder_of_the_machines_memory(
    shm: Path, make_daemon: Make
) -> None:
    services = yaml.safe_load((DEPLOY / "compose.kept-l1.yaml").read_text())["services"]
    assert services.keys() == {"kvserver"}, "the rest is compose.yaml's"
    service = services["kvserver"]
    assert int(service["stop_grace_period"].removesuffix("s")) >= LEAST_END_SECONDS
    assert service["environment"].keys() <= {variable(name) for name in field_types()}
    ((source, target),) = (volume.split(":") for volume in service["volumes"])
    assert source.startswith("/dev/shm/")
    assert keeps_l1(make_daemon, Path(service["environment"]["KVSERVER_L1_FILE"].replace(target, str(shm), 1)))
